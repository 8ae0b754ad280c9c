"""The weighted average of one member's shard, part by part, from senders that may be dropped. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from averaging.errors import ProtocolViolationError


class ShardReducer:
    """Sums the parts of a shard as they arrive.

    A part is complete when every sender that is not dropped has delivered it. A dropped sender stays in the parts it
    has delivered and is left out of the others.

    Args:
        sizes: number of elements of each part, in order.
        weights: weight of every sender whose parts come over the network, by name.
    """

    def __init__(self, sizes: list[int], weights: Mapping[str, float]) -> None:
        self._sizes = sizes
        self._weights = dict(weights)
        self._next = dict.fromkeys(weights, 0)  # number of the part that each sender delivers next
        self._sums: dict[int, torch.Tensor] = {}
        self._borrowed: set[int] = set()  # parts whose sum is still one sender's own tensor
        # Per part, of its contributors so far: the largest weight, and the sum of all weights relative to it. Weights
        # are claims of the members, so this must not depend on the weight of a member that has delivered nothing.
        self._units: dict[int, float] = {}
        self._relative_weights: dict[int, float] = {}
        self._completed = 0

    def add(self, sender: str, values: torch.Tensor) -> None:
        """Adds the next part of `sender`.

        Args:
            sender: a name in `weights` that has not been dropped.
            values: 1-D, of the part's size; any floating-point dtype. The reducer may keep a reference until the part
                is finished, so the caller must not write to it. The reducer does not write to it either.

        Raises:
            ProtocolViolationError: the shape is wrong, or the shard has no further part.
        """
        number = self._next[sender]
        if number >= len(self._sizes):
            raise ProtocolViolationError(f"{sender} sent more than the {len(self._sizes)} parts of this shard")
        if tuple(values.shape) != (self._sizes[number],):
            raise ProtocolViolationError(
                f"{sender} sent part {number} with shape {list(values.shape)} instead of [{self._sizes[number]}]"
            )
        self._next[sender] = number + 1
        self._add(number, values, self._weights[sender])

    def drop(self, sender: str) -> None:
        """Stops waiting for `sender`."""
        self._next.pop(sender, None)

    def take_complete(self) -> range:
        """The parts that have become complete since the last call, in order."""
        # Senders deliver in order.
        reached = min(self._next.values(), default=len(self._sizes))
        complete = range(self._completed, reached)
        self._completed = reached
        return complete

    def finish(self, number: int, local: torch.Tensor | None, local_weight: float) -> torch.Tensor | None:
        """Returns the average of a complete part and releases it.

        Args:
            number: the part, from `take_complete`.
            local: this member's own contribution, 1-D; None if it has none.
            local_weight: its weight.

        Returns:
            1-D, float32 or float64; None if no member with a weight above 0 contributed.
        """
        if local is not None:
            self._add(number, local, local_weight)
        weight = self._relative_weights.pop(number, None)
        self._units.pop(number, None)
        total = self._sums.pop(number, None)
        borrowed = number in self._borrowed
        self._borrowed.discard(number)
        if total is None or weight is None:
            return None
        return torch.div(total, weight, out=None if borrowed else total)

    def _add(self, number: int, values: torch.Tensor, weight: float) -> None:
        if weight == 0:
            return  # 0 times NaN would be NaN
        if values.dtype not in (torch.float32, torch.float64):
            values = values.to(torch.float32)
        total = self._sums.get(number)
        if total is None:
            self._sums[number], self._units[number], self._relative_weights[number] = values, weight, 1.0
            self._borrowed.add(number)  # the next addition allocates the sum, which saves a copy here
            return
        out = None if number in self._borrowed else total
        self._borrowed.discard(number)
        unit = self._units[number]
        if weight <= unit:
            self._sums[number] = torch.add(total, values, alpha=weight / unit, out=out)
            self._relative_weights[number] += weight / unit
        else:
            self._sums[number] = torch.add(values, total, alpha=unit / weight, out=out)
            self._relative_weights[number] = 1.0 + self._relative_weights[number] * (unit / weight)
            self._units[number] = weight
