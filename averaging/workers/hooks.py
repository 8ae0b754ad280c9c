"""The hooks after a call, as a plan names them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from averaging.errors import ConfigError
from averaging.workers.payload import HookName


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hook:
    """What all hooks have.

    Attributes:
        every: The hook runs after each so many steps.

    Raises:
        ConfigError: A value is out of range.
    """

    name: ClassVar[HookName]
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"the hook {self.name} must run every 1 or more steps, not every {self.every}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate(_Hook):
    """Calls `Backend.evaluate`. Its numbers are in the statistics of the call."""

    name: ClassVar[HookName] = HookName.EVALUATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload(_Hook):
    """Calls `Backend.offload`."""

    name: ClassVar[HookName] = HookName.OFFLOAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(_Hook):
    """Calls `Backend.save`.

    Attributes:
        path: Directory or file in the `save_folder` of the worker. `{step}` in it is replaced by the number of the
            step.
    """

    name: ClassVar[HookName] = HookName.SAVE
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Average(_Hook):
    """Calls `Backend.average`: the model joins a round with the other sites."""

    name: ClassVar[HookName] = HookName.AVERAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRealloc(_Hook):
    """Moves parameters: target = eta · source + (1 - eta) · target. One of the two models makes the call.

    Attributes:
        source: Name of a model.
        target: Name of a model.
        eta: 1 copies the parameters; less moves the target towards them.
    """

    name: ClassVar[HookName] = HookName.PARAM_REALLOC
    source: str
    target: str
    eta: float = 1.0

    def __post_init__(self) -> None:
        _Hook.__post_init__(self)
        if not 0.0 <= self.eta <= 1.0:
            raise ConfigError(f"eta of param_realloc must be from 0 to 1, not {self.eta}")


Hook: TypeAlias = Evaluate | Offload | Save | Average | ParamRealloc
