"""The weighted average of one member's shard, part by part, from senders that may be lost on the way. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from averaging.errors import ProtocolViolationError


class ShardReducer:
    """Sums the parts of a shard as they arrive. No I/O, no clock.

    A part is complete as soon as every sender that is still expected has delivered it. A sender that is dropped stays
    in the parts it has delivered and is left out of the others.

    Args:
        sizes: number of elements of each part, in order.
        weights: of every sender whose parts come over the network, by name.
    """

    def __init__(self, sizes: list[int], weights: Mapping[str, float]) -> None:
        self._sizes = sizes
        self._weights = dict(weights)
        self._next = dict.fromkeys(weights, 0)  # the part each expected sender delivers next
        self._sums: dict[int, torch.Tensor] = {}
        self._borrowed: set[int] = set()  # parts of which a single sender's own values are the sum so far
        # Of those who delivered the part: the largest weight, and the sum of all weights relative to it. A weight is a
        # member's word, so nothing is formed relative to one whose part may never come, or is far below the others.
        self._units: dict[int, float] = {}
        self._arrived: dict[int, float] = {}
        self._completed = 0

    def add(self, sender: str, values: torch.Tensor) -> None:
        """Takes the next part of `sender`.

        Args:
            sender: one of the names in `weights` that has not been dropped.
            values: 1-D, of the part's size; any floating-point dtype. Kept until the part's next sender or its end, so
                nobody may write to it until then; never written.

        Raises:
            ProtocolViolationError: wrong shape, or more parts than there are.
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
        """No further part of `sender` is waited for."""
        self._next.pop(sender, None)

    def take_complete(self) -> range:
        """The parts that have become complete since the last call, in order."""
        # Senders deliver in order, so the slowest one tells how far the shard is.
        reached = min(self._next.values(), default=len(self._sizes))
        complete = range(self._completed, reached)
        self._completed = reached
        return complete

    def finish(self, number: int, local: torch.Tensor | None, local_weight: float) -> torch.Tensor | None:
        """The average of a complete part; forgets it.

        Args:
            number: of the part, from `take_complete`.
            local: what this member contributes itself, 1-D; None if nothing.
            local_weight: its weight.

        Returns:
            1-D, float32 or float64; None if nobody with a weight above 0 contributed.
        """
        if local is not None:
            self._add(number, local, local_weight)
        weight = self._arrived.pop(number, None)
        self._units.pop(number, None)
        total = self._sums.pop(number, None)
        borrowed = number in self._borrowed
        self._borrowed.discard(number)
        if total is None or weight is None:
            return None
        return torch.div(total, weight, out=None if borrowed else total)

    def _add(self, number: int, values: torch.Tensor, weight: float) -> None:
        if weight == 0:
            return  # not even its NaN counts
        if values.dtype not in (torch.float32, torch.float64):
            values = values.to(torch.float32)
        total = self._sums.get(number)
        if total is None:
            self._sums[number], self._units[number], self._arrived[number] = values, weight, 1.0
            self._borrowed.add(number)  # the first addition makes a sum of it, without a copy before
            return
        out = None if number in self._borrowed else total
        self._borrowed.discard(number)
        unit = self._units[number]
        if weight <= unit:  # equal weights of any size are plain sums
            self._sums[number] = torch.add(total, values, alpha=weight / unit, out=out)
            self._arrived[number] += weight / unit
        else:
            self._sums[number] = torch.add(values, total, alpha=unit / weight, out=out)
            self._units[number], self._arrived[number] = weight, 1.0 + self._arrived[number] * (unit / weight)
