"""The contract between `DecentralizedAverager` and what decides what is averaged, and when."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, SupportsIndex

import torch

from averaging.common.validation import is_finite
from averaging.errors import ConfigError, RoundError, StateError
from averaging.observe.receipts import Receipt
from averaging.peer.topics import Topic
from averaging.protocol.messages import CompressionType, parse_compression
from averaging.state.snapshots import NO_EXTRAS, Extras
from averaging.strategies.catch_up import CatchUp
from averaging.training.history import History, Others, Progress, Stage, ending, look_for_greater_origin
from averaging.training.training import Fetch, Training


class Strategy(ABC):
    """Decides what is averaged, and when. One object serves one averager; all methods run in the training thread.

    A strategy of one's own defines `start`, where it says what it will average, and `after_step`, where it averages;
    one that also decides when the inner optimizer steps defines `step` instead. What must reach newcomers and
    checkpoints beside the model goes through `state` and `load`.

    Args:
        compression: how the averaged tensors are packed on the wire; the averager's `compression` if None.
        error_feedback: whether what a lossy code loses is added to what is sent in the next round. Where reducers
            answer with deltas (`reply="delta"`) it stays in the parameters themselves, and comes back without it.
        max_norm: gradients are clipped to this norm before they are used; None leaves them.

    Attributes:
        taken: whether an averager has been made with it. The averager sets it, and no other one takes it then.
        history: where the run began, and the steps that it has made together, if the strategy makes such steps. The
            averager sets it at the start and whenever a state is taken over or loaded.
        stage: of the training, see `Progress`.
        digest: of the weights, once the training has ended.

    Raises:
        ConfigError: `max_norm` is not above 0.
    """

    taken = False
    history = History()
    stage = Stage.TRAINING
    _partners: frozenset[str] = frozenset()  # those with whom this peer has averaged last
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
        self.error_feedback = error_feedback
        self.max_norm = max_norm

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Copies and pickles one that has not been given to an averager yet."""
        if self.taken:
            raise ConfigError(
                f"{self!r} works with its averager's thread and connections, so it cannot be copied or pickled any "
                "more; make a new one for another averager, and save the averager's state_dict()"
            )
        return super().__reduce_ex__(protocol)

    @property
    def global_step(self) -> int | None:
        """Steps that the run has made together, which drive a scheduler; None where each peer counts its own."""
        return None

    def schedule(self, training: Training) -> int:
        """How often a scheduler that the averager drives must have stepped by now."""
        return training.local_step

    @property
    def samples(self) -> float:
        """What has been gathered for the next global step, where the strategy counts it: samples, or local steps."""
        return 0.0

    @abstractmethod
    def start(self, training: Training) -> None:
        """Called once, before the peer starts: makes the topics that will be averaged.

        Raises:
            TensorError: the optimizer has tensors that cannot be averaged.
        """

    def joined(self, training: Training) -> None:
        """Called when the peer has joined its run and taken over the run's state, if there is one, or a checkpoint."""
        self.announce(training)

    def announced(self, training: Training) -> History:
        """The history that others compare with theirs: here that of a peer that counts its own steps."""
        return replace(self.history, step=training.local_step)

    def progress(self, training: Training, coming: float = 0.0) -> Progress:
        """What this peer announces to the others, see `Progress`."""
        history = self.announced(training)
        rate = training.step_rate
        return Progress(history, self.samples, coming, training.donates, self.stage, self.digest, rate)

    def announce(self, training: Training, coming: float = 0.0) -> None:
        """Announces the progress of this peer to the others."""
        training.tell(self.progress(training, coming).pack())

    @cached_property
    def _catching_up(self) -> CatchUp:
        return CatchUp()

    def others(self, training: Training, told: Mapping[str, bytes]) -> Others:
        """Reads the progress of the other peers, by endpoint: who counts as ahead of this one."""
        return look_for_greater_origin(
            self.announced(training),
            told,
            doubted=self._catching_up.doubted(training),
            donates=training.donates,
        )

    def keep_up(self, training: Training, others: Others, patience: float = 0.0) -> bool:
        """Takes over the state of those who are ahead, if there are any; whether that was done.

        Args:
            training: whose state it becomes.
            others: from `others`.
            patience: seconds to wait for somebody to begin to send it, though this peer could go on with others.
        """
        own = self.announced(training)
        fetch = self._catching_up.follow(training, own, others, self._partners, patience)
        if fetch is None:
            return False
        try:
            self._take_over(training, fetch)
        except (StateError, RoundError) as error:
            self._catching_up.failed(training, own, fetch, error)
            return False
        self._catching_up.taken_over(own, self.announced(training))
        self.announce(training)
        return True

    def _take_over(self, training: Training, fetch: Fetch) -> None:
        training.take_over(fetch)

    def step(
        self, training: Training, closure: Callable[[], float] | None = None, batch_size: int | None = None
    ) -> float | None:
        """One `opt.step()`: the inner optimizer's, then `after_step`.

        Args:
            training: whose optimizer and peer it works with.
            closure: reevaluates the model and returns the loss.
            batch_size: samples behind the gradients, where the strategy counts them.
        """
        loss = training.inner_step(closure, self.max_norm)
        self.after_step(training)
        return loss

    def step_alone(self, training: Training, closure: Callable[[], float] | None) -> float | None:
        """One `opt.step()` after this peer has left its run, as on SIGTERM, while the script goes on for a while."""
        return training.inner_step(closure, self.max_norm)

    def after_step(self, training: Training) -> None:
        """Called after each step of the inner optimizer, with the tensors unlocked; it may average."""
        return

    def state(self) -> Extras:
        """What newcomers and checkpoints need of the strategy: its tensors (not copied) and numbers."""
        return NO_EXTRAS

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        """Takes over what `state` returned, here or at another peer.

        Raises:
            StateError: it is malformed; nothing was changed.
        """
        return

    def finish(self, training: Training) -> None:
        """Called before the peer leaves and before `average_now`: waits for what is in progress, or gives it up."""
        return

    def conclude(self, training: Training, partners: Collection[str], patience: float) -> Receipt | None:
        """Called by `DecentralizedAverager.finish`: brings this peer together with the others at the end of training.

        Afterwards the model holds the weights to export.

        Args:
            training: with whose model and peer it works.
            partners: endpoints of the others that train no more.
            patience: seconds that this may take.

        Returns:
            The receipt of the last round; None if there was none.
        """
        return None

    def _average_at_the_end(self, training: Training, topic: Topic, patience: float) -> Receipt | None:
        """Averages a topic with those that train no more, until that succeeds or the time is over."""
        end = training.monotonic() + patience
        receipt: Receipt | None = None
        while ending(training.told()) and (left := end - training.monotonic()) > 0:
            receipt = training.average(topic, awaited=ending, patience=left)
            if receipt.averaged:
                break
        return receipt

    def _options(self) -> str:
        """What is not as usual, for `repr`."""
        told = []
        if self.compression is not None:
            told.append(f"compression={self.compression.name}")
        if self.error_feedback:
            told.append("error_feedback=True")
        if self.max_norm is not None:
            told.append(f"max_norm={self.max_norm:g}")
        return "".join(f", {option}" for option in told)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it evaluates the model during its step, as LBFGS does, and so makes none without a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty
