"""DiLoCo: many local steps between two rounds, and an outer optimizer that applies their change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch

from averaging.common import is_finite, listed, one_of
from averaging.errors import AveragingError, ConfigError, StateError
from averaging.matchmaking import Quorum
from averaging.peer import Adopt, ExpectedPeers, RoundOptions, StopSearch
from averaging.protocol import CompressionType, MeanOver, Statement, TopK
from averaging.receipts import Receipt
from averaging.state import ExtraState
from averaging.strategies.base import IMMEDIATELY, Due, StrategyOptions, average_at_the_end, common_options, now_of
from averaging.strategies.fragments import Fragment, Fragments, check_tied, cut
from averaging.strategies.lockstep import LockstepStrategy
from averaging.strategies.schedule import (
    Attendance,
    RoundEvent,
    Schedule,
    Standstill,
    Timeliness,
    check_whole_number,
    make_schedule,
)
from averaging.tensors import copy_to_host, host_memory
from averaging.training import (
    BackgroundDownload,
    History,
    Others,
    PendingRound,
    StrategyContext,
    any_advanced,
    count_in,
    find_late,
    find_together,
    full_precision,
    needs_closure,
    take_tensor,
    under_own_names,
)

OuterFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

NESTEROV: OuterFactory = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of the DiLoCo paper."""

PLAIN: OuterFactory = partial(torch.optim.SGD, lr=1.0)
"""The outer optimizer with `top_k`, whose residual takes the part of momentum, and of local SGD."""

logger = logging.getLogger("averaging.training")


TOP_K_DEFAULTS: Mapping[str, Any] = {"density": 1 / 64, "bits": 2, "decay": 0.95, "mean_over": MeanOver.SENDERS}
"""The options of `top_k`."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What a peer with a quorum decides by after a step."""

    others: Others
    due: Due | None  # its own next round
    target: History | None  # the newest history of the others, if this peer has missed steps of it
    downloads: bool  # whether it takes over a state now, or goes on with a download
    group_began: bool  # whether the others have begun the step after this peer's own history without it
    obstacle: str  # why no round with this peer's state can begin; empty if one may, or no other peer trains


class DiLoCoOptions(StrategyOptions, total=False):
    """The options of all strategies, and those of `compression="top_k"`, see `DiLoCo`."""

    density: float | None
    bits: int | None
    decay: float | None
    mean_over: MeanOver | str | None


class DiLoCo(LockstepStrategy):
    """Averages the change of many local steps and applies it with an outer optimizer (Douillard et al., 2023).

    After `sync_every` local steps the pseudo-gradient is averaged between the peers: the model after the last global
    step minus the present model. The outer optimizer steps from there, and all peers go on from the result
    (arXiv:2311.08105). With `fragments` the model is averaged in pieces at staggered steps, each piece once in
    `sync_every` steps, which lowers the peak traffic. With `delay` training goes on during a round (Streaming DiLoCo,
    Douillard et al., 2025, arXiv:2501.18512).

    A peer that is alone makes the outer step with its own pseudo-gradient. If a round fails or lacks a part of the
    result, nothing changes, and the next round sends all local steps since the last global step. A peer that has missed
    a global step takes over the state of another peer and adds its own local steps. If it is behind again after the
    download, the others put off their next step until it is level, for 300 s and the time of eight copies of the model
    at 10 Mbit/s at most; with `quorum` nobody waits.

    The outer state (the model after the last global step, and the outer optimizer's state) is kept on the CPU.

    With `compression="top_k"` a peer sends only the largest elements of each block of 64 × 64, in 1/146 of the bytes of
    float32 (SparseLoCo, arXiv:2508.15706); the averages that it gets are longer. What it has not sent yet, its
    *residual*, is added to its next change: `residual = decay * residual + change - sent`. See
    docs/how-to/slow-link.md.

    With `compression="visible"` a peer sends the elements of residual + change with which a weight is another number in
    bfloat16: `bfloat16(anchor - element) != bfloat16(anchor)`, where the anchor is the weight after the last global
    step (PULSELoCo, arXiv:2602.03839). Values are sent in bfloat16, the mean is taken over all members, and what was
    not sent is the residual, without decay. It is for learning rates so low, as in reinforcement learning, that few
    weights change.

    Args:
        sync_every: local steps between two rounds of the same fragment; or a time, such as "120s": then all peers
            average at the multiples of it by the clock of the run, with the steps that each has made. Fragments come at
            equal distances between.
        outer: function that makes the outer optimizer from a list of parameters. By default it is that of the paper,
            SGD with `lr=0.7` and Nesterov momentum of 0.9; with `top_k` it is SGD with `lr=1` without momentum, whose
            part the residual takes.
        fragments: number of pieces, of about equal size, without splitting a tensor. A number of steps in `sync_every`
            must be a multiple.
        delay: local steps between the start of a fragment's round and its result; 0 waits for the round.
        alpha: weight of the local model when a result arrives: `alpha * local + (1 - alpha) * global`. With `top_k` and
            `visible` it is the weight of the local steps made meanwhile: `global + alpha * (local - local at the
            round's start)`, since what was not sent stays in the residual.
        compression: see `Strategy`; `"top_k"` sends the largest elements only, `"visible"` those that change a weight
            in bfloat16.
        density: with `top_k`, the share of the elements of each block that is sent, by default 1/64; the same at all
            peers.
        bits: with `top_k`, bits of each value that is sent, 2 (the default), 4 or 8; the same at all peers.
        decay: with `top_k`, factor of the residual in each round, from 0 to 1, by default 0.95; this peer's own. 1
            forgets nothing.
        mean_over: with `top_k`, whether an element is averaged over the `"senders"` that sent it, as by default, or
            over `"all"` members of the round, of which the others count as 0; the same at all peers.
        error_feedback: see `Strategy`; `top_k` and `visible` have their own.
        max_norm: limit for the gradients of each local step and for the pseudo-gradient, see `Strategy`.
        quorum: see `Strategy`. A peer that has missed a round trains on, sends the change of its local steps to the
            next round in the background, and takes over the newest state with the steps since then on top.
        grace, staleness_discount: see `Strategy`.

    Raises:
        ConfigError: an argument is invalid.
    """

    averages_changes = True

    def __init__(
        self,
        sync_every: int | str,
        *,
        outer: OuterFactory | None = None,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        **options: Unpack[DiLoCoOptions],
    ) -> None:
        given = {name: value for name, value in options.items() if name in TOP_K_DEFAULTS and value is not None}
        common: Any = {name: value for name, value in options.items() if name not in TOP_K_DEFAULTS}
        super().__init__(**common)
        if type(fragments) is not int or fragments < 1:
            raise ConfigError(f"fragments must be a whole number, at least 1, not {fragments!r}")
        self._schedule: Schedule = make_schedule(sync_every, fragments)
        self.sync_text = str(self._schedule)
        check_whole_number("delay", delay, 0)
        if isinstance(sync_every, int) and delay >= sync_every // fragments:
            raise ConfigError(
                f"a fragment's round begins every {sync_every // fragments} steps; delay must be less, not {delay}"
            )
        if not (is_finite(alpha) and 0 <= alpha <= 1):
            raise ConfigError(f"alpha must be from 0 to 1, not {alpha!r}")
        if self.quorum is not None and alpha:
            raise ConfigError(
                "alpha does not go with quorum: there the local steps made during a round stay on top of its result "
                "and are sent with the next one; leave alpha out"
            )
        code = self.compression or CompressionType.NONE
        self._is_sparse = code.is_sparse
        if code.is_sparse and self.error_feedback:
            raise ConfigError(
                f"error_feedback does not go with compression={code.name.lower()!r}, which has its own: what was not "
                "sent is kept in the residual; leave error_feedback out"
            )
        self.top_k, self.decay = _top_k_options(self.compression, given)
        outer = outer or (PLAIN if self.top_k else NESTEROV)
        if not callable(outer):
            raise ConfigError(
                "outer must make an optimizer of a list of parameters, such as "
                f"functools.partial(torch.optim.SGD, lr=0.7), not {outer!r:.200}"
            )
        self.sync_every, self.fragments, self.delay, self.alpha = sync_every, fragments, delay, alpha
        self._pieces, self._make_outer = fragments, outer
        self._fragments = Fragments()
        self._pending: PendingRound | None = None
        self._pending_history = History()  # when the pending round began
        self._loaded = False  # whether the anchors come from a state; local steps may follow them
        self._discarded = False  # whether another peer's result may include the local steps since the last global step
        self._target: History | None = None  # to whose next step the pending round contributes late; None if in time
        # What it sent late: the step that includes it, the number of its local steps, and their change.
        self._claimed: tuple[Fragment, History, int, dict[str, torch.Tensor]] | None = None

    def __repr__(self) -> str:
        defaults = {"fragments": (self.fragments, 1), "delay": (self.delay, 0), "alpha": (self.alpha, 0.0)}
        options = "".join(f", {name}={value}" for name, (value, default) in defaults.items() if value != default)
        sparse = "" if self.top_k is None else f", density={self.top_k.density:g}, bits={self.top_k.bits}"
        if self.top_k is not None:
            sparse += f", decay={self.decay:g}, mean_over={self.top_k.mean_over.value}"
        return f"DiLoCo(sync_every={self.sync_every!r}{options}{common_options(self)}{sparse})"

    @property
    def samples(self) -> float:
        """Local steps that no average includes: since the last round, and also after a state was taken over."""
        of_fragments = [fragment.open_steps for fragment in self._fragments]
        return (min if self.quorum is None else max)(of_fragments, default=0)

    def terms(self, training: StrategyContext) -> Mapping[str, str]:
        if self.top_k is None:
            return super().terms(training)
        chosen = {"density": f"{self.top_k.density:g}", "bits": str(self.top_k.bits)}
        return {**super().terms(training), **chosen, "mean_over": self.top_k.mean_over.value}

    def start(self, training: StrategyContext) -> None:
        if self.quorum is not None:
            self.quorum.check(training.peer.config.group_size, training.site.shards)
        self._fragments = Fragments()  # `start` may have failed for another averager
        pieces = cut({name: parameter.numel() for name, parameter in training.trained.items()}, self.fragments)
        for number, names in enumerate(pieces):
            parameters = {name: training.parameters[name] for name in names}
            held = list(parameters.values())
            memory = host_memory([*held, *held], [full_precision(parameter) for parameter in [*held, *held]])
            anchors = dict(zip(names, map(torch.nn.Parameter, memory), strict=False))
            changes = dict(zip(names, memory[len(names) :], strict=True))
            copy_to_host(held, memory[: len(names)])
            # The last fragment's round also averages the buffers. It uses copies, since a result that arrived between
            # forward and backward would change what autograd has saved.
            buffers = training.buffers if number == len(pieces) - 1 else {}
            averages = {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers.items()}
            topic = training.topic(
                f"pseudogradient-{number}of{len(pieces)}",
                changes | averages,
                adopt=Adopt.WHOLE,
                compression=self.compression,
                top_k=self.top_k,
                decay=self.decay,
                weights=anchors,
                error_feedback=self.error_feedback,
            )
            outer = self._make_outer(list(anchors.values()))
            _check_outer(outer, anchors.values())
            copied = [(buffer, averages[name]) for name, buffer in buffers.items()]
            fragment = Fragment(number, parameters, anchors, changes, topic, outer, copied)
            topic.tensors.before_reading = fragment.complete if fragment.waits else None
            self._fragments.append(fragment)
        training.drift.optimizers["outer "] = self._fragments[0].outer
        self._owns, self._leads = training.site.owns, training.site.leads
        if self._is_sparse:
            check_tied({fragment.number: fragment.parameters for fragment in self._fragments})
        has_momentum = any(group.get("momentum") for group in self._fragments[0].outer.param_groups)
        if self.top_k is not None and self._leads and has_momentum:
            logger.warning(
                "the outer optimizer has momentum, whose part the residual of top_k takes already: a change that is "
                "sent late would be amplified again. Leave outer out, or use SGD without momentum"
            )

    def joined(self, training: StrategyContext) -> None:
        if self.history.step == 0 and not self._loaded:
            self._fragments.anchor()
        elif not self.attached:
            # The donor's parameters hold its local steps of the other fragments, or of a round, which it sends itself.
            with training.locked(), training.changing_parameters():
                self._fragments.rebase({})
        for fragment in self._fragments:
            fragment.start_at(self.history.step, self._schedule.steps if self.attached else 0)
        self._attendance = Attendance()
        super().joined(training)

    def step(
        self, training: StrategyContext, closure: Callable[[], float] | None = None, batch_size: int | None = None
    ) -> float | None:
        """The first step starts from the present parameters: they may have been loaded or averaged."""
        if training.local_step == self.history.step == 0:
            with training.locked():
                self._fragments.anchor()
        loss = training.inner_step(closure, self.max_norm)
        self._schedule.count(now_of(self._schedule, training))
        for fragment in self._fragments:
            fragment.count(self.history.step)
        if self._pending is not None:
            in_time = self._target is None
            if self._schedule.steps >= self.delay if in_time else training.is_over(self._pending):
                self._end(training, self._pending)
        if self._pending is None and self.quorum is not None:
            self._go_along(training)
        elif self._pending is None:
            others, is_behind, due = training.site.broadcast_from_leader(lambda: self._look(training))
            if not (is_behind and self.catch_up(training, others)) and due is not None:
                self._begin(training, () if due.nobody else others.together, due)
        if self._pending is not None and not self.delay and self._target is None:
            self._end(training, self._pending)
        self._go_on(training, self.history.step, in_round=self._pending is not None and self._target is None)
        return loss

    def _go_along(self, training: StrategyContext) -> None:
        look = training.site.broadcast_from_leader(lambda: self._look_along(training))
        if look.due is not None:
            self._attendance = replace(self._attendance, owed=True)
        if self._attendance.owed and look.target is not None:
            training.announcements.refresh()  # what was known a step ago may be several rounds old
            look = replace(training.site.broadcast_from_leader(lambda: self._look_along(training)), due=look.due)
        is_late = look.target is not None or look.group_began
        self._attendance = self._attendance.after(RoundEvent.MISSED if is_late else RoundEvent.LEVEL)
        self.missed = max(0, look.target.step - self.history.step) if look.target else int(is_late)
        if look.downloads and self.catch_up(training, look.others, wait=False):
            return  # a round that is due begins after the next step, for which the others' progress is read anew
        if not self._attendance.owed:
            return
        if look.target is not None or self._attendance.timeliness is Timeliness.REBASED:
            self._begin_late(training, look.target or self.history)
            return
        self._next_quorum(training)  # warns if there are too few peers
        if look.obstacle:
            self._standstill.reason = look.obstacle
        if self._attendance.timeliness is Timeliness.LATE or look.obstacle:
            return  # another step than that of the others must not be made: it would lead to a second history
        self.announce(training)  # who was missing in the last round is expected again
        nobody = look.due is not None and look.due.nobody
        self._begin(training, () if nobody else look.others.together, look.due or IMMEDIATELY)

    def _look_along(self, training: StrategyContext) -> _Look:
        others, is_behind, due = self._look(training)
        topic = self._fragments.at(self.history.step).topic
        began = training.announcements.group_began(topic, self.history.phase) is not None
        newest = max(others.ahead.values()) if others.ahead else self.history
        follows = newest.step > self.history.step and newest.may_follow(self.history)
        wanted = self._claimed is None or newest.step >= self._claimed[1].step
        downloads = is_behind and wanted and not (follows and self._attendance.timeliness is Timeliness.REBASED)
        obstacle = self._obstacle(training, others) if due is not None or self._attendance.owed else ""
        downloads = downloads or self._downloads.busy
        return _Look(others, due, newest if follows else None, downloads, began, obstacle)

    def _obstacle(self, training: StrategyContext, others: Others) -> str:
        seen = training.announcements.at_leader(wait=False)
        holders, count = set(others.together) - set(find_late(self.history, seen)), self._quorum_count(training, seen)
        if 1 + len(holders) >= count or self._training_peers(seen) == 1:
            return ""
        missing = listed(sorted(seen.keys() - holders))
        held = f"only {1 + len(holders)} of the {count} peers of the quorum hold global step {self.history.step}"
        return f"{held}, not {missing}"

    def _begin_late(self, training: StrategyContext, target: History) -> None:
        """Begins to contribute to the next step of `target`, which this peer may not hold, in the background."""
        fragment = self._fragments.at(target.step)
        self._measure(training, fragment, keep=True, background=True)
        self._target, self._late, self._pending_history = target, target.step, self.history
        self.announce(training)
        holders = partial(find_together, target)
        options: RoundOptions = {"phase": target.phase, "expected_peers": holders, "follows": True}
        options["search_timeout"] = training.peer.config.round_timeout
        options["stop_search"] = stop_search(training, target, holders)
        options.update(self._contribution(training, fragment, target))
        self._pending = training.begin(fragment.topic, **options)

    def _measure(self, training: StrategyContext, fragment: Fragment, *, keep: bool, background: bool) -> None:
        fragment.measure(keep=keep, background=background and self.max_norm is None)
        if self.max_norm is not None:
            training.clip(fragment.changes.values(), self.max_norm)
        self._schedule.restart()
        self._attendance = replace(self._attendance, owed=False)

    def _next_quorum(self, training: StrategyContext) -> Quorum | None:
        """When the next round begins although peers are missing; at all ranks of a site."""
        if self.quorum is None:
            return None
        seen = training.announcements.of_others(wait=False)
        count, present = self._quorum_count(training, seen), self._training_peers(seen)
        too_few = present if present < count else 0
        if too_few and too_few != self.quorum.too_few and self._leads:
            logger.warning(
                "the quorum is %d peers, but only %d are training: no round begins until there are more, and training "
                "goes on without averages. Start more peers, or use a smaller quorum",
                *(count, present),
            )
        self.quorum.too_few = too_few
        return Quorum(count, self.quorum.grace)

    def _contribution(
        self, training: StrategyContext, fragment: Fragment, target: History, quorum: Quorum | None = None
    ) -> RoundOptions:
        weight = training.weights.of(fragment.topic)
        said = Statement(samples=weight, unit=training.weights.unit)
        if self.quorum is None:
            return {"gather": said.pack(), "weight": weight}
        base = target.step if fragment.base is None else fragment.base
        age = int(max(0.0, target.step - base) // len(self._fragments))
        factor = self.quorum.weight_factor(age)
        stated, holds = None if quorum is None else quorum.stated, target == self.history
        said = replace(said, steps=fragment.open_steps, age=age, discount=factor, holds=holds, quorum=stated)
        return {"gather": said.pack(), "weight": weight * factor}

    def finish(self, training: StrategyContext) -> None:
        """Waits for the round in progress, but not for others that could take a late contribution."""
        if self._pending is not None:
            if self._target is not None:
                training.end_search(self._pending)
            self._end(training, self._pending)

    def conclude(self, training: StrategyContext, partners: Collection[str], timeout: float) -> Receipt | None:
        """Makes the last outer step of each fragment; drops the local steps of a fragment whose round fails."""
        receipt: Receipt | None = None
        end = training.monotonic() + timeout
        # The fragment that was averaged last may have changed at no peer since.
        gathered, steps = self.samples, self.history.step
        is_new = gathered + self.present_others(training).samples > 0
        for _ in self._fragments if is_new else self._fragments[1:]:
            seen = training.announcements.of_others()
            together = training.site.broadcast_from_leader(partial(self.others, training, seen)).together
            if not together and not seen.keys().isdisjoint(partners):
                break  # an outer step of this peer alone would make its weights differ from the partners'
            self._begin(training, together, search_timeout=max(0.0, end - training.monotonic()))
            if self._pending is not None:
                receipt = self._end(training, self._pending)
        self.dropped = gathered if self.history.step - steps < len(self._fragments) else 0.0
        with training.replacing(), training.changing_parameters():
            for fragment in self._fragments:
                if fragment.feedback is not None and self._owns:  # not empty if the last round has failed
                    fragment.feedback.keep({name: -steps for name, steps in fragment.local_steps().items()})
                fragment.rebase({})
        if self._fragments.feedbacks and self._leads:
            self._fragments.tell_unsent()
        if not training.modes.exist:
            return receipt
        # Equal training weights, but the evaluation weights depend on this peer's own iterates as well.
        training.modes.eval()
        topic = training.topic("", training.tensors | training.iterates(), adopt=Adopt.WHOLE)
        return average_at_the_end(training, topic, end - training.monotonic())

    def _look(self, training: StrategyContext) -> tuple[Others, bool, Due | None]:
        """The other peers, whether this one is behind or may be, and its next round, if it is due."""
        seen = training.announcements.at_leader(wait=False)
        due = self._due(training, self._fragments.at(self.history.step).topic, seen, self.history.phase)
        if due is not None:
            # The others may have made the round since the last step; then this peer would wait for a group in vain.
            seen = training.announcements.at_leader(wait=True)
        others = self.others(training, seen)
        if due is not None and self._holds(training, self._fragments.at(self.history.step).topic):
            due = None
        return others, bool(others.ahead) or self._downloads.busy, due

    def _begin(
        self,
        training: StrategyContext,
        together: tuple[str, ...],
        due: Due = IMMEDIATELY,
        search_timeout: float | None = None,
    ) -> None:
        """Begins the next fragment's round; a peer that can average with nobody makes its outer step at once."""
        if search_timeout is None and self._ends_with_others(training, together):
            return
        fragment = self._fragments.at(self.history.step)
        keeps = self._is_sparse and self.alpha > 0 if self.quorum is None else self.delay > 0
        goes_on = self.delay > 0 and bool(together)
        self._measure(training, fragment, keep=keeps and bool(together), background=goes_on)
        if not together:
            self._step(training, fragment, None)
            return
        if due.moment:
            self._tell(training, due.moment)
        self._pending_history, self._target = self.history, None
        expected = due.at_moment(self._expected_peers(training, together))
        options: RoundOptions = {"phase": self.history.phase, "expected_peers": expected}
        options["drift"] = training.fingerprint(self._anchors, self.history.phase, self.history.step)
        # At the end of training all wait for all.
        quorum = None if search_timeout is not None else self._next_quorum(training)
        options.update(self._contribution(training, fragment, self.history, quorum))
        if search_timeout is not None:
            options["search_timeout"] = search_timeout
        if quorum is not None:
            options["quorum"] = quorum
            options["stop_search"] = stop_search(training, self.history, expected)
        self._pending = training.begin(fragment.topic, after=due.after, **options)

    def _end(self, training: StrategyContext, pending: PendingRound) -> Receipt:
        try:
            receipt = training.receipt_of(pending, may_fail=self._target is not None)
        except BaseException:
            if pending.done():  # a KeyboardInterrupt ends the wait, not the round
                self._pending = None
                with suppress(AveragingError):  # `on_round` has raised, so the result is not applied
                    self._discarded = bool(pending.result().group_id)
            raise
        self._pending = None
        target, self._target = self._target, None
        if target is not None:
            self._late = None
            self.announce(training)
            if receipt.averaged:
                self._schedule.restart()  # from here on it comes when the others come
        if self.history != self._pending_history:
            return receipt  # a checkpoint was loaded meanwhile, so the result belongs to other parameters
        if receipt.averaged and target is not None and target != self.history:
            self._include(self._fragments.at(target.step), target, receipt)
        elif receipt.averaged:
            self._step(training, self._fragments.at(self.history.step), receipt)
        else:
            self._discarded = bool(receipt.group_id)
            self._standstill.reason = f"its last round failed: {receipt.reason}"
            if self.quorum is not None:
                self._miss(training, target, receipt)
        return receipt

    def _include(self, fragment: Fragment, target: History, receipt: Receipt) -> None:
        sent, steps = fragment.include(self.history.step)
        if fragment.feedback is not None:
            fragment.feedback.applied()
        self._claimed = fragment, target.after(receipt.group_id, 0.0), sent, steps
        self._discarded, self._standstill = False, Standstill()
        self._attendance = self._attendance.after(RoundEvent.INCLUDED)

    def _miss(self, training: StrategyContext, target: History | None, receipt: Receipt) -> None:
        """A round that has failed, or that this peer has missed, is made up for in the next one."""
        if receipt.group_id:
            self._attendance = self._attendance.after_failure()
            return
        owed = target is not None or bool(self.present_others(training).ahead)
        self._attendance = replace(self._attendance, owed=owed)
        if target is not None and target == self.history:
            self._attendance = self._attendance.after(RoundEvent.UNMET)

    def _step(self, training: StrategyContext, fragment: Fragment, receipt: Receipt | None) -> None:
        with training.replacing(), training.changing_parameters():
            fragment.step(1.0 if self.quorum is not None and fragment.keeps else self.alpha)
            if fragment.feedback is not None and receipt is not None:
                fragment.feedback.applied()
            elif fragment.feedback is not None:
                fragment.feedback.applied_alone()
            self._advance(training, receipt, training.weights.of(fragment.topic))
        if receipt is None:
            training.weights.averaged[fragment.topic.schema.topic] = training.weights.made
        fragment.applied(self.history.step)
        if receipt is not None and self.quorum is not None:
            self.quorum.note(receipt.started)
        self._discarded, self.missed = False, 0
        self._attendance = self._attendance.after(RoundEvent.AVERAGED)
        self.announce(training)

    def _take_over(self, training: StrategyContext, fetch: BackgroundDownload) -> None:
        """Adds the local steps that no result includes to the state, if it follows this peer's own.

        So it is with the residual: it stays, less what the last round has sent if the state may include that.
        """
        before, discarded, since = self.history, self._discarded, self._schedule.steps
        own = [fragment.steps_to_keep(discarded=discarded) for fragment in self._fragments]
        samples = training.weights.made, dict(training.weights.averaged)
        super()._take_over(training, fetch)
        follows = self.history.includes(before)  # or they belong to other parameters, perhaps false ones
        follows |= self.quorum is not None and self.history.may_follow(before)
        if follows and not discarded:
            training.weights.made, training.weights.averaged = samples
        if self.quorum is not None:
            self._schedule.steps = since  # this peer's own round is due as before
            self._restore(own)
        if discarded or not follows:
            for fragment in self._fragments:
                fragment.start_at(self.history.step)
        if self.quorum is not None:
            is_open = any(fragment.open_steps for fragment in self._fragments)
            self._attendance = self._attendance.after(RoundEvent.REBASED if is_open else RoundEvent.TOOK_OVER)
        with training.locked(), training.changing_parameters():
            self._fragments.rebase({name: change for steps in own for name, change in steps.items()} if follows else {})
        for feedback in self._fragments.feedbacks:
            if not follows:
                feedback.reset()
            elif discarded:
                feedback.applied()
        self._discarded = False

    def _restore(self, own: Sequence[dict[str, torch.Tensor]]) -> None:
        """Takes back what was sent late if the step in which it was is not in the history of the run."""
        if self._claimed is None or self.history.step < self._claimed[1].step:
            return
        (fragment, including, sent, steps), self._claimed = self._claimed, None
        if self.history.lineage == including.lineage or self.history.may_follow(including):
            return
        fragment.start_at(int(fragment.base or including.step), fragment.open_steps + sent)
        if fragment.feedback is not None:
            fragment.feedback.take_back()  # the residual holds the rest of the change already
            return
        for name, change in steps.items():
            if name in own[fragment.number]:
                own[fragment.number][name] += change

    @property
    def _anchors(self) -> dict[str, torch.Tensor]:
        return self._fragments.anchors

    def state(self) -> ExtraState:
        """The model after the last global step, and the state of the outer optimizers."""
        tensors, outer = self._fragments.state()
        return ExtraState(tensors, {"outer": outer, "since": self._schedule.steps})

    def parameter_of(self, name: str) -> str | None:
        return self._fragments.parameter_of(name)

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        super().load(tensors, user)
        since = count_in(user, "since")
        self._fragments.load(tensors, user.get("outer"))
        self._schedule.steps, self._loaded = since, True
        self._discarded = False

    def own_state(self) -> Mapping[str, torch.Tensor]:
        """The residuals of `top_k` and `visible`: what this peer has not sent yet."""
        if not self._owns:
            return {}
        return {name: tensor for feedback in self._fragments.feedbacks for name, tensor in feedback.state().items()}

    def state_to_come(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        anchors = self._anchors if self._owns and self.top_k is not None else {}
        residuals = {name: torch.zeros_like(anchor, dtype=torch.float32) for name, anchor in anchors.items()}
        return self._fragments.outer_state_to_come(), residuals

    def load_own(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads residuals, which belong to the anchors of the same checkpoint."""
        anchors = self._anchors
        named = under_own_names(tensors, "", list(anchors))
        fitting = {
            name: take_tensor(named, name, torch.empty_like(anchor, dtype=torch.float32, device="meta"))
            for name, anchor in anchors.items()
            if name in named
        }
        if not all(torch.isfinite(tensor).all() for tensor in fitting.values()):
            raise StateError("what it has not sent yet (the residual of top_k or visible) holds NaN or infinity")
        if tensors and self._leads and not self._is_sparse:
            logger.warning(
                "the checkpoint holds changes that were not sent yet (the residual of top_k or visible); without "
                "compression='top_k' or 'visible' they are dropped"
            )
        for feedback in self._fragments.feedbacks if self._owns else ():
            feedback.load(fitting)


def _top_k_options(compression: CompressionType | None, given: Mapping[str, Any]) -> tuple[TopK | None, float]:
    """The options of `top_k` and the decay of its residual, checked; None with another compression."""
    options = {**TOP_K_DEFAULTS, **given}
    decay = options["decay"]
    if compression is not CompressionType.TOP_K:
        for name in given:
            raise ConfigError(f"{name} is an option of compression='top_k'; set that, or leave {name} out")
        return None, decay
    if not (is_finite(decay) and 0 <= decay <= 1):
        raise ConfigError(f"decay, the factor of the residual in each round, must be from 0 to 1, not {decay!r}")
    return TopK(options["density"], options["bits"], one_of(MeanOver, options["mean_over"], "mean_over")), decay


def stop_search(training: StrategyContext, target: History, holders: ExpectedPeers) -> StopSearch:
    """Stops a search once a peer that could make the step after `target` has made it, or none is left."""
    first = frozenset(holders(training.announcements.of_others(wait=False)))

    def stop(seen: Mapping[str, bytes]) -> bool:
        return bool(first) and (any_advanced(target, first, seen) or not holders(seen))

    return stop


def _check_outer(outer: Any, given: Iterable[torch.nn.Parameter]) -> None:
    """Checks that an outer optimizer has exactly the given parameters: with the model's own nothing would be learnt."""
    groups = getattr(outer, "param_groups", [])
    if {id(parameter) for group in groups for parameter in group["params"]} != {id(parameter) for parameter in given}:
        raise ConfigError(
            "outer must make an optimizer of all the parameters that it is called with, not of the model's own; "
            f"its {type(outer).__name__} has others. Use outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7)"
        )
    if needs_closure(outer):
        raise ConfigError(f"outer makes a {type(outer).__name__}, whose step requires a closure; use another optimizer")
