"""What the peers of a run must have alike beside the adapter: the frozen base, and how the adapter is applied to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from averaging.errors import StateError, printable
from averaging.integrations.lora_layers import AdaptedLayer, plain_name
from averaging.training import digest_of

REMEDY = "load the same base model, in the same dtype and with the same quantisation, at all peers"


def describe_base(
    model: torch.nn.Module, trained: Iterable[torch.Tensor], layers: Iterable[AdaptedLayer]
) -> dict[str, Any]:
    """Describes the frozen tensors and the adapter of a peer for the others; it can be packed.

    Args:
        model: the peft model.
        trained: the parameters that are not frozen.
        layers: the adapted layers.
    """
    ids = {id(parameter) for parameter in trained}
    tensors = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in ids:
            kind = "" if type(parameter) is torch.nn.Parameter else f" in {type(parameter).__name__}"
            shown = f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}{kind}"
            tensors.append([plain_name(name), shown, digest_of({"": parameter})])
    return {
        "tensors": tensors,
        "layers": [[layer.name, layer.rank, layer.scaling] for layer in layers],
    }


def check_base(own: Mapping[str, Any], theirs: object) -> None:
    """Compares the description of this peer with that of another one, which is untrusted.

    Raises:
        StateError: they differ; the message names the first difference.
    """
    if not isinstance(theirs, dict) or not _is_well_formed(theirs):
        raise StateError("it does not say which base its adapter belongs to")
    ours_by_name = {name: (kind, digest) for name, kind, digest in own["tensors"]}
    theirs_by_name = {name: (kind, digest) for name, kind, digest in theirs["tensors"]}
    if missing := sorted(ours_by_name.keys() ^ theirs_by_name.keys()):
        where = "here" if missing[0] in ours_by_name else "there"
        raise StateError(
            f"it has another base model: {len(missing)} frozen tensors are only at one of the two peers, such as "
            f"{_shown(missing[0])} ({where}); {REMEDY}, and freeze the same parameters"
        )
    _check_layers(own["layers"], theirs["layers"])
    for aspect, differ in (("kind", 0), ("value", 1)):
        others = [name for name in ours_by_name if ours_by_name[name][differ] != theirs_by_name[name][differ]]
        if others and aspect == "kind":
            here, there = ours_by_name[others[0]][0], printable(theirs_by_name[others[0]][0])[:100]
            which = f"frozen tensor {_shown(others[0])} is {there} there, and {here} here"
            raise StateError(f"it has another base: {which} ({len(others)} tensors differ so); {REMEDY}")
        if others:
            which = f"frozen tensor {_shown(others[0])} has other values ({len(others)} of {len(ours_by_name)} differ)"
            raise StateError(f"it has another base: {which}; {REMEDY}")


def _check_layers(own: list[list[Any]], theirs: list[list[Any]]) -> None:
    names = [{layer[0] for layer in layers} for layers in (own, theirs)]
    if other := sorted(names[0] ^ names[1]):
        where = "here" if other[0] in names[0] else "there"
        raise StateError(
            f"its adapter has other layers: {_shown(other[0])} is only {where}; use the same target_modules"
        )
    there = {name: (rank, scaling) for name, rank, scaling in theirs}
    for name, rank, scaling in own:
        if there[name][0] != rank:
            highest = max(rank, there[name][0])
            raise StateError(
                f"its adapter has rank {there[name][0]} in layer {_shown(name)}, this peer's {rank}; pad both with "
                f"LoRAAveraging(rank={highest})"
            )
        if abs(there[name][1] - scaling) > 1e-6 * abs(scaling):
            raise StateError(
                f"its adapter counts {there[name][1]:g} times in layer {_shown(name)}, this peer's {scaling:g} times; "
                "use the same lora_alpha and use_rslora at all peers"
            )


def _is_well_formed(theirs: Mapping[str, Any]) -> bool:
    tensors, layers = theirs.get("tensors"), theirs.get("layers")
    if not (isinstance(tensors, list) and isinstance(layers, list)):
        return False
    texts = all(isinstance(row, list) and len(row) == 3 and all(isinstance(x, str) for x in row) for row in tensors)
    return texts and all(
        isinstance(row, list)
        and len(row) == 3
        and isinstance(row[0], str)
        and type(row[1]) is int
        and type(row[2]) is float
        for row in layers
    )


def _shown(name: str) -> str:
    return repr(printable(name)[:100])
