"""What an optimizer keeps in its parameter groups and changes itself, such as counters and estimated step sizes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from averaging.errors import StateError

SCHEDULED: Mapping[str, frozenset[str]] = {
    "lr": frozenset({"initial_lr"}),
    "momentum": frozenset({"max_momentum"}),
    "betas": frozenset({"max_momentum"}),
}
"""Hyperparameters of a group that belong to a scheduler of torch if the group has one of these keys, too.

A scheduler may be stepped by a hook of the optimizer, and so within the optimizer's step.
"""

HYPERPARAMETERS = frozenset({"lr", "momentum", "betas", "weight_decay", "eps"})
"""Usual names of hyperparameters, for constructors whose arguments have other names."""

Groups = list[dict[str, Any]]


class GroupProgress:
    """The keys of an optimizer's parameter groups that are its progress: those that its steps change.

    All other keys are hyperparameters, which belong to the user. Before the first step is seen, as after a checkpoint,
    a number that differs from its default is progress, too, if no constructor has an argument of that name.

    Args:
        optimizer: any object with `param_groups` and `step`.

    Attributes:
        keys: the keys that have changed in a step, or were received as progress.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.keys: set[str] = set()
        constructors = (kind.__dict__["__init__"] for kind in type(optimizer).__mro__ if "__init__" in kind.__dict__)
        self._settable = HYPERPARAMETERS.union(*(inspect.signature(one).parameters for one in constructors))

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Wraps a step of the optimizer."""
        before = [
            dict(group) for group in self._optimizer.param_groups
        ]  # keeps replaced tensors, so that ids are unique
        prints = [_fingerprints(group) for group in before]
        yield
        for old, group in zip(prints, self._optimizer.param_groups, strict=False):
            new = _fingerprints(group)
            changed = {key for key in new if key not in old or old[key] != new[key]} - self.keys
            self.keys |= {key for key in changed if SCHEDULED.get(key, frozenset()).isdisjoint(group)}

    def values(self) -> Groups:
        """The progress of each group."""
        return [
            {key: value for key, value in group.items() if self._is_progress(key, value)}
            for group in self._optimizer.param_groups
        ]

    def _is_progress(self, key: str, value: object) -> bool:
        if key in self.keys:
            return True
        defaults = getattr(self._optimizer, "defaults", {})
        return _is_number(value) and key not in self._settable and key in defaults and bool(value != defaults[key])


def merged(groups: Groups, progress: object) -> Groups:
    """Parameter groups with the progress of another optimizer of the same kind.

    Args:
        groups: of this peer's optimizer; not changed.
        progress: what `GroupProgress.values` returned there; untrusted.

    Raises:
        StateError: it does not fit these groups.
    """
    if not isinstance(progress, list) or not all(isinstance(values, dict) for values in progress):
        raise StateError("the progress of its optimizer is unreadable")
    if not any(progress):
        return groups
    if len(progress) != len(groups):
        raise StateError(
            f"its optimizer has {len(progress)} parameter groups, but this peer's has {len(groups)}; use the same"
        )
    for number, (group, values) in enumerate(zip(groups, progress, strict=True)):
        for key, value in values.items():
            if not isinstance(key, str) or key == "params" or not _fits(value, group.get(key)):
                here = group.get(key)
                raise StateError(
                    f"{key!r:.100} in parameter group {number} of its optimizer is {value!r:.100}, which does not fit "
                    f"this peer's {here!r:.100}"
                )
    return [
        group | {key: _like(value, group.get(key)) for key, value in values.items()}
        for group, values in zip(groups, progress, strict=True)
    ]


def _fits(theirs: object, ours: object) -> bool:
    """Whether a value can take the place of another one; an optimizer may add some keys in its first step."""
    if isinstance(theirs, float) and math.isnan(theirs):
        return False
    if ours is None or theirs is None:
        return theirs is None or isinstance(theirs, int | float | str | torch.Tensor)
    if isinstance(ours, list | tuple):
        if not isinstance(theirs, list | tuple) or len(theirs) != len(ours):
            return False
        return all(_fits(one, other) for one, other in zip(theirs, ours, strict=True))
    if isinstance(ours, str | bytes | bool):
        return type(theirs) is type(ours)
    # A step may turn a number into a tensor.
    return _shape(theirs) is not None and _shape(theirs) == _shape(ours)


def _like(theirs: object, ours: object) -> object:
    if isinstance(ours, torch.Tensor):
        return ours.detach().clone().copy_(torch.as_tensor(theirs))
    return tuple(theirs) if isinstance(theirs, list) and isinstance(ours, tuple) else theirs


def _shape(value: object) -> tuple[int, ...] | None:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return () if _is_number(value) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fingerprints(group: Mapping[str, Any]) -> dict[str, object]:
    """For each key but the parameters, something that differs once the value has changed; no tensor is read."""
    return {key: _fingerprint(value) for key, value in group.items() if key not in ("params", "param_names")}


def _fingerprint(value: object) -> object:
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case torch.Tensor():
            return id(value), value._version
        case list() | tuple():
            return [_fingerprint(item) for item in value]
    return id(value)
