"""Local SGD: the parameters are averaged every few steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Unpack

import torch

from averaging.errors import ConfigError
from averaging.peer import Adopt, RoundOptions, Topic, TopicOptions
from averaging.protocol import Statement
from averaging.receipts import DriftCheck, Receipt
from averaging.state import ExtraState
from averaging.strategies.base import Due, Strategy, StrategyOptions, average_at_the_end, common_options, now_of
from averaging.strategies.diloco import PLAIN, DiLoCo
from averaging.strategies.schedule import Schedule, Standstill, make_schedule
from averaging.tensors import HostCopies, is_on_device, sent, sharing_memory
from averaging.training import (
    Others,
    PendingRound,
    StrategyContext,
    count_in,
    still_training,
)

logger = logging.getLogger("averaging.training")

SECOND_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum"})
"""What torch's optimizers call their statistics of squared gradients; all other statistics count as first moments."""

# Averaging while training goes on: copies are averaged, and their change is added when the round ends.


class DelayedUpdate:
    """Trained tensors, by name, with the copies of them that a round averages.

    `kinds` has the names of the statistics and buffers, grouped by kind; any kind may consist of second moments.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, Sequence[str]]) -> None:
        self._tensors, self._kinds = dict(tensors), kinds
        self._host = HostCopies(list(tensors.values()))
        # On the CPU; after a round they hold the average minus what was sent.
        self.copies = dict(zip(tensors, self._host.copies, strict=True))
        self.waits = any(map(is_on_device, tensors.values()))  # `complete` waits for copies from a device
        self._host.begin()
        self._host.wait()
        tied = sharing_memory(list(tensors.values()))
        self._tied = [name for place, name in enumerate(tensors) if place in tied]
        # What was sent of parameters and second moments; None until the copies are complete.
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
        statistics_every: with `statistics`, rounds of the parameters between two averages of the first moments, and of
            the second moments, such as (3, 6), or one number for both (DES-LOC, Iacob et al., 2025, arXiv:2505.22549);
            the same at all peers. By default each round has both. Second moments are those that `SECOND_MOMENTS` names.
        overlap: whether training goes on during the round. The training thread only copies the tensors. When the round
            ends, the change (average minus what was sent) is added to the parameters. For second moments and running
            variances the change is reduced by as much as they have decayed since.
        compression, error_feedback, max_norm: see `Strategy`.
        quorum, grace, staleness_discount: see `Strategy`. With a quorum changes are averaged, see `of_changes`.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __new__(cls, *sync_every: Any, **options: Any) -> Any:
        # A peer that has missed rounds cannot average its parameters with newer ones, but the change of its own steps.
        if all(options.get(name) is None for name in ("quorum", "grace", "staleness_discount")):
            return super().__new__(cls)
        return cls.of_changes(*sync_every, **options)

    def __init__(
        self,
        sync_every: int | str,
        *,
        statistics: bool = False,
        statistics_every: int | tuple[int, int] | None = None,
        overlap: bool = False,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(**options)
        self.statistics_every = _statistics_every(statistics_every, statistics=statistics, overlap=overlap)
        self._with_parameters = statistics and self.statistics_every is None  # in each of their rounds
        self._rounds = 0  # of the parameters, as the members of the last one agree; with `statistics_every`
        self._schedule: Schedule = make_schedule(sync_every)
        self.sync_text = str(self._schedule)
        self.sync_every = sync_every
        self.statistics = statistics
        self.overlap = overlap
        self._topic: Topic | None = None
        self._averaged: list[torch.Tensor] = []
        self._delayed: DelayedUpdate | None = None  # with `overlap`
        self._pending: PendingRound | None = None
        self._replaced = False  # whether the parameters were loaded since the pending round began
        self._announcements: Mapping[str, bytes] = {}  # those read last
        self._averaged_in = ""  # group that has averaged the parameters, until the next step changes them
        self._alike: DriftCheck | None = None  # of the parameters after the last complete round

    @staticmethod
    def of_changes(sync_every: int | str, **options: Any) -> DiLoCo:
        """Local SGD in which the change since the last round is averaged and applied, instead of the parameters.

        That is `DiLoCo`, whose options it takes, with the outer optimizer SGD, `lr=1`, without momentum. Changes only
        make peers equal that were equal before, so the peers make global steps together, as in `DiLoCo`, and one that
        has missed a step takes over the state of another. Buffers are averaged as values; the statistics of the
        optimizer are not. It raises ConfigError if an option is invalid.
        """
        for option in ("outer", "overlap", "statistics", "statistics_every"):
            if options.pop(option, None):
                text = "use DiLoCo with another outer optimizer or a delay, or leave it out"
                raise ConfigError(f"{option} does not go with LocalSGD.of_changes; {text}")
        return DiLoCo(sync_every, outer=PLAIN, **options)

    def __repr__(self) -> str:
        flags = "".join(f", {name}=True" for name in ("statistics", "overlap") if getattr(self, name))
        flags += f", statistics_every={self.statistics_every}" if self.statistics_every else ""
        return f"LocalSGD(sync_every={self.sync_every!r}{flags}{common_options(self)})"

    def terms(self, training: StrategyContext) -> Mapping[str, str]:
        first, second = self.statistics_every or (1, 1)
        seldom = {"statistics_every": f"{first} and {second}"} if self.statistics else {}
        return {**super().terms(training), **seldom}

    def start(self, training: StrategyContext) -> None:
        """Creates the topic, unless the optimizer's state is in it: that exists only after the first gradients."""
        if not self._averages_state(training):
            self._make_topic(training)

    def joined(self, training: StrategyContext) -> None:
        """Drops a topic of statistics, which a loaded state replaces, and a pending change, as `load` does."""
        super().joined(training)
        self._replaced, self._averaged_in = True, ""
        if self._averages_state(training):
            self._topic = None

    def step(
        self, training: StrategyContext, closure: Callable[[], float] | None = None, batch_size: int | None = None
    ) -> float | None:
        """Before the first step after a round, the parameters are those of all its members."""
        if self._averaged_in:
            group, self._averaged_in = self._averaged_in, ""
            self._alike = training.fingerprint(training.parameters, group, int(group[:8], 16))
        loss = training.inner_step(closure, self.max_norm)
        self._schedule.count(now_of(self._schedule, training))
        topic, due = self._due_topic(training)
        if topic is not None and due is not None:
            self._average(training, topic, due)
        self._go_on(training, training.standing.rounds, in_round=self._pending is not None)
        return loss

    def _average(self, training: StrategyContext, topic: Topic, due: Due) -> None:
        self._schedule.restart()  # before the round, whose result newcomers get together with the steps since it
        options: RoundOptions = {"expected_peers": due.at_moment(still_training)}
        if self._alike is not None:
            options["drift"] = self._alike
        if self.statistics_every:
            options["gather"] = Statement(unit=training.weights.unit, rounds=self._rounds).pack()
        if due.moment:
            self._tell(training, due.moment)
            if due.nobody:
                options["search_timeout"] = 0.0
        if self._delayed is not None:
            self._delayed.copy()
            self._replaced = False
            self._pending = training.begin(topic, after=due.after, **options)
        else:
            receipt = training.average(topic, after=due.after, **options)
            self._end_round(training, receipt)
            if self.statistics_every and receipt.averaged:
                self._average_statistics(training, receipt, self.statistics_every)

    def _average_statistics(self, training: StrategyContext, receipt: Receipt, every: tuple[int, int]) -> None:
        """Averages the statistics that are due with the members of a round, in rounds of their own.

        Its members know alike how many rounds each has counted, so they agree on what is due: a newcomer, or a peer
        that has missed rounds, counts on from the largest number.
        """
        counts = {name: Statement.read(sent).rounds for name, sent in receipt.gathered.items()}
        self._rounds = 1 + max((count for count in counts.values() if count is not None), default=self._rounds)
        lost = {member.endpoint for member in receipt.dropped}
        members = {name for name, count in counts.items() if count is not None and name not in lost}
        iterates = training.iterates()
        statistics = [(name, tensor) for name, tensor in training.statistics().items() if name not in iterates]
        for second, rounds in enumerate(every):
            tensors = {name: tensor for name, tensor in statistics if _is_second(name) == bool(second)}
            if self._rounds % rounds == 0 and tensors and len(members) > 1:
                topic = training.topic(f"statistics-{second + 1}", tensors, compression="none", commits=True)
                expected = partial(_of_members, members)
                training.average(topic, phase=receipt.group_id.hex()[:16], expected_peers=expected)

    def _due_topic(self, training: StrategyContext) -> tuple[Topic | None, Due | None]:
        """What is averaged now, if a round is due; applies the result of the round before."""
        topic = self._topic or self._make_topic(training)
        others, due = training.site.broadcast_from_leader(lambda: self._look(training, topic))
        if others is not None and self.catch_up(training, others):
            return None, None
        if self._pending is not None:
            if not training.is_over(self._pending):
                return None, None
            self._apply(training, self._pending)
            due = training.site.broadcast_from_leader(
                lambda: self._due(training, topic, training.announcements.at_leader(wait=False))
            )
        if due is not None and self._averages_state(training):
            topic = self._current_topic(training, topic)
        return topic, due

    def state(self) -> ExtraState:
        rounds = {"rounds": self._rounds} if self.statistics_every else {}
        return ExtraState({}, {"since": self._schedule.steps, **rounds})

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        """Loads the counts; a pending change belongs to other parameters and is not added."""
        since, self._rounds = count_in(user, "since"), count_in(user, "rounds")
        self._schedule.steps = since
        self._replaced, self._averaged_in = True, ""

    def _look(self, training: StrategyContext, topic: Topic) -> tuple[Others | None, Due | None]:
        """The other peers, if the state of one has to be taken over, and the round, if it is due."""
        seen, others = training.announcements.at_leader(wait=False), None
        if seen is not self._announcements or self._downloads.busy:
            self._announcements, found = seen, self.others(training, seen)
            others = found if found.ahead or self._downloads.busy else None
        return others, self._due(training, topic, seen)

    def finish(self, training: StrategyContext) -> None:
        self._averaged_in = ""  # `average_now` may follow
        if self._pending is not None:
            self._apply(training, self._pending)

    def conclude(self, training: StrategyContext, partners: Collection[str], timeout: float) -> Receipt | None:
        """Averages the parameters a last time, so that all peers end with the same ones."""
        training.modes.eval()
        tensors = training.tensors | training.iterates()
        topic = training.topic("", tensors, adopt=Adopt.WHOLE, compression=self.compression)
        return average_at_the_end(training, topic, timeout)

    def _averages_state(self, training: StrategyContext) -> bool:
        return self._with_parameters or training.modes.exist

    def _tensors(self, training: StrategyContext) -> dict[str, torch.Tensor]:
        return training.tensors | (training.statistics() if self._with_parameters else training.iterates())

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
        if not receipt.averaged:
            self._standstill.reason = f"its last round failed: {receipt.reason}"
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
            present = {name: tensor.clone() for name, tensor in training.parameters.items()}
            _write(training, self._delayed.averages(training.parameters))
        with training.locked():
            _write(training, present)


def _statistics_every(
    every: int | tuple[int, int] | None, *, statistics: bool, overlap: bool
) -> tuple[int, int] | None:
    """The checked option; None if each round has all statistics."""
    if every is None:
        return None
    match (every, every) if isinstance(every, int) else every:
        case [int(first), int(second)] if min(first, second) >= 1 and bool not in (type(first), type(second)):
            pair = first, second
        case _:
            raise ConfigError(
                "statistics_every must be two whole numbers of rounds, at least 1, such as (3, 6) for the first and "
                f"the second moments, or one for both, not {every!r:.100}"
            )
    if not statistics:
        raise ConfigError("statistics_every needs statistics=True; set it, or leave statistics_every out")
    if overlap and pair != (1, 1):
        raise ConfigError("statistics_every does not go with overlap; leave one of them out")
    return None if pair == (1, 1) else pair


def _is_second(name: str) -> bool:
    return name.partition("/")[0] in SECOND_MOMENTS


def _of_members(members: Set[str], seen: Mapping[str, bytes]) -> Collection[str]:
    return still_training(seen) & members


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
