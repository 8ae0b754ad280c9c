"""The state of a training besides the averaged tensors, for newcomers and checkpoints."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from averaging.common import all_numbers_finite, first_other_name, is_count
from averaging.config import NonFinite
from averaging.errors import ConfigError, StateError
from averaging.state import ExtraState, State
from averaging.training.context import StrategyContext
from averaging.training.history import History
from averaging.training.layout import as_divided, local
from averaging.training.optimizer_state import PREFIX, load_optimizer, pack_optimizer, restored_on_error

# The learning rate scheduler that an averager drives.


def make_scheduler(make: Any, optimizer: torch.optim.Optimizer) -> LRScheduler:
    if not callable(make):
        raise ConfigError(
            "scheduler must be a function of the optimizer, such as functools.partial(StepLR, step_size=30), not "
            f"{type(make).__name__}; a scheduler that already exists is stepped by the training loop"
        )
    made = make(optimizer)
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            f"the averager cannot drive {type(made).__name__}; make it with the averager as its optimizer, and "
            "step it in the training loop"
        )
    return made


@contextmanager
def loaded(scheduler: LRScheduler | None, saved: object) -> Iterator[None]:
    """Loads a scheduler's state, if there are both; restores the former state if that or the block raises."""
    if scheduler is None or not isinstance(saved, dict):
        yield
        return
    before = copy.deepcopy(scheduler.state_dict())
    try:
        try:
            scheduler.load_state_dict(saved)
        except Exception as error:  # schedulers do not check their state
            raise ConfigError(
                f"the state dict holds the state of another scheduler than {type(scheduler).__name__} "
                f"({type(error).__name__}: {error}); use the same scheduler, or remove that state: "
                "del state_dict['averaging']['scheduler']"
            ) from error
        yield
    except BaseException:
        scheduler.load_state_dict(before)
        raise


SCHEDULED = ("lr", "momentum", "betas")
"""What the schedulers of torch set in parameter groups."""


class SchedulerDriver:
    """Keeps a scheduler at the step of its run, which may also be an earlier one: that of another origin."""

    def __init__(self, scheduler: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler, self._optimizer = scheduler, optimizer
        self._state = copy.deepcopy(scheduler.state_dict())
        groups = optimizer.param_groups
        self._values = [{key: copy.deepcopy(group[key]) for key in SCHEDULED if key in group} for group in groups]

    def drive(self, steps: int) -> None:
        """Steps the scheduler until it has made `steps` steps, from its beginning if it has made more."""
        if _steps_of(self._scheduler) > steps:
            self._rewind()
        with warnings.catch_warnings():
            # A newcomer's scheduler catches up with the run before the inner optimizer has stepped.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            while _steps_of(self._scheduler) < steps:
                self._scheduler.step()

    def _rewind(self) -> None:
        self._scheduler.load_state_dict(copy.deepcopy(self._state))
        for group, values in zip(self._optimizer.param_groups, self._values, strict=True):
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


def _steps_of(scheduler: Any) -> int:
    """Steps made so far. A ChainedScheduler does not count them, but each scheduler in it makes every step."""
    while isinstance(scheduler, ChainedScheduler):
        scheduler = scheduler._schedulers[0]
    made: int = scheduler.last_epoch
    return made


def set_initial_lr(optimizer: torch.optim.Optimizer) -> None:
    """Sets `initial_lr` of the groups, which a scheduler requires if it does not begin at step 0."""
    for group in optimizer.param_groups:
        if (lr := group.get("lr")) is not None:
            group.setdefault("initial_lr", lr.clone() if isinstance(lr, torch.Tensor) else lr)


logger = logging.getLogger("averaging.training")


class StrategyState(Protocol):
    history: History
    scheduled_globally: bool

    def joined(self, training: StrategyContext) -> None: ...
    def announced_history(self, training: StrategyContext) -> History: ...
    def state(self) -> ExtraState: ...
    def parameter_of(self, name: str) -> str | None: ...
    def state_to_come(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]: ...
    def check(self, user: Mapping[str, Any]) -> None: ...
    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None: ...
    def own_state(self) -> Mapping[str, torch.Tensor]: ...
    def load_own(self, tensors: Mapping[str, torch.Tensor]) -> None: ...


class TrainingState:
    """The state of optimizer, strategy and scheduler, the buffers that are not averaged, and the step counter.

    `shared` and `take_over` are called in the peer's thread, `shared` also in the training thread when that commits a
    state. All other methods are called in the training thread.
    """

    def __init__(
        self,
        training: StrategyContext,
        strategy: StrategyState,
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None,
    ) -> None:
        self._training, self._strategy = training, strategy
        self.scheduler = None if scheduler is None else make_scheduler(scheduler, training.optimizer)
        self._driver = None if self.scheduler is None else SchedulerDriver(self.scheduler, training.optimizer)

    def drive_scheduler(self) -> None:
        if self._driver is not None:
            by_global_steps = self._strategy.scheduled_globally
            self._driver.drive(self._strategy.history.step if by_global_steps else self._training.local_step)

    # For newcomers

    def shared(self) -> ExtraState:
        """The state for newcomers (not copied)."""
        self._training.copies.refresh()
        tensors, packed = pack_optimizer(self._training.optimizer, self._training.progress)
        packed["evaluates"] = not self._training.modes.training
        strategy = self._strategy.state()
        user = {
            "local_step": self._training.local_step,
            "optimizer": packed,
            "strategy": self._pack_strategy(strategy.user),
        }
        buffers = self._training.shared_buffers
        return ExtraState({**tensors, **buffers, **{f"strategy/{n}": t for n, t in strategy.tensors.items()}}, user)

    def check(self, user: Mapping[str, Any]) -> None:
        """Checks what a state holds besides its tensors, before these are downloaded; StateError if it does not fit."""
        if "optimizer" not in user:
            return
        local_step, strategy = user.get("local_step"), user.get("strategy")
        if not is_count(local_step):
            raise StateError(f"its step counter is {local_step!r:.100}")
        if not isinstance(strategy, dict):
            raise StateError(f"its strategy is {strategy!r:.100}")
        self._check_kind(strategy)
        self._strategy.check(strategy)
        if "history" in strategy:
            History.unpack(strategy["history"])
        refuses = self._training.peer.config.non_finite is NonFinite.REFUSE
        if refuses and not all_numbers_finite(user["optimizer"], strategy):
            raise StateError("a number in it is NaN or infinite; non_finite='allow' takes it over")

    def take_over(self, state: State) -> None:
        """Loads the `shared` state of another peer. The caller holds the tensors' lock.

        If it does not fit this run, optimizer or strategy, it raises StateError, and nothing was changed.
        """
        if state.version < 1:
            raise StateError("its state was never averaged, so it belongs to no run")
        self.check(state.user)
        if "optimizer" not in state.user:
            logger.warning("the state has no optimizer state; only the parameters are taken over")
            return
        strategy = state.user["strategy"]
        buffers = self._training.shared_buffers
        shared = {name: take_tensor(state.tensors, name, buffer) for name, buffer in buffers.items()}
        self._check_averaged(state.tensors)
        of_strategy = {
            name.removeprefix("strategy/"): tensor
            for name, tensor in state.tensors.items()
            if name.startswith("strategy/")
        }
        optimizer = self._training.optimizer
        with restored_on_error(optimizer):
            load_optimizer(optimizer, state.tensors, state.user["optimizer"], self._training.progress)
            self._load_strategy(of_strategy, strategy, made=False)
        self._training.modes.received(training=not state.user["optimizer"].get("evaluates"))
        for name, tensor in shared.items():
            buffers[name].copy_(tensor)
        self._training.local_step = state.user["local_step"]
        self._training.drift.since = 1 + self._training.local_step
        if self._training.local_step:
            set_initial_lr(optimizer)

    # For checkpoints

    def saved(self) -> dict[str, Any]:
        """The state for checkpoints (copied), besides the state dicts of the model and the inner optimizer."""
        strategy = self._strategy.state()
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}
        return scheduler | {
            "local_step": self._training.local_step,
            "progress": sorted(self._training.progress.keys),
            "samples": [self._training.weights.made, dict(self._training.weights.averaged)],
            "strategy": {
                "tensors": {
                    name: self._divided(tensor, self._strategy.parameter_of(name))
                    for name, tensor in strategy.tensors.items()
                },
                "user": self._pack_strategy(strategy.user),
                "own": {name: self._divided(tensor, name) for name, tensor in self._strategy.own_state().items()},
            },
        }

    def tensors_to_come(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """See `Strategy.state_to_come`; divided as the tensors of `saved`."""
        state, own = self._strategy.state_to_come()
        divided = {name: self._divided(tensor, self._strategy.parameter_of(name)) for name, tensor in state.items()}
        return divided, {name: self._divided(tensor, name) for name, tensor in own.items()}

    def load(self, inner: dict[str, Any], saved: object) -> None:
        """Loads the inner optimizer's state dict and a `saved` state, which becomes the state that newcomers get.

        If it belongs to another strategy or scheduler, it raises ConfigError; these two were not changed.
        """
        training = self._training
        own = saved if isinstance(saved, dict) else {"local_step": saved}
        if not is_count(own.get("local_step")):
            raise ConfigError(f"the state dict has {own!r:.200} under 'averaging', not a step counter")
        training.thread.check()
        with training.peer.tensors():
            self._load(inner, own)
        if training.site.owns:
            training.thread.run(training.peer.commit(training.peer.version))
        self._strategy.joined(training)
        self.drive_scheduler()

    def _load(self, inner: dict[str, Any], saved: Mapping[str, Any]) -> None:
        strategy, schedule = saved.get("strategy"), saved.get("scheduler")
        optimizer = self._training.optimizer
        with restored_on_error(optimizer):
            optimizer.load_state_dict(inner)
            try:
                if isinstance(strategy, dict):
                    self._check_kind(strategy.get("user", {}))
                with loaded(self.scheduler, schedule):
                    if isinstance(strategy, dict):
                        tensors = {name: local(tensor) for name, tensor in strategy.get("tensors", {}).items()}
                        self._load_strategy(tensors, strategy.get("user", {}), made=True)
                        self._strategy.load_own(_own_tensors(strategy))
            except StateError as error:
                raise ConfigError(f"the state dict does not fit {self._strategy!r}: {error}") from error
            self._training.local_step = saved["local_step"]
            self._load_samples(saved.get("samples"))
            self._training.progress.keys.update(saved.get("progress", ()))

    def _load_samples(self, saved: object) -> None:
        """Loads the samples that no average has yet; older checkpoints have none."""
        self._training.weights.forget()
        match saved:
            case [made, dict(averaged)] if is_count(made) and all(map(is_count, averaged.values())):
                self._training.weights.made = made
                self._training.weights.averaged = {str(topic): min(count, made) for topic, count in averaged.items()}

    def _divided(self, tensor: torch.Tensor, parameter: str | None) -> torch.Tensor:
        """A copy of a strategy's tensor, as torch.distributed.checkpoint saves it: divided like its parameter."""
        copied = tensor.detach().clone()
        if parameter is None or copied.shape != self._training.parameters[parameter].shape:
            return copied
        return as_divided(copied, self._training.trained[parameter])

    def _check_averaged(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Checks that the other peer averages as many tensors. Their shapes and names were compared before."""
        own = list(self._training.tensors)
        theirs = [
            name
            for name, tensor in tensors.items()
            if not name.startswith((f"{PREFIX}/", "strategy/"))
            and name not in self._training.shared_buffers
            and (tensor.is_floating_point() or not name.startswith("buffer/"))
        ]
        if len(theirs) != len(own):
            which = f"{theirs[len(own)]!r} only there" if len(theirs) > len(own) else f"{own[len(theirs)]!r} only here"
            raise StateError(f"it averages {len(theirs)} tensors, this peer {len(own)} ({which}); use the same model")

    def _pack_strategy(self, user: Mapping[str, Any]) -> dict[str, Any]:
        history = self._strategy.announced_history(self._training)
        # As text, since torch.load(weights_only=True) refuses bytes in a checkpoint.
        packed = {"history": history.pack(), "trail": history.pack_trail().hex()}
        return {"kind": type(self._strategy).__name__, **packed, **user}

    def _load_strategy(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any], *, made: bool) -> None:
        """Loads the strategy's part of a state, which may have no history; the peer may have `made` the state."""
        history = History.unpack(user["history"], user.get("trail")) if "history" in user else None
        self._strategy.load(tensors, user)
        if history is not None:
            before, self._strategy.history = self._strategy.history, history
            self._training.standing = self._training.standing.after_loading(history, before, made=made)

    def _check_kind(self, strategy: Mapping[str, Any]) -> None:
        kind, ours = strategy.get("kind"), type(self._strategy).__name__
        if kind not in (None, ours):
            raise StateError(f"its strategy is {str(kind)[:100]}, but this peer's is {ours}; use the same strategy")


def _own_tensors(strategy: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What a checkpoint holds for one peer only; nothing if it is an older one."""
    own = strategy.get("own", {})
    if not isinstance(own, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in own.values()):
        raise StateError(f"it holds {own!r:.100} under 'own', not tensors by name")
    return {name: local(tensor) for name, tensor in own.items()}


def take_tensor(tensors: Mapping[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
    """The tensor of that name; StateError if it is missing, or has another shape or dtype than `like`."""
    tensor = tensors.get(name)
    if tensor is None:
        raise StateError(f"the state lacks {name!r}")
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        there, here = (f"{t.dtype} {list(t.shape)}" for t in (tensor, like))
        raise StateError(f"{name!r} is {there} in the state, but {here} at this peer")
    return tensor


def under_own_names(tensors: Mapping[str, torch.Tensor], prefix: str, own: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors with that prefix under the names that this peer has for them.

    A state may come from an averager that was made without the model, or a checkpoint from an older one. Then the names
    only count the tensors, whose order is the same.
    """
    named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if len(named) == len(own) and first_other_name(own, list(named)) is None:
        return dict(zip(own, named.values(), strict=True))
    return named


def count_in(user: Mapping[str, Any], name: str) -> int:
    """The count of that name, 0 if there is none; StateError if it is none."""
    count = user.get(name, 0)
    if not is_count(count):
        raise StateError(f"the state has {count!r:.100} under {name!r}, not a number of steps")
    return count
