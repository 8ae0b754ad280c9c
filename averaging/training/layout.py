"""How a model is divided between the ranks of a site: read from its parameters, which are DTensors if it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from averaging.errors import ConfigError, TensorError


@dataclass(frozen=True, slots=True)
class ShardLayout:
    shards: int
    shard_of: tuple[int, ...]
    name: str = ""


def layout_of(parameters: Mapping[str, torch.Tensor], size: int) -> ShardLayout:
    """Reads the layout from a model's parameters; raises ConfigError or TensorError if it cannot be averaged."""
    divided: dict[str, Any] = {name: parameter for name, parameter in parameters.items() if is_divided(parameter)}
    if not divided:
        return ShardLayout(1, (0,) * size)
    for name in parameters:
        if name not in divided:
            raise TensorError(
                f"parameter {name!r} is not divided between the ranks, but {next(iter(divided))!r} is; apply "
                "fully_shard to the whole model as well, without ignored parameters"
            )
    first_name, first = next(iter(divided.items()))
    kinds = tuple(_kind(first_name, placement) for placement in first.placements)
    for name, parameter in divided.items():
        if parameter.device_mesh != first.device_mesh or tuple(_kind(name, p) for p in parameter.placements) != kinds:
            raise TensorError(
                f"parameters {first_name!r} and {name!r} are divided in different ways; use one device mesh and "
                "the same kind of fully_shard for the whole model"
            )
    mesh = first.device_mesh.mesh
    if mesh.numel() != size:
        raise ConfigError(
            f"the model is divided between {mesh.numel()} ranks, but process_group has {size}; give the group of the "
            "model's device mesh"
        )
    # Ranks of the site in the order of the mesh; the shard's number counts along the dimensions that divide.
    order = sorted(mesh.flatten().tolist())
    shard_of = [0] * size
    for place in product(*map(range, mesh.shape)):
        number = 0
        for kind, extent, coordinate in zip(kinds, mesh.shape, place, strict=True):
            if kind == "Shard":
                number = number * extent + coordinate
        shard_of[order.index(int(mesh[place]))] = number
    shards = max(shard_of) + 1
    return ShardLayout(shards, tuple(shard_of), f"{shards} shards" if shards > 1 else "")


def _kind(name: str, placement: Any) -> str:
    kind: str = type(placement).__name__
    if kind in ("Shard", "Replicate"):
        return kind
    raise TensorError(
        f"parameter {name!r} is placed as {placement}; only shards of fully_shard (FSDP2, HSDP) can be averaged "
        "between sites"
    )


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # where it is not imported, which takes long, there is none
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, sharing its memory; a tensor that is not divided itself."""
    if not is_divided(tensor):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def as_divided(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor of which `part` is what this rank holds, divided as `like`; the reverse of `local`."""
    if not is_divided(like):
        return part
    from torch.distributed.tensor import DTensor

    whole: Any = like
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


# Tensor functions of the strategies: accumulation dtype and clipping. Pure.


def full_precision(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def clip(
    tensors: Iterable[torch.Tensor], max_norm: float, joint: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Scales tensors in place so that their joint norm is at most `max_norm`; returns the factor, 0-dim."""
    clipped = list(tensors)
    if not clipped and joint is None:
        return torch.ones(())
    if any(tensor.layout is not torch.strided for tensor in clipped):
        raise TensorError(
            "a sparse gradient cannot be clipped; leave max_norm out, or use Embedding(..., sparse=False)"
        )
    widest = torch.float64 if any(tensor.dtype is torch.float64 for tensor in clipped) else torch.float32
    norms = [torch.linalg.vector_norm(t.detach(), dtype=widest).to(clipped[0].device) for t in clipped]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if joint is not None:
        norm = joint(norm)
    scale: torch.Tensor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
    for tensor in clipped:
        tensor.detach().mul_(scale.to(tensor.device, tensor.dtype))
    return scale
