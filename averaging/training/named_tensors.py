"""The parameters of an optimizer and the buffers of a model by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from averaging.errors import ConfigError, TensorError


def named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The parameters of an optimizer, each once, in the order of its groups.

    Their names are those the optimizer was given (`AdamW(model.named_parameters())`), else `group0.param0` and so on.

    Raises:
        TensorError: a parameter is not floating-point, does not require a gradient or cannot be written to, or two have
            the same name.
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
                raise TensorError(f"parameter {name!r} is {parameter.dtype}; only floating-point ones can be averaged")
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
    """The buffers that a user has given, under names that no parameter has.

    Raises:
        ConfigError: they are not tensors by name.
        TensorError: one of them cannot be written to.
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
    """Whether a result can be written to it, which the first newcomer or the first round would find out else.

    Raises:
        TensorError: it cannot.
    """
    if tensor.is_meta:
        raise TensorError(f"{what} is on the meta device and has no values; give it some, as model.to_empty() does")
    if tensor.is_inference():
        raise TensorError(f"{what} was made in inference mode, and can be written to in it alone; make it outside")
    if tensor.layout is torch.strided and any(
        stride == 0 and extent > 1 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise TensorError(f"several elements of {what} are the same in memory, as expand() makes them; clone() it")
