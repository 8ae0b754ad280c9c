"""What of a training travels beside the averaged tensors: newcomers are given it, checkpoints hold it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from averaging.common.validation import is_count
from averaging.errors import ConfigError, StateError
from averaging.state.packing import State
from averaging.state.snapshots import Extras
from averaging.training.history import History
from averaging.training.optimizer_state import PREFIX, load_optimizer, pack_optimizer, restored_on_error
from averaging.training.scheduler import loaded, set_initial_lr
from averaging.training.training import Training

logger = logging.getLogger("averaging.training")


class StrategyState(Protocol):
    """The strategy of an averager, as far as its state travels."""

    history: History

    def announced(self, training: Training) -> History:
        """The history that other peers compare with theirs."""
        ...

    def state(self) -> Extras:
        """What newcomers and checkpoints need of the strategy: its tensors (not copied) and numbers."""
        ...

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        """Takes over what `state` returned, here or at another peer.

        Raises:
            StateError: it is malformed; nothing was changed.
        """
        ...


class TrainingState:
    """The state of the inner optimizer, of the strategy and of the scheduler, the other buffers, and the step counter.

    `shared` and `take_over` are called in the peer's thread, `shared` also in the training thread where that commits a
    state; the rest in the training thread.

    Args:
        training: whose optimizer and step counter it is.
        strategy: of the averager.
        scheduler: that the averager drives, if there is one. Newcomers are not given its state: they drive their own.
        buffers: of the model that are not averaged, by name.
        max_steps: a state that claims more steps is refused.
    """

    def __init__(
        self,
        training: Training,
        strategy: StrategyState,
        scheduler: LRScheduler | None,
        buffers: Mapping[str, torch.Tensor],
        max_steps: int,
    ) -> None:
        self._training, self._strategy, self._scheduler = training, strategy, scheduler
        self._buffers, self._max_steps = buffers, max_steps

    # For newcomers

    def shared(self) -> Extras:
        """What newcomers are given (not copied).

        Raises:
            StateError: the inner optimizer keeps something that cannot be given.
        """
        tensors, packed = pack_optimizer(self._training.optimizer)
        strategy = self._strategy.state()
        user = {
            "local_step": self._training.local_step,
            "optimizer": packed,
            "strategy": self._of_strategy(strategy.user),
        }
        return Extras({**tensors, **self._buffers, **{f"strategy/{n}": t for n, t in strategy.tensors.items()}}, user)

    def check(self, user: Mapping[str, Any]) -> None:
        """Looks at what a state holds besides its tensors, before these are downloaded.

        Raises:
            StateError: it is malformed, or not of this strategy, or it claims more than `max_steps`.
        """
        if "optimizer" not in user:
            return
        local_step, strategy = user.get("local_step"), user.get("strategy")
        if not is_count(local_step):
            raise StateError(f"its step counter is {local_step!r:.100}")
        if not isinstance(strategy, dict):
            raise StateError(f"its strategy is {strategy!r:.100}")
        self._check_kind(strategy)
        steps = max(local_step, History.unpack(strategy["history"]).step if "history" in strategy else 0)
        if steps > self._max_steps:
            raise StateError(f"it claims {steps} steps, and max_steps is {self._max_steps}; raise that if it is true")

    def take_over(self, state: State) -> None:
        """Takes over what another peer has `shared`. The caller holds the tensors' lock.

        Raises:
            StateError: it is malformed, or not of this run, optimizer or strategy; nothing was changed.
        """
        if state.version < 1:
            raise StateError("its state has never been averaged and belongs to no run")
        self.check(state.user)
        if "optimizer" not in state.user:
            logger.warning("the state has no optimizer's in it; only the parameters are taken over")
            return
        strategy = state.user["strategy"]
        kept = {name: take_tensor(state.tensors, name, buffer) for name, buffer in self._buffers.items()}
        self._check_averaged(state.tensors)
        of_strategy = {
            name.removeprefix("strategy/"): tensor
            for name, tensor in state.tensors.items()
            if name.startswith("strategy/")
        }
        optimizer = self._training.optimizer
        with restored_on_error(optimizer):
            load_optimizer(optimizer, state.tensors, state.user["optimizer"])
            self._load_strategy(of_strategy, strategy)
        for name, tensor in kept.items():
            self._buffers[name].copy_(tensor)
        self._training.local_step = state.user["local_step"]
        if self._training.local_step:
            set_initial_lr(optimizer)

    # For checkpoints

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds beside the model's and the inner optimizer's state dict (copied)."""
        strategy = self._strategy.state()
        scheduler = {} if self._scheduler is None else {"scheduler": self._scheduler.state_dict()}
        return scheduler | {
            "local_step": self._training.local_step,
            "strategy": {
                "tensors": {name: tensor.detach().clone() for name, tensor in strategy.tensors.items()},
                "user": self._of_strategy(strategy.user),
            },
        }

    def load(self, inner: dict[str, Any], saved: Mapping[str, Any]) -> None:
        """Loads the inner optimizer's state dict and what was `saved`. The caller holds the tensors' lock.

        Raises:
            ConfigError: it is of another strategy or scheduler; the inner optimizer and the scheduler are as they were.
        """
        strategy, schedule = saved.get("strategy"), saved.get("scheduler")
        optimizer = self._training.optimizer
        with restored_on_error(optimizer):
            optimizer.load_state_dict(inner)
            try:
                if isinstance(strategy, dict):
                    self._check_kind(strategy.get("user", {}))
                with loaded(self._scheduler, schedule):
                    if isinstance(strategy, dict):
                        self._load_strategy(strategy.get("tensors", {}), strategy.get("user", {}))
            except StateError as error:
                raise ConfigError(f"the state dict is not of {self._strategy!r}: {error}") from error
            self._training.local_step = saved["local_step"]

    def _check_averaged(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Whether the same tensors are averaged there as here.

        Shapes alone would let a larger or smaller model pass, and one whose parameters were given in another order.
        """
        own = list(self._training.tensors)
        theirs = [
            name
            for name, tensor in tensors.items()
            if not name.startswith((f"{PREFIX}/", "strategy/"))
            and (tensor.is_floating_point() or not name.startswith("buffer/"))
        ]
        if len(theirs) != len(own):
            which = f"{theirs[len(own)]!r} only there" if len(theirs) > len(own) else f"{own[len(theirs)]!r} only here"
            raise StateError(f"it averages {len(theirs)} tensors, this peer {len(own)}, {which}; use the same model")
        if theirs != own and set(theirs) == set(own):
            there, here = next((there, here) for there, here in zip(theirs, own, strict=True) if there != here)
            raise StateError(f"it averages {there!r} where this peer has {here!r}; give parameters in the same order")

    def _of_strategy(self, user: Mapping[str, Any]) -> dict[str, Any]:
        """What travels of the strategy besides its tensors."""
        history = self._strategy.announced(self._training)
        return {"kind": type(self._strategy).__name__, "history": history.pack(), **user}

    def _load_strategy(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        """Loads what travels of the strategy. One that does not make steps together may come without a history."""
        history = History.unpack(user["history"]) if "history" in user else None
        self._strategy.load(tensors, user)
        if history is not None:
            self._strategy.history = history

    def _check_kind(self, strategy: Mapping[str, Any]) -> None:
        """Whether a state is of the same kind of strategy; those of peers without one are taken, too."""
        kind, ours = strategy.get("kind"), type(self._strategy).__name__
        if kind not in (None, ours):
            raise StateError(f"its strategy is {str(kind)[:100]}, here it is {ours}; use the same one")


def take_tensor(tensors: Mapping[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
    """The tensor of that name, if it is of the same shape and dtype as `like`.

    Raises:
        StateError: it is missing, or another.
    """
    found = tensors.get(name)
    if found is None:
        raise StateError(f"the state lacks {name!r}")
    if found.shape != like.shape or found.dtype != like.dtype:
        there, here = (f"{t.dtype} {list(t.shape)}" for t in (found, like))
        raise StateError(f"{name!r} is {there} in the state, here {here}")
    return found


def count_in(user: Mapping[str, Any], name: str) -> int:
    """The whole number of that name, 0 if there is none.

    Raises:
        StateError: it is something else.
    """
    count = user.get(name, 0)
    if not is_count(count):
        raise StateError(f"the state has {count!r:.100} under {name!r}, not a number of steps")
    return count
