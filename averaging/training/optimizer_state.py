"""An optimizer's state as it travels with the model: its tensors by name, the rest as what msgpack can pack.

In the rest, numbers, strings and None stand for themselves. Everything else is a map of one entry: `tensor` and the
tensor's name, `list` or `tuple` and the items, `dict` and the list of [key, value] pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from averaging.common.safe_msgpack import MAX_INTEGER_KEYS
from averaging.errors import StateError

OPTIONAL: Mapping[type[torch.optim.Optimizer], Mapping[str, str]] = {
    torch.optim.Adam: {"amsgrad": "max_exp_avg_sq"},
    torch.optim.AdamW: {"amsgrad": "max_exp_avg_sq"},
    torch.optim.RMSprop: {"momentum": "momentum_buffer", "centered": "grad_avg"},
}
"""What is kept of each parameter only with some option, and is not made later on: without it a step fails.

SGD is not among them: it makes its `momentum_buffer` when there is none.
"""

PREFIX = "optimizer"
"""The names of the inner optimizer's tensors start so: `optimizer/0/exp_avg`."""


def pack_optimizer(
    optimizer: torch.optim.Optimizer, prefix: str = PREFIX
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The optimizer's state, without its hyperparameters: its tensors by name (not copied), and the rest.

    The names of the tensors start with `prefix` and a slash.

    Raises:
        StateError: a value is neither a number, a string, a dense tensor, None, nor a list, tuple or dict of these.
    """
    tensors: dict[str, torch.Tensor] = {}
    packed = _pack(optimizer.state_dict()["state"], prefix, tensors)
    return tensors, {"class": type(optimizer).__name__, "state": packed}


def load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], packed: object, prefix: str = PREFIX
) -> None:
    """Takes over what `pack_optimizer` made of another peer's optimizer; the hyperparameters stay as they are.

    Raises:
        StateError: it is malformed or belongs to another kind of optimizer; nothing was changed.
    """
    if not isinstance(packed, dict) or not isinstance(packed.get("class"), str):
        raise StateError("the state of its optimizer is unreadable")
    ours = type(optimizer).__name__
    if packed["class"] != ours:
        raise StateError(f"its optimizer is {packed['class'][:100]}, here it is {ours}; use the same one")
    of_optimizer = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}/")}
    own = optimizer.state_dict()
    numbers = {number for group in own["param_groups"] for number in group["params"]}
    state = _unpack(packed.get("state"), of_optimizer, len(numbers))
    if not isinstance(state, dict):
        raise StateError("the state of its optimizer is unreadable")
    for key, values in state.items():
        if isinstance(key, int) and (key not in numbers or not isinstance(values, dict)):
            raise StateError(f"the state of its optimizer has a parameter {key} that this one lacks")
    _check_options(optimizer, own["param_groups"], state)
    with restored_on_error(optimizer):
        try:
            optimizer.load_state_dict({"state": state, "param_groups": own["param_groups"]})
        except Exception as error:  # any optimizer's own checks, and what it stumbles over without any
            what = f"{type(error).__name__}: {error}"
            raise StateError(f"{ours} does not take the state of its optimizer: {what}") from error
        _keep_dtypes(optimizer, own["param_groups"], state)
        _lay_out(optimizer)


def _check_options(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[int | str, Any]
) -> None:
    """Whether a state was kept with the options of this optimizer, as far as it shows."""
    optional = next((optional for kind, optional in OPTIONAL.items() if isinstance(optimizer, kind)), {})
    for group in groups:
        for number in group["params"]:
            values = state.get(number)
            for option, entry in optional.items():
                # There is nothing of a parameter that has had no gradient.
                if values and (entry in values) != bool(group.get(option)):
                    has = "has" if entry in values else "lacks"
                    raise StateError(
                        f"the state of its optimizer {has} {entry!r}, and {type(optimizer).__name__} has "
                        f"{option}={group.get(option)!r} here; use the same {option}"
                    )


def _keep_dtypes(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Mapping[int | str, Any]
) -> None:
    """Undoes that torch rounds what it loads to the dtype of the parameter: float32 beside bfloat16 is on purpose."""
    for group, numbers in zip(optimizer.param_groups, groups, strict=True):
        for parameter, number in zip(group["params"], numbers["params"], strict=True):
            for key, came in state.get(number, {}).items():
                if key != "step" and isinstance(came, torch.Tensor) and came.is_floating_point():
                    loaded = optimizer.state[parameter].get(key)
                    if isinstance(loaded, torch.Tensor) and loaded.dtype != came.dtype:
                        optimizer.state[parameter][key] = came.to(loaded.device)


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Gives what came dense the strides of its parameter: a fused optimizer takes them for equal, and does not look."""
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor):
            continue  # some optimizers keep things of their own beside those of the parameters
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                as_parameter = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
                if as_parameter.stride() != value.stride():
                    values[key] = as_parameter.copy_(value)


@contextmanager
def restored_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Gives an optimizer back its state, as it was, if the block that loads another one raises."""
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
            tensors[name] = value
            return {"tensor": name}
        case list() | tuple():
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [_pack(item, f"{name}/{number}", tensors) for number, item in enumerate(value)]}
        case Mapping() if all(isinstance(key, int | str) for key in value):
            return {"dict": [[key, _pack(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    what = value.layout if isinstance(value, torch.Tensor) else type(value).__name__
    raise StateError(
        f"{name} of the optimizer's state is {what}, which cannot be shared with newcomers; "
        "use another optimizer, or share_state=False"
    )


def _unpack(packed: Any, tensors: Mapping[str, torch.Tensor], parameters: int) -> Any:
    match packed:
        case None | bool() | int() | float() | str() | bytes():
            return packed
        case {"tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"list": list(items)}:
            return [_unpack(item, tensors, parameters) for item in items]
        case {"tuple": list(items)}:
            return tuple(_unpack(item, tensors, parameters) for item in items)
        case {"dict": list(pairs)} if all(_is_pair(pair) for pair in pairs) and _are_quick(pairs, parameters):
            return {key: _unpack(item, tensors, parameters) for key, item in pairs}
    raise StateError(f"the state of its optimizer holds {str(packed)[:100]}, which nobody packs")


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int | str)


def _are_quick(pairs: list[tuple[int | str, Any]], parameters: int) -> bool:
    """Whether a dict of these is made in no time: of many integers each could be compared with all before it.

    The numbers of this optimizer's own parameters are no choice of whoever sent them.
    """
    integers = [key for key, _ in pairs if isinstance(key, int)]
    return len(integers) <= MAX_INTEGER_KEYS or all(0 <= key < parameters for key in integers)
