"""The interface of a strategy to its `DecentralizedAverager`."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, TypedDict

import torch

from averaging.common import counted, is_finite
from averaging.errors import ConfigError, RoundError, StateError, printable
from averaging.matchmaking import LEAST_SEARCH
from averaging.peer import ExpectedPeers, Topic
from averaging.protocol import CompressionType, parse_compression
from averaging.receipts import Receipt
from averaging.state import NO_EXTRA_STATE, ExtraState
from averaging.strategies.catch_up import CatchUp
from averaging.strategies.schedule import (
    Attendance,
    Schedule,
    Standstill,
    Timeliness,
    quorum_options,
)
from averaging.training import (
    BackgroundDownload,
    History,
    Others,
    Own,
    Progress,
    Stage,
    StrategyContext,
    coming_at,
    compare_terms,
    done_training,
    look_for_greater_origin,
    still_training,
)

logger = logging.getLogger("averaging.training")


@dataclass(frozen=True, slots=True)
class Due:
    """A round that is due."""

    after: float = 0.0  # seconds until it begins
    moment: float = 0.0  # of the run's clock that it serves; 0 if rounds are due after a number of steps
    interval: float = 0.0  # of the moments
    nobody: bool = False  # whether no other peer comes to that moment, so that nobody need be looked for

    def at_moment(self, expected: ExpectedPeers) -> ExpectedPeers:
        """Of the expected peers, those that come to its moment."""
        if not self.moment:
            return expected

        def expected_then(seen: Mapping[str, bytes]) -> Collection[str]:
            coming = coming_at(seen, self.moment, self.interval)
            return [name for name in expected(seen) if name in coming]

        return expected_then


IMMEDIATELY = Due()


class StrategyOptions(TypedDict, total=False):
    """The options that all strategies have, see `Strategy`."""

    compression: CompressionType | str | None
    error_feedback: bool
    max_norm: float | None
    quorum: int | float | None
    grace: float | str | None
    staleness_discount: float | None


class Strategy(ABC):
    """Decides what is averaged, and when. One object serves one averager; all methods run in the training thread.

    In a site every rank has its own object, and all of them must do the same. What could differ between ranks, such as
    whether a round is due, is asked with `site.broadcast_from_leader`.

    A custom strategy defines `start`, which creates its topics, and `after_step`, which averages them. A strategy that
    also decides when the inner optimizer steps defines `step` instead. Whatever newcomers and checkpoints need besides
    the model goes through `state` and `load`.

    Args:
        compression: codec of the averaged tensors on the wire; the averager's `compression` if None.
        error_feedback: whether the error of a lossy codec, also that of the replies of this peer, is added to what is
            sent in the next round; all peers of a run should have the same. Where replies are deltas it has no effect,
            since the error stays in the parameters: those of `LocalSGD` with `reply_form="delta"`.
        max_norm: gradients are clipped to this norm before they are used; None does not clip.
        quorum: peers with which a round begins, this one included, or their share of all peers that are training;
            whoever is late takes part in the next one. With None a round waits for all, for up to `group_wait`.
        grace: with `quorum`, upper bound of the time for which a round waits for further peers then; "10s" by default.
            It waits for a fiftieth of the time between two rounds, and at least 0.25 s.
        staleness_discount: with `quorum`, factor of the weight of a late contribution for each global step that it is
            late; 0.95 by default. The product is at least 0.1.

    Raises:
        ConfigError: `max_norm` is not a finite number above 0, or the strategy cannot use the `compression`.
    """

    averages_changes = False  # whether the averaged tensors are changes, which "top_k" and "visible" require
    attached = False  # whether an averager uses this object; no other averager accepts it then
    history = History()  # origin of the run, and its global steps; the averager sets it with each state
    stage = Stage.TRAINING
    digest = ""  # of the weights, once the training has ended
    dropped = 0.0  # of `samples`, those that were in no average when the training ended
    missed = 0  # rounds of the others that this peer has missed and not yet made up for; only with a quorum
    sync_text = ""  # time or steps between two rounds, such as "120s"; empty if they follow from something else
    scheduled_globally = False  # whether a scheduler steps once per global step, not per local step
    against_average_now = ""  # why the parameters must not be averaged as they are; empty if they may be
    _partners: frozenset[str] = frozenset()  # the members of the last group
    _schedule: Schedule | None = None  # of its rounds; None if they follow from something else
    _warned_of_terms: frozenset[str] = frozenset()  # peers with other terms
    _compared: Mapping[str, bytes] | None = None  # the announcements with which the terms were compared last
    _moment: float | None = None  # at which this peer comes next, as it announces it
    _late: int | None = None  # see `Progress.late`
    _attendance = Attendance()  # with a quorum
    _pieces = 1  # rounds in which all of the model is averaged once

    def __init__(
        self,
        *,
        compression: CompressionType | str | None = None,
        error_feedback: bool = False,
        max_norm: float | None = None,
        quorum: int | float | None = None,
        grace: float | str | None = None,
        staleness_discount: float | None = None,
    ) -> None:
        self.quorum = quorum_options(quorum, grace, staleness_discount)
        self._standstill = Standstill()  # at the leader of a site
        self._downloads = CatchUp()
        if max_norm is not None and not (is_finite(max_norm) and max_norm > 0):
            raise ConfigError(f"max_norm must be finite and above 0, not {max_norm!r}")
        self.compression = None if compression is None else parse_compression(compression)
        if self.compression is not None and self.compression.is_sparse and not self.averages_changes:
            name = self.compression.name.lower()
            raise ConfigError(
                f"compression={name!r} sends some elements of a change, but {type(self).__name__} averages other "
                f"tensors; use DiLoCo(sync_every, compression={name!r}) or LocalSGD.of_changes(sync_every, "
                f"compression={name!r}), or another compression"
            )
        self.error_feedback = error_feedback
        self.max_norm = max_norm

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self.attached:
            raise ConfigError(
                f"{self!r} is in use by an averager and cannot be copied or pickled; make a new strategy for another "
                "averager, or save the averager's state_dict()"
            )
        return super().__reduce_ex__(protocol)

    @property
    def global_step(self) -> int | None:
        """Number of global steps of the run, which drives a scheduler; None if the strategy makes none."""
        return None

    @property
    def samples(self) -> float:
        """What this peer has gathered for the next global step: samples or local steps; 0 if it is not counted."""
        return 0.0

    @abstractmethod
    def start(self, training: StrategyContext) -> None:
        """Called once, before the peer starts: creates the topics that will be averaged."""

    def joined(self, training: StrategyContext) -> None:
        """Called when the peer has joined its run and taken over the run's state, or has loaded a checkpoint."""
        self.announce(training)

    def terms(self, training: StrategyContext) -> Mapping[str, str]:
        """The options that all peers of a run must have alike, by name, as text without commas."""
        if self._schedule is None:
            return {}
        return {
            "sync_every": str(self._schedule) if self._schedule.interval else "a number of steps",
            # Peers that wait for all would hold up those that do not, or make steps without them.
            "quorum": str(self.quorum.quorum) if self.quorum else "off",
            # Weights that count samples do not go with others.
            "weight": "the number of samples" if training.weights.counts_samples else "a number",
        }

    def check_terms(self, training: StrategyContext, announcements: Mapping[str, bytes]) -> None:
        """Compares the terms of this peer with those of the others; called at the leader of a site.

        A peer that has made no round yet raises ConfigError if its run has other terms, see `is_outvoted`. Else it
        warns of each of those that differ once.
        """
        if announcements is self._compared:
            return
        self._compared = announcements
        differing, alike = compare_terms(self.terms(training), announcements)
        if not differing:
            return
        if not training.standing.rounds and training.peer.progress.is_outvoted(differing, alike):
            raise ConfigError(f"{printable(differing[min(differing)])}; give all peers of the run the same")
        new = differing.keys() - self._warned_of_terms
        if new:
            self._warned_of_terms = frozenset(differing)
            logger.warning("%s; give all peers of the run the same", printable(differing[min(new)]))

    def announced_history(self, training: StrategyContext) -> History:
        """The history with which other peers compare theirs; `step` is this peer's local step."""
        return replace(self.history, step=training.local_step)

    def progress(self, training: StrategyContext, computing: float = 0.0) -> Progress:
        """The progress that this peer announces, see `Progress`."""
        history = self.announced_history(training)
        rate, parts, terms = training.pace.per_second, training.parts.digests, self.terms(training)
        ends = self.stage, self.digest, rate, parts, self._moment, terms, self._late
        return Progress(history, self.samples, computing, training.donates, *ends)

    def announce(self, training: StrategyContext, computing: float = 0.0) -> None:
        """Announces the progress of this peer to the other peers."""
        training.announcements.announce(self.progress(training, computing).pack())

    # Moments of the run's clock

    def _due(self, training: StrategyContext, topic: Topic, seen: Mapping[str, bytes], phase: str = "") -> Due | None:
        """The round of a topic, if it is due by what the others announce; called at the leader of a site."""
        schedule = self._schedule
        if schedule is None:
            return None
        self.check_terms(training, seen)
        now, until = now_of(schedule, training), training.announcements.declared_until(topic, phase)
        if until is not None:
            until += now - training.now()  # by the clock of the run
        if not schedule.interval:
            if self.quorum is not None and 2 * schedule.steps < schedule.length:
                return None  # the others look for a group, but it begins without a peer that has made so few steps
            return IMMEDIATELY if schedule.is_due(now, until) else None
        if not schedule.is_due(now, until):
            return None

        def nobody_comes() -> bool:
            return not still_training(seen) & coming_at(seen, schedule.moment, schedule.interval)

        nobody = until is None and nobody_comes()
        if nobody:
            seen = training.announcements.at_leader(wait=True)  # what was known a step ago may be as old as a moment
            nobody = nobody_comes()
        if nobody and still_training(seen):  # a peer that has made no step yet has not told when it comes
            schedule.skip()
            self._standstill.reason = "all others come to a later moment"
            return None
        return Due(max(0.0, schedule.moment - now), schedule.moment, schedule.interval, nobody)

    def _tell(self, training: StrategyContext, moment: float) -> None:
        if moment != self._moment:
            self._moment = moment
            self.announce(training)

    # Standing still

    def _cycle(self, training: StrategyContext) -> tuple[int, float]:
        """After how many local steps, and seconds, a step of the whole model is expected."""
        schedule, usual = self._schedule, self.quorum.interval if self.quorum else 0.0
        length, interval = (schedule.length, schedule.interval) if schedule else (1, 0.0)
        return self._pieces * length, self._pieces * max(interval, usual if usual < math.inf else 0.0)

    def _tell_standstill(self, training: StrategyContext, position: int) -> None:
        """Says once why this peer makes no step of the run."""
        still = self._standstill
        # A state that is taken over is no step of this peer: it could take over one after the other for ever.
        if still.position is None or (position != still.position and training.standing.made):
            since = training.local_step, training.monotonic()
            still = self._standstill = Standstill(position, *since, still.reason if still.position is None else "")
        if still.told or (self.quorum and self.quorum.too_few) or not training.site.leads:
            return
        if not still.is_long(training.local_step, training.monotonic(), *self._cycle(training)):
            return
        if not still_training(training.announcements.at_leader(wait=False)):
            return  # it is alone, or the others have ended their training
        still.told = True
        reason = still.reason or "no round of its own was due"
        if self._attendance.timeliness is Timeliness.REBASED:
            reason = "no round of the others has taken the local steps that it has made on top of their state"
        elif self.missed:
            reason = f"it has missed {counted(self.missed, 'round')} of the others and does not hold their state yet"
        steps, seconds = training.local_step - still.local_step, training.monotonic() - still.since
        text = "this peer makes no step of the run, for %s and %.1f s by now: %s; training goes on without averages"
        logger.warning(text, counted(steps, "local step"), seconds, reason)

    def _go_on(self, training: StrategyContext, position: int, *, in_round: bool) -> None:
        """Ends a step, at which the state has so many of the run's steps or rounds; announces the next moment."""
        if self._schedule is None:
            return
        schedule = self._schedule
        schedule.resume(now_of(schedule, training))
        self._tell_standstill(training, position)
        if schedule.interval and not in_round:  # in one, the others wait for this peer because of that moment
            self._tell(training, training.site.broadcast_from_leader(lambda: schedule.comes(training.run_now())))

    def others(self, training: StrategyContext, announcements: Mapping[str, bytes]) -> Others:
        """Reads the announced progress of the other peers, by endpoint; says which of them are ahead."""
        own = Own(self.announced_history(training), training.donates)
        return look_for_greater_origin(own, announcements, ignored=self._downloads.ignored(training))

    def present_others(self, training: StrategyContext, *, wait: bool = True) -> Others:
        """What `others` makes of the present announcements, the same at all ranks of a site."""
        return training.site.broadcast_from_leader(
            lambda: self.others(training, training.announcements.of_others(wait=wait))
        )

    def catch_up(
        self, training: StrategyContext, others: Others, start_timeout: float = 0.0, *, wait: bool = True
    ) -> bool:
        """Takes over the state of a peer that is ahead, if there is one. Returns whether it did.

        It waits `start_timeout` seconds until a donor starts to send, even if this peer could average with others.
        Without `wait` training goes on during the download, and a later call takes the state over.
        """
        own = self.announced_history(training)
        fetch = training.states.of_all_ranks(
            lambda: self._downloads.follow(training, own, others, self._partners, start_timeout, wait=wait)
        )
        if fetch is None:
            return False
        try:
            self._take_over(training, fetch)
        except (StateError, RoundError) as error:
            if training.site.leads:
                self._downloads.failed(training, own, fetch, error)
            return False
        if training.site.leads:
            self._downloads.succeeded(own, self.announced_history(training))
        self.announce(training)
        return True

    def _take_over(self, training: StrategyContext, fetch: BackgroundDownload) -> None:
        training.take_over(fetch)
        training.weights.forget()

    def step(
        self, training: StrategyContext, closure: Callable[[], float] | None = None, batch_size: int | None = None
    ) -> float | None:
        """One `opt.step()`: steps the inner optimizer, then calls `after_step`.

        `closure` reevaluates the model and returns the loss; `batch_size` is the number of samples or tokens behind
        the gradients, for strategies that count them.
        """
        loss = training.inner_step(closure, self.max_norm)
        self.after_step(training)
        return loss

    def step_alone(self, training: StrategyContext, closure: Callable[[], float] | None) -> float | None:
        """One `opt.step()` after this peer has left its run on a signal."""
        return training.inner_step(closure, self.max_norm)

    def after_step(self, training: StrategyContext) -> None:
        """Called after each step of the inner optimizer, with the tensors unlocked; may average."""
        return

    def state(self) -> ExtraState:
        """The tensors (not copied) and numbers of the strategy that newcomers and checkpoints need."""
        return NO_EXTRA_STATE

    def parameter_of(self, name: str) -> str | None:
        """The parameter like which a tensor of `state` is divided between ranks; None if it is not divided."""
        return None

    def check(self, user: Mapping[str, Any]) -> None:
        """Checks the numbers of another peer's `state`, before its tensors are downloaded; raises StateError."""
        return

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        """Loads what `state` returned, here or at another peer, or raises StateError and changes nothing."""
        return

    def own_state(self) -> Mapping[str, torch.Tensor]:
        """Tensors (not copied) that this peer's checkpoints need as well, but no newcomer gets; by name.

        They are divided between ranks like the parameters of these names.
        """
        return {}

    def load_own(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads what `own_state` returned; called after `load` with each checkpoint, also if that has none."""
        return

    def state_to_come(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Zeros in the place of tensors of `state` and of `own_state` that are not made yet, by name.

        A new averager needs them to load the checkpoint of a site, see `DistributedCheckpoint`.
        """
        return {}, {}

    def finish(self, training: StrategyContext) -> None:
        """Called before the peer leaves and before `average_now`: ends the round in progress, if there is one."""
        return

    def conclude(self, training: StrategyContext, partners: Collection[str], timeout: float) -> Receipt | None:
        """Called by `DecentralizedAverager.finish`: makes the weights of all peers equal at the end of training.

        Afterwards the model holds the weights to export. `partners` are the endpoints of the other peers that have
        ended their training. Returns the receipt of the last round; None if there was none within `timeout` seconds.
        """
        return None


def common_options(strategy: Strategy) -> str:
    """The options that all strategies have, as a `repr` goes on with them."""
    options = []
    if strategy.compression is not None:
        options.append(f"compression={strategy.compression.name}")
    if strategy.error_feedback:
        options.append("error_feedback=True")
    if strategy.max_norm is not None:
        options.append(f"max_norm={strategy.max_norm:g}")
    return "".join(f", {option}" for option in options) + ("" if strategy.quorum is None else str(strategy.quorum))


def now_of(schedule: Schedule, training: StrategyContext) -> float:
    """Seconds since the epoch: for moments by the clock of the run."""
    return training.run_now() if schedule.interval else training.now()


def average_at_the_end(training: StrategyContext, topic: Topic, timeout: float) -> Receipt | None:
    """Averages with all peers that have ended their training, again if a round fails; None without time for one."""
    end = training.monotonic() + timeout
    receipt: Receipt | None = None

    def time_left() -> float:
        return end - training.monotonic() if done_training(training.announcements.of_others()) else 0.0

    while (left := training.site.broadcast_from_leader(time_left)) > LEAST_SEARCH:
        receipt = training.average(topic, expected_peers=done_training, search_timeout=left)
        if receipt.averaged:
            break
    return receipt


def check_unused(strategy: object) -> None:
    """Raises ConfigError if this object is no strategy, or belongs to another averager."""
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"strategy must be a Strategy object, such as LocalSGD(sync_every=50), not {strategy!r}")
    if strategy.attached:
        raise ConfigError(f"{strategy!r} belongs to another averager, open or closed; make a new one for each averager")
