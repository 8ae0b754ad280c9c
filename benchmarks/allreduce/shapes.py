"""The tensors of the all-reduce benchmark."""

from __future__ import annotations

from math import prod, sqrt

Shapes = list[tuple[int, ...]]


def shapes(kind: str, kib: int) -> Shapes:
    """Returns shapes of `kib` KiB of float32: as many equal tensors as `kind` says, or the 148 of a GPT-2, 12 layers.

    GPT-2 small has 475 MiB. Its width, context and vocabulary are scaled alike; the vocabulary takes the remainder.
    """
    if kind != "gpt2":
        return [(kib * 2**8 // int(kind),)] * int(kind)
    scale = sqrt(kib / 1024 / 475)
    width, context = round(768 * scale), round(1024 * scale)
    norm: Shapes = [(width,), (width,)]
    layer: Shapes = []
    for inner, outer in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
        layer += [(inner, outer), (outer,)]
    rest: Shapes = [(context, width), *(norm + layer[:4] + norm + layer[4:]) * 12, *norm]
    vocabulary = (kib * 2**8 - sum(map(prod, rest))) // width
    return [(vocabulary, width), *rest]


def size(kib: int) -> str:
    """`64 MiB`, or `1 KiB`."""
    return f"{kib} KiB" if kib % 1024 else f"{kib // 1024} MiB"
