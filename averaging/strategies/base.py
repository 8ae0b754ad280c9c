"""The interface of a strategy to its `DecentralizedAverager`."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, SupportsIndex

import torch

from averaging.common import Backoff, is_finite
from averaging.config import OnDrift
from averaging.errors import ConfigError, RoundError, StateError
from averaging.matchmaking import LEAST_SEARCH
from averaging.peer import Topic
from averaging.protocol import CompressionType, parse_compression
from averaging.receipts import Receipt
from averaging.state import NO_EXTRA_STATE, ExtraState
from averaging.strategies.catch_up import CatchUp
from averaging.training import (
    BackgroundDownload,
    History,
    Others,
    Own,
    Progress,
    Stage,
    StrategyContext,
    done_training,
    look_for_greater_origin,
)


class Strategy(ABC):
    """Decides what is averaged, and when. One object serves one averager; all methods run in the training thread.

    In a site every rank has its own object, and all of them must do the same. What could differ between ranks, such as
    whether a round is due, is asked with `site.broadcast_from_leader`.

    A custom strategy defines `start`, which creates its topics, and `after_step`, which averages them. A strategy that
    also decides when the inner optimizer steps defines `step` instead. Whatever newcomers and checkpoints need besides
    the model goes through `state` and `load`.

    Args:
        compression: codec of the averaged tensors on the wire; the averager's `compression` if None.
        error_feedback: whether the error of a lossy codec is added to what is sent in the next round. With
            `reply_form="delta"` it has no effect: there the error stays in the parameters anyway.
        max_norm: gradients are clipped to this norm before they are used; None does not clip.

    Attributes:
        averages_changes: whether the averaged tensors are changes, which `compression="top_k"` requires; of the class.
        attached: whether an averager uses this object; no other averager accepts it then. The averager sets it.
        history: origin of the run and, if the strategy makes global steps, these steps. The averager sets it at the
            start and whenever a state is taken over or loaded.
        stage: stage of the training, see `Progress`.
        digest: digest of the weights, once the training has ended.

    Raises:
        ConfigError: `max_norm` is not a finite number above 0, or the strategy cannot use the `compression`.
    """

    averages_changes = False
    attached = False
    history = History()
    stage = Stage.TRAINING
    _partners: frozenset[str] = frozenset()  # the members of the last group
    digest = ""

    def __init__(
        self,
        *,
        compression: CompressionType | str | None = None,
        error_feedback: bool = False,
        max_norm: float | None = None,
    ) -> None:
        if max_norm is not None and not (is_finite(max_norm) and max_norm > 0):
            raise ConfigError(f"max_norm must be finite and above 0, not {max_norm!r}")
        self.compression = None if compression is None else parse_compression(compression)
        if self.compression is CompressionType.TOP_K and not self.averages_changes:
            raise ConfigError(
                f"compression='top_k' sends the largest elements of a change, but {type(self).__name__} averages other "
                "tensors; use DiLoCo(sync_every, compression='top_k') or LocalSGD.of_changes(sync_every, "
                "compression='top_k'), or another compression"
            )
        self.error_feedback = error_feedback
        self.max_norm = max_norm

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Refuses to copy or pickle a strategy that is in use."""
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

    def schedule(self, training: StrategyContext) -> int:
        """Number of steps that a scheduler driven by the averager must have made by now."""
        return training.local_step

    @property
    def samples(self) -> float:
        """What this peer has gathered for the next global step: samples or local steps; 0 if it is not counted."""
        return 0.0

    @abstractmethod
    def start(self, training: StrategyContext) -> None:
        """Called once, before the peer starts: creates the topics that will be averaged.

        Raises:
            TensorError: the optimizer has tensors that cannot be averaged.
        """

    def joined(self, training: StrategyContext) -> None:
        """Called when the peer has joined its run and taken over the run's state, or has loaded a checkpoint."""
        self.announce(training)

    def announced_history(self, training: StrategyContext) -> History:
        """The history with which other peers compare theirs; `step` is this peer's local step."""
        return replace(self.history, step=training.local_step)

    def progress(self, training: StrategyContext, computing: float = 0.0) -> Progress:
        """The progress that this peer announces, see `Progress`."""
        history = self.announced_history(training)
        rate, made, parts = training.rate.per_second, training.standing.announced, training.parts.digests
        return Progress(history, self.samples, computing, training.donates, self.stage, self.digest, rate, made, parts)

    def announce(self, training: StrategyContext, computing: float = 0.0) -> None:
        """Announces the progress of this peer to the other peers."""
        training.announcements.announce(self.progress(training, computing).pack())

    @cached_property
    def _downloads(self) -> CatchUp:
        return CatchUp()

    def others(self, training: StrategyContext, announcements: Mapping[str, bytes]) -> Others:
        """Reads the announced progress of the other peers, by endpoint; says which of them are ahead."""
        ignored = self._downloads.ignored(training)
        return look_for_greater_origin(
            self._own(training), announcements, training.announcements.members, ignored=ignored
        )

    def _own(self, training: StrategyContext) -> Own:
        """This peer, as it looks at the others."""
        return Own(self.announced_history(training), training.announcements.member, training.standing, training.donates)

    def present_others(self, training: StrategyContext, *, wait: bool = True) -> Others:
        """What `others` makes of the present announcements, the same at all ranks of a site."""

        def look() -> Others:
            others = self.others(training, training.announcements.of_others(wait=wait))
            self._downloads.note_refused(self.announced_history(training), others)
            return others

        return training.site.broadcast_from_leader(look)

    def catch_up(self, training: StrategyContext, others: Others, start_timeout: float = 0.0) -> bool:
        """Takes over the state of a peer that is ahead, if there is one. Returns whether it did.

        Args:
            training: the training whose state is replaced.
            others: the other peers, as `others` returns them.
            start_timeout: seconds to wait until a donor starts to send, even if this peer could average with others.
        """
        return self._follow(training, self.announced_history(training), others, start_timeout)

    def _follow(self, training: StrategyContext, own: History, others: Others, start_timeout: float) -> bool:
        """Takes over the state of a peer that is ahead of the history `own`."""
        fetch = training.states.of_all_ranks(
            lambda: self._downloads.follow(training, own, others, self._partners, start_timeout)
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

    def adopt(self, training: StrategyContext, donors: Collection[str]) -> bool:
        """Takes over the state of one of these peers, which is right where this peer's is not. Returns whether it did.

        Nothing has to be done if the next average makes the peers equal.
        """
        return False

    def step(
        self, training: StrategyContext, closure: Callable[[], float] | None = None, batch_size: int | None = None
    ) -> float | None:
        """One `opt.step()`: steps the inner optimizer, then calls `after_step`.

        Args:
            training: the optimizer and the peer.
            closure: reevaluates the model and returns the loss.
            batch_size: samples behind the gradients, for strategies that count them.
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
        """Checks the numbers of another peer's `state`, before its tensors are downloaded.

        Raises:
            StateError: this peer cannot load that state.
        """
        return

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        """Loads what `state` returned, here or at another peer.

        Raises:
            StateError: it is malformed; nothing was changed.
        """
        return

    def own_state(self) -> Mapping[str, torch.Tensor]:
        """Tensors (not copied) that this peer's checkpoints need as well, but no newcomer gets; by name.

        They are divided between ranks like the parameters of these names.
        """
        return {}

    def load_own(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads what `own_state` returned; called after `load` with each checkpoint, also if that has none.

        Raises:
            StateError: a tensor does not fit.
        """
        return

    def finish(self, training: StrategyContext) -> None:
        """Called before the peer leaves and before `average_now`: ends the round in progress, if there is one."""
        return

    def conclude(self, training: StrategyContext, partners: Collection[str], timeout: float) -> Receipt | None:
        """Called by `DecentralizedAverager.finish`: makes the weights of all peers equal at the end of training.

        Afterwards the model holds the weights to export.

        Args:
            training: the model and the peer.
            partners: endpoints of the other peers that have ended their training.
            timeout: seconds that this may take.

        Returns:
            The receipt of the last round; None if there was none.
        """
        return None

    def _average_at_the_end(self, training: StrategyContext, topic: Topic, timeout: float) -> Receipt | None:
        """Averages a topic with the peers that have ended their training, until a round succeeds or time is up."""
        end = training.monotonic() + timeout
        receipt: Receipt | None = None

        def time_left() -> float:
            return end - training.monotonic() if done_training(training.announcements.of_others()) else 0.0

        while (left := training.site.broadcast_from_leader(time_left)) > LEAST_SEARCH:
            receipt = training.average(topic, expected_peers=done_training, search_timeout=left)
            if receipt.averaged:
                break
        return receipt

    def _options(self) -> str:
        """The options that differ from their defaults, for `repr`."""
        options = []
        if self.compression is not None:
            options.append(f"compression={self.compression.name}")
        if self.error_feedback:
            options.append("error_feedback=True")
        if self.max_norm is not None:
            options.append(f"max_norm={self.max_norm:g}")
        return "".join(f", {option}" for option in options)


def check_unused(strategy: object) -> None:
    """Checks that an averager can use this object.

    Raises:
        ConfigError: it is no strategy, or belongs to another averager.
    """
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"strategy must be a Strategy object, such as LocalSGD(sync_every=50), not {strategy!r}")
    if strategy.attached:
        raise ConfigError(f"{strategy!r} belongs to another averager, open or closed; make a new one for each averager")


# Decides when a peer's next round is due. Pure: the caller passes the time.


SMOOTHING = 0.2
"""Weight of the newest step in the running mean of the seconds per step."""


class AveragingSchedule:
    """Counts the local steps between two rounds of a peer.

    A round is due after `sync_every` steps. It is due earlier if other peers look for a group and would stop looking
    before this peer has made all its steps. So a slower peer, or one that joined in between, aligns with the others.

    Args:
        sync_every: steps between two rounds, at least 1.

    Raises:
        ConfigError: `sync_every` is not an integer of at least 1.
    """

    def __init__(self, sync_every: int) -> None:
        self.sync_every = check_whole_number("sync_every", sync_every, 1)
        self.steps = 0
        self._seconds = 0.0  # running mean per step
        self._last: float | None = None

    def count(self, now: float) -> None:
        """Counts one step, which ended at `now`."""
        self.steps += 1
        if self._last is not None:
            seconds = now - self._last
            self._seconds = seconds if self._seconds == 0 else self._seconds + SMOOTHING * (seconds - self._seconds)
        self._last = now

    def is_due(self, now: float, declared_until: float | None) -> bool:
        """Whether this peer averages now.

        Args:
            now: seconds since the epoch.
            declared_until: when the last of the other peers' declarations expires; None if nobody looks for a group.
        """
        if self.steps >= self.sync_every:
            return True
        if self.steps == 0 or self._seconds <= 0 or declared_until is None:
            return False
        return now < declared_until < now + (self.sync_every - self.steps + 1) * self._seconds

    def restart(self) -> None:
        """Starts counting anew, because a round begins; its duration does not count as a step's."""
        self.steps = 0
        self._last = None


def check_whole_number(name: str, value: int, minimum: int) -> int:
    """Returns `value`.

    Raises:
        ConfigError: it is not an integer of at least `minimum`.
    """
    if type(value) is not int or value < minimum:
        raise ConfigError(f"{name} must be a whole number of steps, at least {minimum}, not {value!r}")
    return value


logger = logging.getLogger("averaging.training")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 600.0
"""Seconds between two downloads; each pause is twice as long as the last one. A cause that remains, such as a loop that
writes parameters, would otherwise cost a download in each round."""


class DriftReaction:
    """What a peer does about a round in which it differed from most members: it warns, raises, or takes over theirs.

    Args:
        training: the context of the strategy.
        strategy: the strategy.
        on_drift: option of the peer.
    """

    def __init__(self, training: StrategyContext, strategy: Strategy, on_drift: OnDrift) -> None:
        self._training, self._strategy, self._on_drift = training, strategy, on_drift
        self._drifted: Receipt | None = None
        self._next, self._backoff = 0.0, Backoff(FIRST_PAUSE, LONGEST_PAUSE)

    def note(self, receipt: Receipt) -> None:
        """Called with the receipt of each round."""
        if any(drift.endpoint == receipt.endpoint for drift in receipt.drifted):
            self._drifted = receipt

    def resolve(self) -> None:
        """Called after the step whose round may have found that this peer differs.

        Raises:
            RoundError: it does, and `on_drift` is "raise".
        """
        receipt, self._drifted = self._drifted, None
        if receipt is None or self._on_drift is OnDrift.WARN:
            return
        if self._on_drift is OnDrift.RAISE:
            text = f"in round {receipt.round} {'; '.join(map(str, receipt.drifted))} (on_drift='raise')"
            raise RoundError(text, drifted=True)
        training = self._training
        changed, donors = training.drift.adopt_hyperparameters()
        if changed and training.site.leads:
            logger.warning("drift: this peer has taken over %s from most peers of its group", ", ".join(changed))
        now = training.site.broadcast_from_leader(training.monotonic)
        if not donors or now < self._next:
            return
        self._next = now + self._backoff.next_delay()
        if self._strategy.adopt(training, donors) and training.site.leads:
            logger.warning("drift: this peer has taken over the state of most peers of its group")
