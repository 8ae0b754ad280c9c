"""`ControlGroup`: the ranks of one job exchange control data beside the collectives of the training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from averaging.errors import ConfigError, SiteError

HANG_SECONDS = 1800.0
"""Seconds after which ranks that wait for one that hangs raise, as in torch. A rank that dies is noticed at once."""

INLINE_BYTES = 4088
"""Size of a message that needs one broadcast only."""


def ranks_of(process_group: object) -> list[int]:
    """Returns the global ranks of a process group; None stands for the default group.

    Raises:
        ConfigError: torch.distributed is not initialized, or this is no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "process_group was given, but torch.distributed is not initialized; call "
            "torch.distributed.init_process_group() first, in a script that torchrun starts"
        )
    if process_group is None:
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group must be a group of torch.distributed, such as torch.distributed.group.WORLD, not "
            f"{process_group!r:.100}"
        )
    return dist.get_process_group_ranks(process_group)


class ControlGroup:
    """A gloo group over the ranks of another group, so that control data never mixes with the training's collectives.

    Every method is collective: all ranks call it, in the same order. Objects are pickled, as torch's own collectives
    do: the ranks are processes of one job, and trust each other.

    Args:
        ranks: Global ranks of the members, see `ranks_of`.
        timeout: Seconds for which a rank waits for another one that is alive.

    Attributes:
        rank: Rank of this process in the group.
        size: Number of ranks.

    Raises:
        SiteError: A rank is lost. Any method raises it.
    """

    def __init__(self, ranks: Sequence[int], timeout: float = HANG_SECONDS) -> None:
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        # torch gives a group of some ranks the name of an earlier one that was closed, and its ranks may then read the
        # old addresses in the store and wait for ever. A group of all ranks has a number of its own.
        some = len(ranks) < dist.get_world_size()
        try:
            self._group: Any = dist.new_group(
                list(ranks), timeout=timedelta(seconds=timeout), backend="gloo", use_local_synchronization=some
            )
        except RuntimeError as error:
            raise SiteError(f"the ranks of this site cannot connect to each other: {error}") from error

    def broadcast(self, content: bytes, source: int = 0) -> bytes:
        """Returns the `content` of rank `source` at every rank; that of other ranks is ignored."""
        sends = self.rank == source
        # The first tensor has a fixed size, since the receivers do not know the length yet.
        first = torch.zeros(INLINE_BYTES + 8, dtype=torch.uint8)
        if sends:
            head = len(content).to_bytes(8, "little") + content[:INLINE_BYTES]
            first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self.broadcast_tensor(first, source)
        size = int.from_bytes(first[:8].numpy().tobytes(), "little")
        if size <= INLINE_BYTES:
            return first[8 : 8 + size].numpy().tobytes()
        rest = torch.empty(size - INLINE_BYTES, dtype=torch.uint8)
        if sends:
            rest.copy_(torch.frombuffer(bytearray(content[INLINE_BYTES:]), dtype=torch.uint8))
        self.broadcast_tensor(rest, source)
        return first[8:].numpy().tobytes() + rest.numpy().tobytes()

    def broadcast_tensor(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Writes rank `source`'s contiguous CPU tensor into `tensor` at every rank."""
        with self._reaching():
            dist.broadcast(tensor, group=self._group, group_src=source)

    def all_gather(self, item: object) -> list[Any]:
        """Returns the items of all ranks, in their order."""
        items: list[Any] = [None] * self.size
        with self._reaching():
            dist.all_gather_object(items, item, group=self._group)
        return items

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        with self._reaching():
            dist.barrier(self._group)

    def close(self) -> None:
        """Leaves the group. Ranks that wait for this one raise."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(Exception):  # it may have been destroyed with the default group
                dist.destroy_process_group(group)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise SiteError(
                f"rank {self.rank} has lost another rank, which has ended or hangs ({reason:.200}); end this process, "
                "so that torchrun starts all ranks again"
            ) from error
