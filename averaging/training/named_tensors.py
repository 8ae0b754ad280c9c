"""The parameters of an optimizer and the buffers of a model by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from averaging.errors import ConfigError, TensorError


def named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The parameters of an optimizer by name, each once, in the order of its groups.

    The names are those the optimizer was given (`AdamW(model.named_parameters())`), else `group0.param0` and so on.

    Raises:
        TensorError: a parameter is not floating-point, does not require a gradient or is not writable, or two
            parameters have the same name.
    """
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group{number}.param{place}" for place in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not parameter.is_floating_point():
                raise TensorError(
                    f"parameter {name!r} is {parameter.dtype}; only floating-point parameters can be averaged"
                )
            if not parameter.requires_grad:
                raise TensorError(
                    f"parameter {name!r} does not require a gradient; give the optimizer only those that do: "
                    "[p for p in model.parameters() if p.requires_grad]"
                )
            _check_writable(f"parameter {name!r}", parameter)
            if name in named:
                raise TensorError(f"two parameters of the optimizer are named {name!r}; give each its own name")
            named[name] = parameter
    return named


def named_buffers(buffers: Any) -> dict[str, torch.Tensor]:
    """Checks buffers and prefixes their names with `buffer/`, so that they differ from those of parameters.

    Raises:
        ConfigError: `buffers` is not a mapping of names to tensors.
        TensorError: a buffer is not writable.
    """
    if not isinstance(buffers, Mapping):
        raise ConfigError(
            f"buffers must be tensors by name, such as dict(model.named_buffers()), not {type(buffers).__name__}"
        )
    for name, buffer in buffers.items():
        if not isinstance(buffer, torch.Tensor):
            raise ConfigError(f"buffer {name!r} must be a tensor, not {type(buffer).__name__}")
        _check_writable(f"buffer {name!r}", buffer)
    return {f"buffer/{name}": buffer for name, buffer in buffers.items()}


def _check_writable(what: str, tensor: torch.Tensor) -> None:
    """Checks that a result can be written to a tensor, at once instead of in the first round.

    Raises:
        TensorError: it cannot.
    """
    if tensor.is_meta:
        raise TensorError(
            f"{what} is on the meta device and has no values; give it values first, for example with model.to_empty()"
        )
    if tensor.is_inference():
        raise TensorError(
            f"{what} was made in inference mode and is writable only there; make it outside of inference mode"
        )
    if tensor.layout is torch.strided and any(
        stride == 0 and extent > 1 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise TensorError(f"several elements of {what} share memory, as after expand(); clone() it")
