"""The parameters of an optimizer and the buffers of a model by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from averaging.common import without_wrappers
from averaging.errors import ConfigError, TensorError
from averaging.tensors import AVERAGED_DTYPES, STATE_DTYPES, all_finite
from averaging.training.trained_model import TrainedModel

BUFFER = "buffer/"
"""Prefix of the names of buffers."""


def named_parameters(optimizer: torch.optim.Optimizer, model: TrainedModel | None = None) -> dict[str, torch.Tensor]:
    """The parameters of an optimizer by name, each once, in the order of its groups.

    The names are those of the model, else those the optimizer was given (`AdamW(model.named_parameters())`), else
    `group0.param0` and so on.

    Raises:
        ConfigError: the model lacks one of them.
        TensorError: a parameter is not floating-point, does not require a gradient or is not writable, or two
            parameters have the same name.
    """
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for names, group in zip(_names(optimizer, model), optimizer.param_groups, strict=True):
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


def _names(optimizer: torch.optim.Optimizer, model: TrainedModel | None) -> list[list[str]]:
    """The names of an optimizer's parameters, for each of its groups."""
    if model is not None:
        return model.names(optimizer)
    given = [
        group.get("param_names") or [f"group{number}.param{place}" for place in range(len(group["params"]))]
        for number, group in enumerate(optimizer.param_groups)
    ]
    plain = iter(without_wrappers(name for group in given for name in group))
    return [[next(plain) for _ in group] for group in given]


@dataclass(frozen=True, slots=True)
class ModelBuffers:
    """The buffers of a model by name, with the prefix `buffer/`, so that they differ from parameters.

    Attributes:
        averaged: floating-point buffers.
        shared: other buffers, which newcomers get as well.
    """

    averaged: dict[str, torch.Tensor]
    shared: dict[str, torch.Tensor]


def named_buffers(given: Any, model: TrainedModel | None = None) -> ModelBuffers:
    """The buffers that peers have in common.

    Args:
        given: the buffers by name, as the user gave them; None for all those of the model that can be averaged or sent,
            which leaves out constants with infinity, such as masks.
        model: gives the names of its buffers.

    Raises:
        ConfigError: `given` is not a mapping of names to tensors.
        TensorError: a given buffer is not writable.
    """
    if given is None:
        named = {} if model is None else {name: one for name, one in model.buffers.items() if _can_be_sent(one)}
    else:
        named = _given_buffers(given, model)
    prefixed = {BUFFER + name: buffer for name, buffer in named.items()}
    averaged = {name: buffer for name, buffer in prefixed.items() if buffer.is_floating_point()}
    return ModelBuffers(averaged, {name: buffer for name, buffer in prefixed.items() if name not in averaged})


def _given_buffers(given: Any, model: TrainedModel | None) -> dict[str, torch.Tensor]:
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"buffers must be tensors by name, such as dict(model.named_buffers()), not {type(given).__name__}"
        )
    for name, buffer in given.items():
        if not isinstance(buffer, torch.Tensor):
            raise ConfigError(f"buffer {name!r} must be a tensor, not {type(buffer).__name__}")
        _check_writable(f"buffer {name!r}", buffer)
    known = {} if model is None else {id(buffer): name for name, buffer in model.buffers.items()}
    plain = zip(without_wrappers(given), given.values(), strict=True)
    return {known.get(id(buffer), name): buffer for name, buffer in plain}


def _can_be_sent(buffer: torch.Tensor) -> bool:
    """Whether a buffer that nobody chose can be averaged, or sent to newcomers."""
    try:
        _check_writable("it", buffer)
    except TensorError:
        return False
    if buffer.layout is not torch.strided:
        return False
    if buffer.is_floating_point():
        return buffer.dtype in AVERAGED_DTYPES.values() and all_finite(buffer)
    return buffer.dtype in STATE_DTYPES.values()


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
