"""Parts of a divided model: which part a rank holds, how ranks agree on a version, and how parts are put together."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from averaging.errors import SiteError, TensorError
from averaging.training import ControlGroup, ranks_of
from averaging.weights.layout import Shard, WeightLayout, WeightManifest, WeightSpec, first_difference, spec_of

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension."""


@dataclass(frozen=True, slots=True)
class AgreedVersion:
    # What this rank knows of a version, or all ranks do.
    version: int  # its number, at rank 0
    last: int  # the newest version that any rank has published; -1 if none has
    changed: bool  # whether any part has changed since
    shards: tuple[Shard, ...] = ()  # all parts, that of rank 0 first, without those that only repeat another one's


class PublisherRanks:
    """The ranks that publish one model: their process group, and the address of this rank's publisher."""

    def __init__(self, group: Any, endpoint: str) -> None:
        self.endpoint = endpoint
        self._group = ControlGroup(ranks_of(group))
        self.leads = self._group.rank == 0

    def agree(self, digest: bytes, here: AgreedVersion) -> AgreedVersion:
        """Called by all ranks with what they are about to publish; SiteError if one has died, or has no address."""
        ranks: list[tuple[bytes, AgreedVersion, str]] = self._group.all_gather((digest, here, self.endpoint))
        shards: dict[bytes, Shard] = {}
        for number, (part, _, endpoint) in enumerate(ranks):
            if number == 0 or (part not in shards and endpoint):
                shards[part] = Shard("" if number == 0 else endpoint, part)
        if missing := [number for number, (part, *_) in enumerate(ranks) if part not in shards]:
            raise SiteError(f"rank {missing[0]} has no server; give its publisher an endpoint, or to an averager")
        all_of = [rank for _, rank, _ in ranks]
        last, changed = max(rank.last for rank in all_of), any(rank.changed for rank in all_of)
        return AgreedVersion(all_of[0].version, last, changed, tuple(shards.values()))


def is_divided(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole_of(spec: WeightSpec) -> WeightSpec:
    """The whole tensor of which this may be a part."""
    return WeightSpec(spec.name, spec.dtype, spec.whole) if spec.whole else spec


def part_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[WeightSpec, torch.Tensor]:
    """What this rank holds of a tensor: its description, and the part itself, which shares its memory.

    Raises:
        TensorError: tensors like this are not published.
    """
    if not is_divided(tensor):
        return spec_of(name, tensor, dtype), tensor.detach()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    divided: Any = tensor
    with torch.no_grad():
        local: torch.Tensor = divided.to_local()
    shape, offset = compute_local_shape_and_global_offset(divided.shape, divided.device_mesh, divided.placements)
    if tuple(local.shape) != tuple(shape):
        raise TensorError(f"{name!r} is placed as {divided.placements}; only shards of fully_shard can be published")
    plain = spec_of(name, local, dtype)
    return WeightSpec(name, plain.dtype, tuple(shape), tuple(tensor.shape), tuple(offset)), local


def box_of(spec: WeightSpec) -> Box:
    starts = spec.offset or (0,) * len(spec.shape)
    return tuple((start, start + extent) for start, extent in zip(starts, spec.shape, strict=True))


def common(box: Box, other: Box) -> Box | None:
    """The elements in both boxes; None if there are none."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def elements(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def check_own(own: Sequence[WeightSpec], manifest: WeightManifest, *, is_part: bool) -> None:
    """Checks that a version, or a part of one, belongs to the model of the follower.

    Raises:
        TensorError: it belongs to another model; the error names the first tensor that differs.
    """
    theirs = [whole_of(spec) for spec in manifest.layout.tensors]
    names = {spec.name for spec in theirs}
    ours = [whole_of(spec) for spec in own if spec.name in names or not is_part]
    difference = first_difference(ours, theirs)
    if difference is not None:
        raise TensorError(f"the publisher publishes another model: {difference}; follow with the same model")


def missing_part(own: Iterable[WeightSpec], layouts: Sequence[WeightLayout]) -> str | None:
    """What is wrong with the parts of a version for a model; None if they have each of its elements exactly once."""
    there: dict[str, list[WeightSpec]] = {}
    for layout in layouts:
        for spec in layout.tensors:
            known = there.setdefault(spec.name, [])
            if spec not in known:
                known.append(spec)
    for spec in own:
        parts = there.pop(spec.name, [])
        if not parts and spec.shape and 0 in spec.shape:
            continue
        whole = whole_of(spec)
        for part in parts:
            if whole_of(part) != whole:
                return f"tensor {spec.name!r} is {whole} here and {whole_of(part)} there"
        boxes = [shared for part in parts if (shared := common(box_of(spec), box_of(part))) is not None]
        twice = any(common(box, other) for place, box in enumerate(boxes) for other in boxes[:place])
        if twice or sum(map(elements, boxes)) != prod(spec.shape):
            return f"of tensor {spec.name!r} ({whole}) the parts have {'some elements twice' if twice else 'not all'}"
    extra = next(iter(there.values()), None)
    return None if extra is None else f"tensor {extra[0].name!r} ({whole_of(extra[0])}) is only there"


def is_wanted(own: Sequence[WeightSpec], layout: WeightLayout) -> bool:
    """Whether a part has elements of what the follower holds."""
    boxes = {spec.name: box_of(spec) for spec in own}
    both = ((boxes[spec.name], box_of(spec)) for spec in layout.tensors if spec.name in boxes)
    return any(len(mine) == len(theirs) and common(mine, theirs) is not None for mine, theirs in both)


def cut(whole: torch.Tensor, spec: WeightSpec) -> torch.Tensor:
    """A copy of the part of a tensor that a description is about."""
    return whole[tuple(slice(start, stop) for start, stop in box_of(spec))].clone(memory_format=torch.contiguous_format)


def put_together(parts: Iterable[tuple[WeightSpec, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The whole tensors by name. Those that are not divided share the memory of what is given."""
    wholes: dict[str, torch.Tensor] = {}
    for spec, part in parts:
        if not spec.whole:
            wholes[spec.name] = part
            continue
        whole = whole_of(spec)
        if spec.name not in wholes:
            wholes[spec.name] = torch.empty(whole.shape, dtype=whole.torch_dtype, device="cpu")
        write_part(wholes[spec.name], whole, part, spec)
    return wholes


def write_part(target: torch.Tensor, own: WeightSpec, part: torch.Tensor, spec: WeightSpec) -> None:
    """Copies those elements of `part` that `target`, what the follower holds as `own`, has."""
    if own == spec:
        target.copy_(part)
        return
    mine, theirs = box_of(own), box_of(spec)
    shared = common(mine, theirs)
    if shared is not None:
        target[_inside(mine, shared)].copy_(part[_inside(theirs, shared)])


def _inside(box: Box, shared: Box) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(shared, box, strict=True))
