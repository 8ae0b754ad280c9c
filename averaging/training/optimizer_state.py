"""The state of an optimizer: what it keeps in its parameter groups, and how all of it travels.

`pack_optimizer` returns the tensors by name, and the rest as a structure for msgpack. In that structure numbers,
strings and None stand for themselves. Everything else is a map with one entry: `tensor` with the tensor's name, `list`
or `tuple` with the items, or `dict` with a list of [key, value] pairs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from averaging.errors import StateError
from averaging.training.layout import as_divided, is_divided, local

# What an optimizer keeps in its parameter groups and changes itself, such as counters and estimated step sizes.


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

MUTABLE = (torch.Tensor, list, tuple)
"""What may change in a group without being replaced."""

FIXED = frozenset({"params", "param_names"})

ABSENT = object()


class GroupProgress:
    """The keys of an optimizer's parameter groups that are its progress: those that its steps change.

    All other keys are hyperparameters, which belong to the user. Before the first step is seen, as after a checkpoint,
    a number that differs from its default is progress, too, if no constructor has an argument of that name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.keys: set[str] = set()
        self._settable = arguments_of(type(optimizer).__mro__)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Wraps a step of the optimizer."""
        groups = self._optimizer.param_groups
        before = [group.copy() for group in groups]  # keeps replaced values, so ids are unique
        prints = [
            {key: _fingerprint(group[key]) for key in group.keys() - FIXED if isinstance(group[key], MUTABLE)}
            for group in before
        ]
        yield
        for old, mutable, group in zip(before, prints, self._optimizer.param_groups, strict=False):
            for key, value in group.items():
                was = old.get(key, ABSENT)
                if (value is was and key not in mutable) or key in FIXED or key in self.keys:
                    continue  # as most are
                is_changed = _fingerprint(value) != (mutable[key] if key in mutable else _fingerprint(was))
                if is_changed and SCHEDULED.get(key, frozenset()).isdisjoint(group):
                    self.keys.add(key)

    def values(self) -> Groups:
        return [
            {key: value for key, value in group.items() if self._is_progress(key, value)}
            for group in self._optimizer.param_groups
        ]

    def _is_progress(self, key: str, value: object) -> bool:
        if key in self.keys:
            return True
        defaults = getattr(self._optimizer, "defaults", {})
        return _is_number(value) and key not in self._settable and key in defaults and bool(value != defaults[key])


@cache
def arguments_of(kinds: tuple[type, ...]) -> frozenset[str]:
    """The arguments of the constructors of an optimizer's class and its bases, which may pass others on."""
    constructors = (kind.__dict__["__init__"] for kind in kinds if "__init__" in kind.__dict__)
    return HYPERPARAMETERS.union(*(inspect.signature(constructor).parameters for constructor in constructors))


def merged(groups: Groups, progress: object) -> Groups:
    """Parameter groups with the progress of another optimizer of the same kind; StateError if it does not fit."""
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
        return all(_fits(item, other) for item, other in zip(theirs, ours, strict=True))
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


def _fingerprint(value: object) -> object:
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case torch.Tensor():
            return id(value), value._version
        case list() | tuple():
            return [_fingerprint(item) for item in value]
    return id(value)


# Packing.


OPTIONAL: Mapping[type[torch.optim.Optimizer], Mapping[str, str]] = {
    torch.optim.Adam: {"amsgrad": "max_exp_avg_sq"},
    torch.optim.AdamW: {"amsgrad": "max_exp_avg_sq"},
    torch.optim.RMSprop: {"momentum": "momentum_buffer", "centered": "grad_avg"},
}
"""Entries that an optimizer keeps only with some option and does not create later: without them a step fails.

SGD is not listed, since it creates a missing `momentum_buffer`.
"""

PREFIX = "optimizer"
"""Prefix of the names of the inner optimizer's tensors, such as `optimizer/0/exp_avg`."""


def pack_optimizer(
    optimizer: torch.optim.Optimizer, progress: GroupProgress | None = None, prefix: str = PREFIX
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Packs an optimizer's state and the progress in its parameter groups, without its hyperparameters.

    Returns the tensors (not copied) by names that start with `prefix` and a slash, and the rest. Raises StateError if a
    value is neither a number, a string, a dense tensor, None, nor a list, tuple or dict of these.
    """
    tensors: dict[str, torch.Tensor] = {}
    packed = _pack(optimizer.state_dict()["state"], prefix, tensors)
    values = {} if progress is None else dict(enumerate(progress.values()))
    groups = [_pack(values[number], f"{prefix}/group{number}", tensors) for number in values]
    return tensors, {"class": type(optimizer).__name__, "state": packed, "progress": groups}


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    packed: object,
    progress: GroupProgress | None = None,
    prefix: str = PREFIX,
) -> None:
    """Loads what `pack_optimizer` returned at another peer; the hyperparameters do not change.

    If it is malformed or of another class of optimizer, it raises StateError, and nothing was changed.
    """
    if not isinstance(packed, dict) or not isinstance(packed.get("class"), str):
        raise StateError("the state of its optimizer is unreadable")
    ours = type(optimizer).__name__
    if packed["class"] != ours:
        raise StateError(f"its optimizer is {packed['class'][:100]}, but this peer's is {ours}; use the same class")
    of_optimizer = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}/")}
    own = optimizer.state_dict()
    numbers = {number for group in own["param_groups"] for number in group["params"]}
    state = _unpack(packed.get("state"), of_optimizer)
    if not isinstance(state, dict):
        raise StateError("the state of its optimizer is unreadable")
    for key, values in state.items():
        if isinstance(key, int) and (key not in numbers or not isinstance(values, dict)):
            raise StateError(f"the state of its optimizer has a parameter {key} that this peer's lacks")
    _check_options(optimizer, own["param_groups"], state)
    _divide(optimizer, own["param_groups"], state)
    received = _unpack({"list": packed.get("progress", [])}, of_optimizer)
    groups = merged(own["param_groups"], received)
    with restored_on_error(optimizer):
        try:
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        except Exception as error:  # optimizers differ in what they check
            what = f"{type(error).__name__}: {error}"
            raise StateError(f"{ours} cannot load the state of its optimizer: {what}") from error
        _keep_dtypes(optimizer, own["param_groups"], state)
        _lay_out(optimizer)
    if progress is not None:
        progress.keys.update(*received)


def _check_options(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[int | str, Any]
) -> None:
    """Checks that a state was made with the options of this optimizer, as far as its entries show."""
    optional = next((optional for kind, optional in OPTIONAL.items() if isinstance(optimizer, kind)), {})
    for group in groups:
        for number in group["params"]:
            values = state.get(number)
            for option, entry in optional.items():
                # A parameter without a gradient so far has no entries.
                if values and (entry in values) != bool(group.get(option)):
                    has = "has" if entry in values else "lacks"
                    raise StateError(
                        f"the state of its optimizer {has} {entry!r}, but this peer's {type(optimizer).__name__} has "
                        f"{option}={group.get(option)!r}; use the same {option}"
                    )


def _divide(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[int | str, Any]) -> None:
    """Makes tensors that are divided like their parameter of what this rank holds of them."""
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        for parameter, number in zip(group["params"], numbers["params"], strict=True):
            if not is_divided(parameter) or number not in state:
                continue
            shape = local(parameter).shape
            for key, value in state[number].items():
                if key != "step" and isinstance(value, torch.Tensor) and value.shape == shape:
                    state[number][key] = as_divided(value, parameter)


def _keep_dtypes(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[int | str, Any]
) -> None:
    """Restores the dtypes of a state, since torch casts it to that of the parameter, such as float32 to bfloat16."""
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        for parameter, number in zip(group["params"], numbers["params"], strict=True):
            for key, received in state.get(number, {}).items():
                if key != "step" and isinstance(received, torch.Tensor) and received.is_floating_point():
                    loaded = optimizer.state[parameter].get(key)
                    if isinstance(loaded, torch.Tensor) and loaded.dtype != received.dtype:
                        optimizer.state[parameter][key] = received.to(loaded.device)


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Gives loaded tensors the strides of their parameter, since fused optimizers assume them unchecked."""
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor):
            continue  # some optimizers keep entries that belong to no parameter
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and not is_divided(value):
                as_parameter = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
                if as_parameter.stride() != value.stride():
                    values[key] = as_parameter.copy_(value)


@contextmanager
def restored_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restores an optimizer's state if the block, which loads another one, raises."""
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    try:
        yield
    except BaseException:
        optimizer.__setstate__(before)
        raise


def _pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case torch.Tensor() if value.layout is torch.strided:
            if name in tensors:
                raise StateError(f"two tensors of the optimizer's state are named {name!r}")
            tensors[name] = local(value)
            return {"tensor": name}
        case list() | tuple():
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [_pack(item, f"{name}/{number}", tensors) for number, item in enumerate(value)]}
        case Mapping() if all(isinstance(key, int | str) for key in value):
            return {"dict": [[key, _pack(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    what = value.layout if isinstance(value, torch.Tensor) else type(value).__name__
    raise StateError(
        f"{name} of the optimizer's state is {what}, which newcomers cannot download; "
        "use another optimizer, or share_state=False"
    )


def _unpack(packed: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    match packed:
        case None | bool() | int() | float() | str() | bytes():
            return packed
        case {"tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"list": list(items)}:
            return [_unpack(item, tensors) for item in items]
        case {"tuple": list(items)}:
            return tuple(_unpack(item, tensors) for item in items)
        case {"dict": list(pairs)} if all(_is_pair(pair) for pair in pairs):
            return {key: _unpack(item, tensors) for key, item in pairs}
    raise StateError(f"the state of its optimizer holds {str(packed)[:100]}, which is invalid")


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int | str)
