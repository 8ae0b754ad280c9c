"""How the ranks of a process group get the same batch: short collectives of their own, over gloo."""

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
    """What rank 0 tells the others."""

    NOTHING_YET = 0
    BATCH = 1
    FAILED = 2


class Ranks:
    """All ranks of a group, or this process alone.

    Args:
        group: None for torch's default group, or for one process if there is none.
        timeout: seconds for which a rank waits for another one that is alive.
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
            # Its own group, so that it works on CPU tensors, and that its end reaches the other ranks.
            self._group = dist.new_group(members, wait, "gloo", use_local_synchronization=True)

    def share(self, outcome: Outcome, content: bytes) -> tuple[Outcome, bytes]:
        """What rank 0 gave, at all ranks; the others' arguments do not matter.

        Raises:
            FeedError: a rank has died, or has not come within the time-out.
        """
        if self._group is None:
            return outcome, content
        with self._watched():
            head = torch.tensor([outcome, len(content)], dtype=torch.int64)
            dist.broadcast(head, self._root, self._group)
            outcome, length = Outcome(int(head[0])), int(head[1])
            if outcome is Outcome.NOTHING_YET:
                return outcome, b""
            data = torch.empty(length, dtype=torch.uint8)
            if self.rank == 0 and length:
                data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            dist.broadcast(data, self._root, self._group)
            dist.barrier(self._group)  # nobody trains a batch that another rank has not got
        return outcome, content if self.rank == 0 else data.numpy().tobytes()

    def agree(self, number: int) -> bool:
        """Whether all ranks gave the same number, of 63 bits.

        Raises:
            FeedError: as `share`.
        """
        if self._group is None:
            return True
        with self._watched():
            ends = torch.tensor([number, -number], dtype=torch.int64)
            dist.all_reduce(ends, dist.ReduceOp.MAX, self._group)
        return int(ends[0]) == number == -int(ends[1])

    def close(self) -> None:
        """Ends the group; ranks that wait for this one raise."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):  # it may have been destroyed with the default group
                dist.destroy_process_group(group)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise FeedError(
                f"rank {self.rank} cannot reach another rank, which has ended or hangs ({reason}); "
                "restart all ranks from their checkpoint"
            ) from error
