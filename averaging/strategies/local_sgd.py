"""Local SGD: the parameters are averaged every few steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from averaging.common import is_count
from averaging.errors import ConfigError, RoundError, StateError
from averaging.matchmaking import Quorum
from averaging.peer import Adopt, RoundOptions, Topic, TopicOptions
from averaging.protocol import CompressionType
from averaging.receipts import DriftCheck, Receipt
from averaging.state import ExtraState
from averaging.strategies.base import Due, Strategy
from averaging.strategies.diloco import PLAIN, DiLoCo
from averaging.strategies.quorum import Attendance, Event, Standstill, Timeliness
from averaging.strategies.schedule import Schedule, make_schedule
from averaging.tensors import HostCopies, is_on_device, on_cpu, sent, sharing_memory
from averaging.training import (
    BackgroundDownload,
    Others,
    PendingRound,
    StrategyContext,
    count_in,
    most_rounds,
    still_training,
)

logger = logging.getLogger("averaging.training")

# Averaging while training goes on: copies are averaged, and their change is added when the round ends.


class DelayedUpdate:
    """Trained tensors with the copies of them that a round averages.

    Args:
        tensors: the tensors by name.
        kinds: names of the statistics and buffers, grouped by kind; any kind may consist of second moments.

    Attributes:
        copies: copies on the CPU, by name; after a round they hold the average minus what was sent.
        sent: what was sent of parameters and second moments, by name; None until the copies are complete.
        waits: whether they come from a device while training goes on; `complete` waits for them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, Sequence[str]]) -> None:
        self._tensors, self._kinds = dict(tensors), kinds
        self._host = HostCopies(list(tensors.values()))
        self.copies = dict(zip(tensors, self._host.copies, strict=True))
        self.waits = any(map(is_on_device, tensors.values()))
        self._host.begin()
        self._host.wait()
        tied = sharing_memory(list(tensors.values()))
        self._tied = [name for place, name in enumerate(tensors) if place in tied]
        self.sent: dict[str, torch.Tensor] | None = None
        self._moments: Collection[str] = ()

    def copy(self) -> None:
        """Copies the present tensors, right before they are sent; those on a device begin to be copied."""
        self.sent = None
        self._host.begin(keep=True)
        if not self.waits:
            self.complete()

    def complete(self) -> None:
        """Waits until the copies are complete."""
        self._host.wait()
        if self.sent is None:
            self._moments = frozenset(_moments(self._kinds.values(), self.copies))
            others = {name for names in self._kinds.values() for name in names} - self._moments
            self.sent = {name: copied.clone() for name, copied in self.copies.items() if name not in others}

    @torch.no_grad()
    def add(self) -> None:
        """Adds the change to the present tensors. The caller holds their lock."""
        was = {name: self._tensors[name].clone() for name in self._tied}  # tied tensors before any of them is written
        values = self.sent or {}
        changes = sent(self._host.copies, list(self._tensors.values()))
        for (name, tensor), change in zip(self._tensors.items(), changes, strict=True):
            result = was.get(name, tensor)
            if name in self._moments and bool((result >= 0).all()):
                _add_to_moment(result, change, values[name].to(tensor.device))
            else:
                result.add_(change)
            if name in was:
                tensor.copy_(result)

    def averages(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: (self.sent or {})[name] + self.copies[name] for name in names}


def _moments(kinds: Iterable[Sequence[str]], sent: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the second moments: a kind whose values are at least 0 for every parameter counts as one.

    The kind matters, since the momentum of a single parameter may be positive by chance.
    """
    moments = [names for names in kinds if all(bool((sent[name] >= 0).all()) for name in names)]
    return [name for names in moments for name in names]


def _add_to_moment(moment: torch.Tensor, change: torch.Tensor, sent: torch.Tensor) -> None:
    """Adds a late change to a second moment so that it stays at least 0.

    The moment has decayed since it was `sent`, and the change would have decayed with it. Since squares of gradients
    only add to the moment, at most the fraction `moment / sent` of the change is left.
    """
    left = torch.where(sent > moment, moment / sent, 1.0)
    moment.add_(change * left).clamp_(min=0)


WITHOUT_CHANGES = {
    "outer": "use DiLoCo(sync_every, outer=...) to choose an outer optimizer",
    "overlap": "set delay to the number of local steps for which training goes on during a round",
    "statistics": "the statistics of the optimizer stay those of each peer, so leave it out",
}
"""What `LocalSGD.of_changes` refuses, and what to do instead."""


class LocalSGD(Strategy):
    """Each peer trains alone; after `sync_every` steps the parameters are averaged (Stich, 2018, arXiv:1805.09767).

    The training thread waits for the round, unless `overlap` is set. A peer that is alone goes on at once. If a round
    fails, the next one is `sync_every` later.

    Args:
        sync_every: local steps between two rounds, at least 1; or a time, such as "60s": then all peers average at the
            multiples of it by the clock of the run, with the steps that each has made.
        statistics: whether the optimizer's statistics (momentum, second moments) are averaged as well. All peers of a
            group must have the same ones; a parameter that had no gradient yet has none. They are never compressed,
            since the optimizer would divide by the rounding error of a small second moment.
        overlap: whether training goes on during the round. The training thread only copies the tensors. When the round
            ends, the change (average minus what was sent) is added to the parameters. For second moments and running
            variances the change is reduced by as much as they have decayed since.
        compression, error_feedback, max_norm: see `Strategy`.
        quorum: see `Strategy`. A peer that has missed rounds takes over the parameters of one that has not, in the
            background and with the change of its own steps on top, before it takes part in the next one. It keeps a
            copy of the parameters on the CPU for that.
        grace, staleness_discount: see `Strategy`.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        sync_every: int | str,
        *,
        statistics: bool = False,
        overlap: bool = False,
        compression: CompressionType | str | None = None,
        error_feedback: bool = False,
        max_norm: float | None = None,
        quorum: int | float | None = None,
        grace: float | str | None = None,
        staleness_discount: float | None = None,
    ) -> None:
        super().__init__(
            compression=compression,
            error_feedback=error_feedback,
            max_norm=max_norm,
            quorum=quorum,
            grace=grace,
            staleness_discount=staleness_discount,
        )
        self._schedule: Schedule = make_schedule(sync_every)
        self.sync_every = sync_every
        self.statistics = statistics
        self.overlap = overlap
        self._topic: Topic | None = None
        self._averaged: list[torch.Tensor] = []
        self._delayed: DelayedUpdate | None = None  # with `overlap`
        self._pending: PendingRound | None = None
        self._parameters: Mapping[str, torch.Tensor] = {}
        self._base: dict[str, torch.Tensor] = {}  # the parameters after the last round, with a quorum
        self._rounds, self._open_steps = 0, 0  # rounds that the parameters hold, and the local steps since
        self._bases = 0.0  # sum over these steps of the rounds that the parameters held then
        self._fetch: BackgroundDownload | None = None
        self._quorum: Quorum | None = None  # of the last round
        self._missing: Mapping[str, bytes] = {}  # last announcements of the peers that it lacked
        self._replaced = False  # whether the parameters were loaded since the pending round began
        self._announcements: Mapping[str, bytes] = {}  # those read last
        self._averaged_in = ""  # group that has averaged the parameters, until the next step changes them
        self._alike: DriftCheck | None = None  # of the parameters after the last complete round

    @staticmethod
    def of_changes(sync_every: int | str, **options: Any) -> DiLoCo:
        """Local SGD in which the change since the last round is averaged and applied, instead of the parameters.

        That is `DiLoCo` with the outer optimizer SGD, `lr=1`, without momentum. Changes only make peers equal that were
        equal before, so the peers make global steps together, as in `DiLoCo`, and one that has missed a step takes over
        the state of another. Buffers are averaged as values; the optimizer's statistics are not.

        Args:
            sync_every: see `DiLoCo`.
            options: those of `DiLoCo` besides `outer`, such as `compression="top_k"`.

        Raises:
            ConfigError: an argument is invalid.
        """
        for option, remedy in WITHOUT_CHANGES.items():
            if option in options:
                raise ConfigError(f"{option} does not go with LocalSGD.of_changes; {remedy}")
        return DiLoCo(sync_every, outer=PLAIN, **options)

    def __repr__(self) -> str:
        flags = "".join(f", {name}=True" for name in ("statistics", "overlap") if getattr(self, name))
        return f"LocalSGD(sync_every={self.sync_every!r}{flags}{self._options()})"

    @property
    def _late(self) -> int | None:
        return self._rounds if self.quorum else None

    def start(self, training: StrategyContext) -> None:
        """Creates the topic, unless the optimizer's state is in it: that exists only after the first gradients."""
        self._check_quorum(training)
        self._parameters = training.parameters
        if not self._averages_state(training):
            self._make_topic(training)

    def joined(self, training: StrategyContext) -> None:
        """Drops a topic of statistics, which a loaded state replaces, and a pending change, as `load` does."""
        self._bases = 0.0
        self._base, self._open_steps, self._attendance = self._copied(), 0, Attendance()
        super().joined(training)
        self._replaced, self._averaged_in = True, ""
        if self._averages_state(training):
            self._topic = None

    def step(
        self, training: StrategyContext, closure: Callable[[], float] | None = None, batch_size: int | None = None
    ) -> float | None:
        """One local step, and a round if one is due.

        Before the first step after a round, the parameters are those of all its members.
        """
        if self._averaged_in:
            group, self._averaged_in = self._averaged_in, ""
            self._alike = training.fingerprint(training.parameters, group, int(group[:8], 16))
        loss = training.inner_step(closure, self.max_norm)
        self._count(training)
        self._open_steps, self._bases = self._open_steps + 1, self._bases + self._rounds
        topic, due = self._due_topic(training)
        if topic is not None and due is not None and self._has_caught_up(training):
            self._average(training, topic, due)
        self._go_on(training, training.standing.rounds, in_round=self._pending is not None)
        return loss

    def _average(self, training: StrategyContext, topic: Topic, due: Due) -> None:
        self._schedule.restart()  # before the round, whose result newcomers get together with the steps since it
        options: RoundOptions = {"expected_peers": self._at_moment(still_training, due.moment)}
        options.update(self._quorum_of_round(training, topic, due))
        if self._alike is not None:
            options["drift"] = self._alike
        if due.moment:
            self._tell(training, due.moment)
            if due.nobody:
                options["search_timeout"] = 0.0
        if self._delayed is not None:
            self._delayed.copy()
            self._replaced = False
            self._pending = training.begin(topic, after=due.after, **options)
        else:
            self._end_round(training, training.average(topic, after=due.after, **options))

    def _due_topic(self, training: StrategyContext) -> tuple[Topic | None, Due | None]:
        """What is averaged now, if a round is due; applies the result of the round before."""
        topic = self._topic or self._make_topic(training)
        others, due = training.site.broadcast_from_leader(lambda: (self._claims(training), self._due(training, topic)))
        if others is not None and self.catch_up(training, others):
            return None, None
        if self._pending is not None:
            if not training.is_over(self._pending):
                return None, None
            self._apply(training, self._pending)
            due = training.site.broadcast_from_leader(lambda: self._due(training, topic))
        if due is not None and self._averages_state(training):
            topic = self._current_topic(training, topic)
        return topic, due

    # With a quorum, some rounds begin without this peer.

    def _has_caught_up(self, training: StrategyContext) -> bool:
        """Whether this peer has the parameters of the last round, or cannot get them; begins to download them if not.

        Training goes on during the download, and the round that is due begins after it.
        """
        if self.quorum is None:
            return True
        seen = training.announcements.of_others(wait=False)
        rounds, donors = most_rounds(self.history, seen)
        if self._fetch is None:
            self._attend(Event.MISSED if rounds > self._rounds and donors else Event.LEVEL)
        self.missed = 0 if self._attendance.timeliness is Timeliness.REBASED else max(0, rounds - self._rounds)
        if self._attendance.timeliness is not Timeliness.LATE:
            return True
        if self._fetch is None:
            self._fetch = training.states.fetch(donors[: training.peer.config.verify_donors])
        fetch, until = self._fetch, self._fetch.began + training.peer.config.round_timeout
        if not training.site.broadcast_from_leader(fetch.done):
            if not training.site.broadcast_from_leader(lambda: training.monotonic() > until):
                return False
            training.states.cancel(fetch)
        self._fetch = None
        self._attend(Event.REBASED)  # or has tried to
        self._rebase(training, fetch)
        return True

    @torch.no_grad()
    def _rebase(self, training: StrategyContext, fetch: BackgroundDownload) -> None:
        since = self._schedule.steps
        change = {name: on_cpu(tensor) - self._base[name] for name, tensor in training.parameters.items()}
        try:
            training.take_over(fetch)
        except (StateError, RoundError) as error:
            logger.info("takes part in the next round with its own parameters, since no newer ones came: %s", error)
            return
        self._schedule.steps = since
        self._base = self._copied()
        with training.locked(), training.changing_parameters():
            for name, tensor in training.parameters.items():
                tensor.add_(change[name].to(tensor.device, tensor.dtype))

    def _copied(self) -> dict[str, torch.Tensor]:
        if self.quorum is None:
            return {}
        return {name: value.detach().to("cpu", copy=True) for name, value in self._parameters.items()}

    def _quorum_of_round(self, training: StrategyContext, topic: Topic, due: Due) -> RoundOptions:
        quorum = self._next_quorum(training, once=False)
        if self.quorum is None or quorum is None:
            return {}
        self._quorum = quorum
        self.announce(training)  # who was missing in the last round is expected again
        rounds, _ = most_rounds(self.history, training.announcements.of_others(wait=False))
        rounds = max(rounds, self._rounds)
        age = int(rounds - self._bases / self._open_steps) if self._open_steps else rounds - self._rounds
        factor = self.quorum.weight_factor(age)
        missing = self._missing

        def expected(seen: Mapping[str, bytes]) -> Collection[str]:
            return [name for name in still_training(seen) if missing.get(name) != seen[name]]

        return {
            "expected_peers": self._at_moment(expected, due.moment),
            "quorum": quorum,
            "weight": training.weight_of(topic) * factor,
            "gather": {
                "round": rounds,
                "steps": self._open_steps,
                "age": age,
                "discount": factor,
                "quorum": quorum.pack(),
                **training.unit,
            },
        }

    def _note_round(self, training: StrategyContext, receipt: Receipt) -> None:
        """Notes what a round of this peer with a quorum says of the others."""
        if not receipt.averaged:
            self._stands_still(f"its last round failed: {receipt.reason}", failed=1)
        if self._quorum is None or not receipt.averaged:
            return
        self._punctuality.note(receipt, self._quorum)
        users = [user for user in receipt.gathered.values() if isinstance(user, dict)]
        self._rounds = 1 + max((user["round"] for user in users if is_count(user.get("round"))), default=self._rounds)
        self._open_steps, self.missed = self._schedule.steps, 0
        self._attend(Event.AVERAGED)
        self._bases = float(self._open_steps * self._rounds)
        if self._delayed is None:
            self._base = self._copied()
        present = {account.endpoint for account in receipt.accounts if not account.age}
        seen = training.announcements.of_others(wait=False)
        self._missing = {name: progress for name, progress in seen.items() if name not in present}

    def state(self) -> ExtraState:
        """The local steps since the last round."""
        rounds = {} if self.quorum is None else {"rounds": self._rounds}
        return ExtraState({}, {"since": self._schedule.steps, **rounds})

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        """Loads the step count; a pending change belongs to other parameters and is not added."""
        self._schedule.steps = count_in(user, "since")
        if self.quorum is not None and is_count(rounds := user.get("rounds")):
            self._rounds = rounds
        self._replaced, self._averaged_in = True, ""

    def _claims(self, training: StrategyContext) -> Others | None:
        announcements = training.announcements.of_others(wait=False)
        if announcements is self._announcements and not self._downloads.busy:
            return None
        self._announcements = announcements
        others = self.others(training, announcements)
        self._downloads.note_refused(self.announced_history(training), others, training.monotonic())
        return others if others.ahead or self._downloads.busy else None

    def finish(self, training: StrategyContext) -> None:
        """Waits for the round in progress and adds its change."""
        if self._fetch is not None:
            training.states.cancel(self._fetch)
            self._fetch = None
        self._averaged_in = ""  # `average_now` may follow
        if self._pending is not None:
            self._apply(training, self._pending)

    def conclude(self, training: StrategyContext, partners: Collection[str], timeout: float) -> Receipt | None:
        """Averages the parameters a last time, so that all peers end with the same ones."""
        training.modes.eval()
        tensors = training.tensors | training.iterates()
        topic = training.topic("", tensors, adopt=Adopt.WHOLE, compression=self.compression)
        return self._average_at_the_end(training, topic, timeout)

    def _averages_state(self, training: StrategyContext) -> bool:
        return self.statistics or training.modes.exist

    def _tensors(self, training: StrategyContext) -> dict[str, torch.Tensor]:
        return training.tensors | (training.statistics() if self.statistics else training.iterates())

    def _make_topic(self, training: StrategyContext) -> Topic:
        tensors = self._tensors(training)
        self._averaged = list(tensors.values())
        options: TopicOptions = {"compression": self.compression, "error_feedback": self.error_feedback}
        if self.overlap:
            # In the topic of the peer's own tensors, so that peers without `overlap`, and auxiliaries, join too.
            self._delayed = DelayedUpdate(tensors, _kinds(training, tensors))
            options["adopt"] = Adopt.CHANGE
            self._topic = training.topic("", self._delayed.copies, **options)
            self._topic.tensors.before_reading = self._delayed.complete if self._delayed.waits else None
        else:
            # StrategyContext waits for the round, so nothing reads the tensors while only some of them are averaged.
            options["in_place"] = True
            self._topic = training.topic("", tensors, **options)
        self._topic = self._topic.sending_exactly(tensors.keys() - training.tensors.keys() - training.iterates().keys())
        return self._topic

    def _current_topic(self, training: StrategyContext, topic: Topic) -> Topic:
        """The topic, recreated if the optimizer has added or replaced tensors of its state."""
        present = self._tensors(training)
        same = [id(tensor) for tensor in present.values()] == [id(tensor) for tensor in self._averaged]
        return topic if same else self._make_topic(training)

    def _end_round(self, training: StrategyContext, receipt: Receipt) -> None:
        """Announces the progress; the parameters of a peer that is alone become the state that newcomers get."""
        training.announcements.refresh()  # cached declarations belong to the round that has ended
        self._note_round(training, receipt)
        training.announcements.announce(self.progress(training).pack(), soon=False)
        # A round that was overlapped, or lacks a part, leaves its members with different parameters. So do deltas.
        is_alike = receipt.averaged and receipt.digest and not receipt.kept_local and self._delayed is None
        self._averaged_in = receipt.group_id.hex() if is_alike else ""
        if not receipt.averaged and training.announcements.none_known:
            self._standstill = Standstill()
            with training.replacing():
                return

    def _apply(self, training: StrategyContext, pending: PendingRound) -> None:
        try:
            receipt = training.receipt_of(pending)
        finally:
            if pending.done():  # a KeyboardInterrupt ends the wait, not the round
                self._pending = None
        self._end_round(training, receipt)
        if not receipt.averaged or self._replaced or self._delayed is None:
            return
        # Newcomers get the average itself: the local steps since it was begun are sent by this peer in the next round.
        with training.replacing():
            with training.copies.following():
                self._delayed.add()
            present = {name: tensor.clone() for name, tensor in self._parameters.items()}
            average = self._delayed.averages(self._parameters)
            _write(training, average)
        with training.locked():
            _write(training, present)
        if self.quorum is not None:
            self._base = average


@torch.no_grad()
def _write(training: StrategyContext, values: Mapping[str, torch.Tensor]) -> None:
    with training.changing_parameters():
        for name, value in values.items():
            training.parameters[name].copy_(value)


def _kinds(training: StrategyContext, tensors: Iterable[str]) -> dict[str, list[str]]:
    """The names of statistics and buffers, grouped by kind, such as `exp_avg_sq` or `running_var`."""
    kinds: dict[str, list[str]] = {}
    iterates = training.iterates()
    for name in tensors:
        if name not in training.parameters and name not in iterates:
            kind = name.rpartition(".")[2] if name in training.buffers else name.partition("/")[0]
            kinds.setdefault(kind, []).append(name)
    return kinds
