"""How the factors of LoRA layers travel, so that every member of a group knows the mean of the products exactly.

An all-reduce gives the mean of what the members send, and the mean of two factors says nothing about that of their
products. So each member writes its factors to a slot of its own, and zeros elsewhere: the mean holds the factors of
all members, side by side. docs/design/decisions/training.md has the reasons and the numbers. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from averaging.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerShape:
    out: int  # rows of B
    into: int  # columns of A
    rank: int  # columns of B and rows of A

    @property
    def factors(self) -> int:
        return self.rank * (self.out + self.into)


class FactorSlots:
    """A place for the factors of each member of a group, in tensors whose mean over the group shows all of them.

    Each piece has a row for each member, whose last element is 1 if the member has written it. In the mean it is the
    member's share of all weights, by which its values are divided. A piece is a single part of the round, so a member
    that was dropped in the middle is either in a piece or not; only members that are in all pieces count.

    `size` elements of each of `slots` members are in `pieces`, float32, [slots, elements + 1] each, none of which has
    more than the `part_elements` of a part of the round.
    """

    def __init__(self, size: int, slots: int, part_elements: int) -> None:
        width = part_elements // slots - 1
        if width < 1:
            raise ConfigError(f"a part has no room for the factors of {slots} peers side by side; lower group_size")
        self._starts = range(0, size, width)
        self.pieces = [torch.zeros(slots, min(width, size - start) + 1) for start in self._starts]

    def write(self, values: torch.Tensor, slot: int) -> None:
        """Writes a member's values, 1-D, to its slot, and zeros to all others."""
        for start, piece in zip(self._starts, self.pieces, strict=True):
            piece.zero_()
            piece[slot, :-1] = values[start : start + piece.shape[1] - 1]
            piece[slot, -1] = 1.0

    def move(self, slot: int) -> None:
        """Moves what was written to slot 0 to another one."""
        for piece in self.pieces:
            if slot:
                piece[slot] = piece[0]
                piece[0] = 0.0

    def read(self) -> list[tuple[float, torch.Tensor]]:
        """The share of the weights, and the values, of each member that is in all pieces of the mean.

        The shares sum to 1. Values that are not finite count as missing. Only operations that round alike on all
        machines are used, so all members read the same bytes from the same bytes.
        """
        if not self.pieces:
            return []
        present = torch.stack([piece[:, -1] for piece in self.pieces]).gt(0).all(0).tolist()
        read = []
        for slot in (slot for slot, is_there in enumerate(present) if is_there):
            values = torch.cat([piece[slot, :-1] / piece[slot, -1] for piece in self.pieces])
            if bool(torch.isfinite(values).all()):
                read.append((float(self.pieces[0][slot, -1]), values))
        total = sum(share for share, _ in read)
        return [(share / total, values) for share, values in read]


def packed(factors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The factors A and B of layers, one after the other: 1-D, float32, on the CPU. `unpacked` is the opposite."""
    flat = [tensor.detach().reshape(-1).to("cpu", torch.float32) for pair in factors for tensor in pair]
    return torch.cat(flat) if flat else torch.empty(0)


def unpacked(values: torch.Tensor, shapes: Sequence[LayerShape]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sizes = [size for shape in shapes for size in (shape.rank * shape.into, shape.out * shape.rank)]
    pieces = iter(torch.split(values, sizes))
    return [(next(pieces).view(shape.rank, shape.into), next(pieces).view(shape.out, shape.rank)) for shape in shapes]


def mean_of(shares: Sequence[float], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weighted mean, rounded alike on all machines; the shares sum to 1."""
    total = tensors[0] * shares[0]
    for share, tensor in zip(shares[1:], tensors[1:], strict=True):
        total = total + tensor * share  # two roundings; add(alpha=) has one or two, depending on the machine
    return total


ROWS = 256  # that are added up at a time, so that they stay in the cache


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left @ right to `total`, all float32 or float64, with the same bytes on every machine and device.

    A matrix multiplication sums in an order of its own on each machine, and peers would drift apart by its rounding.

    `total` is [out, into], contiguous or not, `left` [out, rank] and `right` [rank, into].
    """
    for start in range(0, total.shape[0], ROWS):
        rows = total[start : start + ROWS]
        term = torch.empty_like(rows)
        for column, row in zip(left[start : start + ROWS].unbind(1), right, strict=True):
            rows += torch.mul(column.unsqueeze(1), row, out=term)


def rest_of_factors(
    shares: Sequence[float],
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    new: tuple[torch.Tensor, torch.Tensor],
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the mean of the products of one layer has more: scaling · (Σ share·B·A - B_new·A_new), as two factors.

    The shares of the members have the sum 1. `new` are A and B in the adapter from now on, as they were rounded to its
    dtype. The factors are [out, any] and [any, into] in float32, where any is (members + 1) · rank.
    """
    left = [b * (scaling * share) for share, (_, b) in zip(shares, factors, strict=True)]
    return (
        torch.cat([*left, new[1].to("cpu", torch.float32) * -scaling], 1),
        torch.cat([*(a for a, _ in factors), new[0].to("cpu", torch.float32)], 0),
    )


OVERSAMPLED, POWERS = 8, 3  # columns beyond the rank, and passes over a dense matrix, of a randomised range finder


def cut_product(
    left: torch.Tensor, right: torch.Tensor, dense: torch.Tensor | None, rank: int
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Factors of exactly `rank`, [out, rank] and [rank, into], of the matrix left @ right + dense, or of the nearest.

    Without `dense` nothing of the size of the matrix is made: the singular values are those of a core as small as the
    factors' rank. A dense matrix is first reduced to its range by a few passes over it (Halko et al., arXiv:0909.4061).

    Returns:
        The two factors, the squared Frobenius norm of what they lack (0 if nothing was cut), and that of the matrix.
    """
    lost = 0.0
    if dense is not None:
        left, right, lost = _range_of(left, right, dense, rank)
    elif left.shape[1] <= rank:
        left, right = _padded(left, rank, 1), _padded(right, rank, 0)
        return left, right, 0.0, float(((left.T @ left) * (right @ right.T)).sum().clamp(min=0))
    q_left, core_left = torch.linalg.qr(left)
    q_right, core_right = torch.linalg.qr(right.T)
    core = core_left @ core_right.T
    if not bool(core.isfinite().all()):  # the training has diverged, and goes on; engines refuse or show it
        nothing = torch.full((left.shape[0] + right.shape[1], rank), torch.nan).to(core)
        return nothing[: left.shape[0]], nothing[left.shape[0] :].T.contiguous(), 0.0, 0.0
    rows, values, columns = torch.linalg.svd(core, full_matrices=False)
    whole, roots = lost + float(values.square().sum()), values[:rank].sqrt()
    lost += float(values[rank:].square().sum())
    left, right = q_left @ (rows[:, :rank] * roots), (roots.unsqueeze(1) * columns[:rank]) @ q_right.T
    return _padded(left, rank, 1), _padded(right, rank, 0), lost, whole


def _padded(factor: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    missing = list(factor.shape)
    missing[dim] = rank - missing[dim]
    return torch.cat([factor, factor.new_zeros(missing)], dim)


def _range_of(
    left: torch.Tensor, right: torch.Tensor, dense: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor, float]:
    size = min(rank + OVERSAMPLED, *dense.shape)
    # A generator of its own: that of the training stays as it is, and all peers cut alike.
    probe = torch.randn(dense.shape[1], size, generator=torch.Generator().manual_seed(0)).to(dense)
    for _ in range(POWERS):
        basis = torch.linalg.qr(dense @ probe + left @ (right @ probe))[0]
        inside = dense.T @ basis + right.T @ (left.T @ basis)
        probe = torch.linalg.qr(inside)[0]
    lost = 0.0
    for start in range(0, dense.shape[0], ROWS):  # exactly, and not as the difference of two norms
        rows = slice(start, start + ROWS)
        lost += float((dense[rows] + left[rows] @ right - basis[rows] @ inside.T).square().sum())
    return basis, inside.T, lost
