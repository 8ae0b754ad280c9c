"""Gives the ranks of a process group the same batch, with collectives over gloo."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from averaging.errors import FeedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Outcome(IntEnum):
    """The outcome of one request of rank 0 for a batch."""

    NOTHING_YET = 0
    BATCH = 1
    FAILED = 2


class Ranks:
    """All ranks of a group, or this process alone.

    Args:
        group: None means torch's default group if torch.distributed is initialized, else this process alone.
        timeout: seconds for which a rank waits for another rank that is alive.
    """

    def __init__(self, group: ProcessGroup | None, timeout: float) -> None:
        self._group: ProcessGroup | None = None
        self.rank = 0
        if not (dist.is_available() and dist.is_initialized()):
            return
        members = dist.get_process_group_ranks(group)
        if len(members) > 1:
            self.rank, self._root = dist.get_rank(group), members[0]
            wait = datetime.timedelta(seconds=timeout)
            # A separate gloo group takes CPU tensors, and destroying it makes waiting ranks raise.
            self._group = dist.new_group(members, wait, "gloo", use_local_synchronization=True)

    def broadcast(self, outcome: Outcome, content: bytes) -> tuple[Outcome, bytes]:
        """Returns the arguments of rank 0 at all ranks; those of other ranks are ignored.

        Raises:
            FeedError: a rank has died, or did not call this within the time-out.
        """
        if self._group is None:
            return outcome, content
        with self._translating_errors():
            head = torch.tensor([outcome, len(content)], dtype=torch.int64)
            dist.broadcast(head, self._root, self._group)
            outcome, length = Outcome(int(head[0])), int(head[1])
            if outcome is Outcome.NOTHING_YET:
                return outcome, b""
            data = torch.empty(length, dtype=torch.uint8)
            if self.rank == 0 and length:
                data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            dist.broadcast(data, self._root, self._group)
            dist.barrier(self._group)  # no rank trains a batch that another rank did not receive
        return outcome, content if self.rank == 0 else data.numpy().tobytes()

    def all_equal(self, number: int) -> bool:
        """Returns whether all ranks gave the same number, which has at most 63 bits.

        Raises:
            FeedError: as for `broadcast`.
        """
        if self._group is None:
            return True
        with self._translating_errors():
            ends = torch.tensor([number, -number], dtype=torch.int64)
            dist.all_reduce(ends, dist.ReduceOp.MAX, self._group)
        return int(ends[0]) == number == -int(ends[1])

    def close(self) -> None:
        """Leaves the group. Ranks that wait for this one raise."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):  # it may have been destroyed with the default group
                dist.destroy_process_group(group)

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise FeedError(
                f"rank {self.rank} cannot reach another rank, which has ended or hangs ({reason}); "
                "restart all ranks from their checkpoint"
            ) from error
