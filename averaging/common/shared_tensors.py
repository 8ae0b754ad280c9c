"""The tensors a peer averages: their names, a lock around them, and flat views on the CPU to read parts from."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import TypeVar

import torch
import xxhash

from averaging.common.threads import in_thread, takes_long
from averaging.errors import RoundError, TensorError

T = TypeVar("T")

LOOK_UP_SECONDS = 0.5
"""After so long a thread that waits for the lock looks whether anybody still wants what it is to do."""


SAMPLE_BYTES = 16 << 20
"""Bytes that are compared at a time where all of a large model would cost too much; 1 to 2 ms."""


class Write(Enum):
    """How values are written to the elements they are for."""

    REPLACE = auto()
    """The values."""
    ADD = auto()
    """What was there plus the values."""
    DIFFERENCE = auto()
    """The values minus what was there, and 0 everywhere else."""
    ONLY = auto()
    """The values, and 0 everywhere else."""


class SharedTensors:
    """Tensors that training and averaging share, of any device, shape and layout of memory.

    Args:
        tensors: in an order that is the same at all peers; a mapping gives them names. Some may share memory.
        under: whose lock guards these too; None for a lock of their own.

    Raises:
        TensorError: there are none.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor] | Mapping[str, torch.Tensor], under: SharedTensors | None = None
    ) -> None:
        if isinstance(tensors, Mapping):
            named = {str(name): tensor for name, tensor in tensors.items()}
        else:
            named = {f"tensor_{number}": tensor for number, tensor in enumerate(tensors)}
        if not named:
            raise TensorError("there are no tensors to average")
        self.names = tuple(named)
        self.tensors = tuple(tensor.detach() for tensor in named.values())
        self._views = [
            tensor.view(-1) if tensor.device.type == "cpu" and _is_dense(tensor) and tensor.is_contiguous() else None
            for tensor in self.tensors
        ]
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
        self._tied = sharing_memory(self.tensors)
        self.before_application_writes: Callable[[], object] = lambda: None
        self._lock: threading.Lock = under._lock if under else threading.Lock()

    @contextmanager
    def locked(self, *, keep: bool = True) -> Iterator[list[torch.Tensor]]:
        """The tensors, for the application to read and write; it blocks until the lock is free.

        Args:
            keep: whether what they hold must remain readable as it was, as `before_application_writes` sees to.
        """
        with self._lock:
            if keep:
                self.before_application_writes()
            yield list(self.tensors)

    async def while_locked(self, action: Callable[[], T], timeout: float, nbytes: int = 0) -> T:
        """Runs `action` under the lock without blocking the event loop: in a thread if somebody else holds the lock.

        A cancellation that comes before it has begun keeps it from beginning; one that comes later waits for its end.

        Args:
            action: what to do.
            timeout: seconds to wait for the lock.
            nbytes: how much `action` goes through; if it is much, it runs in a thread in any case.

        Raises:
            RoundError: the lock was not free in time.
        """
        if not takes_long(nbytes) and self._lock.acquire(blocking=False):
            try:
                return action()
            finally:
                self._lock.release()

        decided = threading.Lock()  # taken by the thread that begins, or by a cancellation that comes before

        def wait_and_run() -> T:
            end = time.monotonic() + timeout
            while not self._lock.acquire(timeout=max(0.0, min(LOOK_UP_SECONDS, end - time.monotonic()))):
                if decided.locked() or time.monotonic() >= end:
                    raise RoundError(
                        f"the application held the tensors' lock for {timeout:g} s; release it sooner, or raise "
                        "`timeout`"
                    )
            try:
                if not decided.acquire(blocking=False):
                    raise RoundError("nobody waits for it any more")
                return action()
            finally:
                self._lock.release()

        # Once this has ended nothing may be written any more.
        return await in_thread(wait_and_run, lambda: decided.acquire(blocking=False))

    def flat(self) -> list[torch.Tensor]:
        """Each tensor as one dimension on the CPU: a view of its memory if it is contiguous there, else a copy."""
        return [self._flat(index) for index in range(len(self.tensors))]

    def _flat(self, index: int) -> torch.Tensor:
        view = self._views[index]
        return self.tensors[index].cpu().reshape(-1) if view is None else view

    def write(self, changes: Iterable[tuple[int, int, torch.Tensor]], how: Write = Write.REPLACE) -> None:
        """Writes (tensor index, first element, 1-D values). The caller holds the lock."""
        elsewhere_too = how in (Write.DIFFERENCE, Write.ONLY)
        by_tensor: dict[int, list[tuple[int, torch.Tensor]]] = {}
        if elsewhere_too:
            by_tensor = {index: [] for index in range(len(self.tensors))}
        counts_before = how in (Write.ADD, Write.DIFFERENCE)
        was: dict[int, torch.Tensor] = {}  # of tied tensors, since their memory changes with the first of them
        if counts_before and self._tied:
            changes = list(changes)
            was = {index: self._flat(index).clone() for index in self._tied & {index for index, _, _ in changes}}
        for index, start, values in changes:
            if index in was:
                old = was[index][start : start + values.numel()]
                values = old + values.to(old.dtype) if how is Write.ADD else values.to(old.dtype) - old
            by_tensor.setdefault(index, []).append((start, values))
        for index, pieces in by_tensor.items():
            tensor, view, before = self.tensors[index], self._views[index], self._flat(index)
            target = torch.zeros_like(before) if elsewhere_too else before
            for start, values in pieces:
                piece = target[start : start + values.numel()]
                if how is Write.ADD and index not in was:
                    piece.add_(values.to(piece.dtype))
                else:
                    piece.copy_(values)
                if how is Write.DIFFERENCE and index not in was:
                    piece.sub_(before[start : start + values.numel()])
            if target is not view:
                tensor.copy_(target.view(tensor.shape))

    def write_now(
        self, index: int, start: int, values: torch.Tensor, how: Write, provided: Callable[[], bool] = lambda: True
    ) -> bool:
        """Writes values to a contiguous CPU tensor if nobody holds the lock at this moment; whether it did.

        Args:
            index: of the tensor.
            start: first element.
            values: 1-D.
            how: as in `write`.
            provided: asked under the lock whether it may.
        """
        view = self._views[index]
        # The other one of two tied tensors may not have been sent yet.
        if view is None or index in self._tied or not self._lock.acquire(blocking=False):
            return False
        try:
            if not provided():
                return False
            if how is Write.REPLACE:
                view[start : start + values.numel()].copy_(values)
            else:
                self.write([(index, start, values)], how)
        finally:
            self._lock.release()
        return True

    def copy_from(self, sources: Sequence[torch.Tensor]) -> None:
        """Overwrites every tensor with one of the same shape. The caller holds the lock."""
        for tensor, source in zip(self.tensors, sources, strict=True):
            tensor.copy_(source)

    def check_finite(self) -> None:
        """Looks for NaN and infinity.

        Raises:
            TensorError: a tensor holds some; the error names it and the first place.
        """
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if not all_finite(tensor):
                place = (~torch.isfinite(tensor.cpu().reshape(-1))).nonzero()[0].item()
                value = tensor.cpu().reshape(-1)[int(place)].item()
                raise TensorError(
                    f"tensor {name!r} holds {value} at flat index {place}; repair it, leave it out if it is meant to, "
                    "as a mask is, or allow it with non_finite='allow' and let it spread to all members"
                )


def sharing_memory(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Which of them may share memory with another one, as tied weights do."""
    found: set[int] = set()
    extents = sorted((*_extent(tensor), index) for index, tensor in enumerate(tensors) if _is_dense(tensor))
    last, reached = -1, ("", 0)  # the tensor that reaches farthest so far
    for device, begin, end, index in extents:
        if (device, begin) < reached:
            found |= {last, index}
        if (device, end) > reached:
            last, reached = index, (device, end)
    return frozenset(found)


def digest_of_tensors(tensors: Iterable[torch.Tensor], start: int = 0, stop: int | None = None) -> str:
    """An XXH3 digest, 16 hexadecimal digits, of the bytes of dense tensors one after the other, on whatever device.

    Args:
        tensors: in order.
        start: first byte that counts.
        stop: one past the last; None for all that follow.
    """
    digest = xxhash.xxh3_64()
    place = 0
    for tensor in tensors:
        size = tensor.element_size()
        end = place + tensor.numel() * size
        first = max(start - place, 0) // size
        last = tensor.numel() if stop is None else min(tensor.numel(), max(-(-(stop - place) // size), 0))
        if first < last:
            piece = tensor.detach().reshape(-1)[first:last].cpu().contiguous()
            digest.update(piece.view(torch.uint8).numpy().data)
        place = end
    return digest.hexdigest()


def digest_of_piece(tensors: Sequence[torch.Tensor], number: int) -> str:
    """The digest of one piece of tensors, of `SAMPLE_BYTES` at most: successive numbers go through all of them."""
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    start = number % max(1, -(-nbytes // SAMPLE_BYTES)) * SAMPLE_BYTES
    return digest_of_tensors(tensors, start, start + SAMPLE_BYTES)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _extent(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Its device, and where its memory begins and ends."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def finite_as(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether no element is NaN or infinite once it is kept in `dtype`, in which large values may not exist."""
    return all_finite(tensor if tensor.dtype == dtype else tensor.to(dtype))


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. One pass without a temporary in the usual case."""
    # A sum is finite only if all its terms are; it can overflow with large finite terms, so then look at each.
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
