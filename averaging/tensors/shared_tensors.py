"""The tensors that a peer averages, with their names, a lock, and flat views on the CPU."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from itertools import islice
from typing import TypeVar

import torch
import xxhash

from averaging.common import spelled
from averaging.errors import RoundError, TensorError
from averaging.tensors.manifest import view_memory
from averaging.tensors.staging import HostCopies, StagedTensor, computed, finish, is_on_device, on_cpu, wait_for

# Runs long computations in a thread, so that this peer still answers pings while they run.


T = TypeVar("T")

INLINE_BYTES = 128 << 20
"""Work on at most this many bytes runs on the event loop and blocks it for up to 0.1 s. With threads a round of 64 MiB
takes 6 to 16 % longer, one of 256 MiB 7 % less."""


def takes_long(nbytes: int) -> bool:
    return nbytes > INLINE_BYTES


async def offload(action: Callable[[], T], nbytes: int) -> T:
    return await in_thread(action) if takes_long(nbytes) else action()


async def in_thread(action: Callable[[], T], give_up: Callable[[], bool] = lambda: False) -> T:
    """Runs `action` in a thread, with the caller's gradient and inference modes, which are per thread.

    A thread cannot be cancelled, so a cancellation waits until `action` has returned; unless `give_up` returns True
    then: `action` has no effect any more and need not start.
    """
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()  # these are per thread

    def with_modes() -> T:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            return action()

    running = asyncio.ensure_future(asyncio.to_thread(with_modes))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if give_up():
            running.cancel()
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        raise


POLL_SECONDS = 0.5  # interval at which a thread that waits for the lock checks whether it was cancelled


class Write(Enum):
    """What `SharedTensors.write` makes of the old elements and the new values."""

    REPLACE = auto()
    """new"""
    ADD = auto()
    """old + new"""
    DIFFERENCE = auto()
    """new - old, and 0 in elements without a new value"""
    ONLY = auto()
    """new, and 0 in elements without a new value"""


class SharedTensors:
    """Tensors that training and averaging share; any device, shape and memory layout.

    They are in the same order at all peers; a mapping gives them names. Some may share memory. The lock of `lock_of`,
    if there is one, guards these too. `before_reading` is called under the lock before a round reads the tensors, and
    completes values that are under way from a device.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor] | Mapping[str, torch.Tensor], lock_of: SharedTensors | None = None
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
            tensor.view(-1) if _is_dense(tensor) and tensor.is_contiguous() else None for tensor in self.tensors
        ]
        on_device = [number for number, tensor in enumerate(self.tensors) if is_on_device(tensor)]
        self._elsewhere = {number: place for place, number in enumerate(on_device)}  # and its place in `_host`
        self._host: HostCopies | None = None  # of those, from the first round on
        self._computed: list[torch.cuda.Event] = []
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
        self._tied = sharing_memory(self.tensors)
        self.before_application_writes: Callable[[], object] = lambda: None
        self.before_reading: Callable[[], object] | None = None
        self._lock: threading.Lock = lock_of._lock if lock_of else threading.Lock()

    @contextmanager
    def locked(self, *, keep: bool = True) -> Iterator[list[torch.Tensor]]:
        """Yields the tensors for the application to read and write; blocks until the lock is free.

        If the current contents must be preserved for readers, `keep`, it calls `before_application_writes`.
        """
        with self._lock:
            if keep:
                self.before_application_writes()
            try:
                yield list(self.tensors)
            finally:
                self.note_computed()

    @property
    def waits(self) -> bool:
        return bool(self._elsewhere) or self.before_reading is not None

    def note_computed(self) -> None:
        """Notes that what the caller's thread has had the device compute so far belongs to the tensors' values."""
        if self._elsewhere:
            self._computed = computed(self.tensors)

    def _for_reading(self) -> None:
        if self.before_reading is not None:
            self.before_reading()
        self.wait_for_computed()

    def wait_for_computed(self) -> None:
        """What the caller's thread has the device do from now on comes after the values of `note_computed`."""
        if self._elsewhere:
            wait_for(self._computed, self.tensors)

    async def while_locked(self, action: Callable[[], T], timeout: float, nbytes: int = 0) -> T:
        """Runs `action` under the lock; in a thread if the lock is taken, `nbytes` is large or a device is involved.

        A cancellation prevents `action` from starting; if it has started, the cancellation waits until it has returned.
        A RoundError says that the lock was not free within `timeout` seconds.
        """
        if not (takes_long(nbytes) or self.waits) and self._lock.acquire(blocking=False):
            try:
                return action()
            finally:
                self._lock.release()

        decided = threading.Lock()  # taken by whichever comes first: the start of `action`, or a cancellation

        def wait_and_run() -> T:
            end = time.monotonic() + timeout
            while not self._lock.acquire(timeout=max(0.0, min(POLL_SECONDS, end - time.monotonic()))):
                if decided.locked() or time.monotonic() >= end:
                    raise RoundError(
                        f"the application held the tensors' lock for {timeout:g} s; release it sooner, or raise "
                        f"{spelled('round_timeout')}"
                    )
            try:
                if not decided.acquire(blocking=False):
                    raise RoundError("the action was cancelled before it started")
                return action()
            finally:
                self._lock.release()

        return await in_thread(wait_and_run, lambda: decided.acquire(blocking=False))

    def flat(self) -> list[torch.Tensor | StagedTensor]:
        """Each tensor in 1-D on the CPU: a view of its memory if it is contiguous and on the CPU, else a copy.

        The copies of tensors on a device only begin to be made; nobody may write these tensors before they are here.
        """
        self._for_reading()
        host = self._copies()
        if host is not None:
            host.begin()
        places = self._elsewhere
        return [
            self._flat(number) if host is None or number not in places else StagedTensor(host, places[number])
            for number in range(len(self.tensors))
        ]

    def _copies(self) -> HostCopies | None:
        if self._host is None and self._elsewhere:
            self._host = HostCopies([self.tensors[number] for number in self._elsewhere])
        return self._host

    def _readable(self, index: int) -> torch.Tensor | None:
        view = self._views[index]
        return None if view is None or is_on_device(view) else view

    def _flat(self, index: int) -> torch.Tensor:
        view = self._views[index]
        return self.tensors[index].reshape(-1) if view is None else view

    def write(self, changes: Iterable[tuple[int, int, torch.Tensor]], how: Write = Write.REPLACE) -> None:
        """Writes changes of the form (tensor index, first element, 1-D values on the CPU). The caller holds the lock.

        Tensors on a device are changed there, and hold the result when this returns.
        """
        if how is Write.REPLACE:
            changes = self._replace_in_views(changes)
        fills_zero = how in (Write.DIFFERENCE, Write.ONLY)
        by_tensor: dict[int, list[tuple[int, torch.Tensor]]] = {}
        if fills_zero:
            by_tensor = {index: [] for index in range(len(self.tensors))}
        for index, start, values in changes:
            by_tensor.setdefault(index, []).append((start, values))
        self.wait_for_computed()
        # Copies, since writing one tied tensor changes the others.
        uses_old = how in (Write.ADD, Write.DIFFERENCE)
        tied_old = {index: self._flat(index).clone() for index in self._tied & by_tensor.keys() if uses_old}
        for index, pieces in by_tensor.items():
            tensor, view, before = self.tensors[index], self._views[index], self._flat(index)
            target = torch.zeros_like(before) if fills_zero else before
            for start, values in self._there(index, pieces):
                piece, old = (each[start : start + values.numel()] for each in (target, tied_old.get(index, before)))
                if how is Write.ADD:
                    torch.add(old, values.to(old.dtype), out=piece)
                elif how is Write.DIFFERENCE:
                    torch.sub(values.to(old.dtype), old, out=piece)
                else:
                    piece.copy_(values)
            if target is not view:
                tensor.copy_(target.view(tensor.shape))
        if self._elsewhere:
            finish(self.tensors)

    def _there(self, index: int, pieces: Iterable[tuple[int, torch.Tensor]]) -> Iterable[tuple[int, torch.Tensor]]:
        host = self._copies()
        if host is None or index not in self._elsewhere:
            return pieces
        return host.send_back(self._elsewhere[index], pieces)

    def _replace_in_views(
        self, changes: Iterable[tuple[int, int, torch.Tensor]]
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Writes to the contiguous CPU tensors, many in one call; returns the changes of other tensors."""
        others: list[tuple[int, int, torch.Tensor]] = []
        changes = iter(changes)
        while batch := list(islice(changes, OBJECTS_AT_ONCE)):
            pieces, news = [], []
            for index, start, values in batch:
                if (view := self._readable(index)) is None:
                    others.append((index, start, values))
                else:
                    pieces.append(view[start : start + values.numel()])
                    news.append(values)
            if pieces:
                torch._foreach_copy_(pieces, news)
        return iter(others)

    def copy_from(self, sources: Sequence[torch.Tensor]) -> None:
        for tensor, source in zip(self.tensors, sources, strict=True):
            tensor.copy_(source)

    def check_finite(self) -> None:
        """Checks for NaN and infinity; the TensorError names the tensor and the first index."""
        self._for_reading()
        number = first_not_finite(self.tensors)
        if number is not None:
            values = on_cpu(self.tensors[number]).reshape(-1)
            place = (~torch.isfinite(values)).nonzero()[0].item()
            allow = spelled("non_finite", "allow")
            raise TensorError(
                f"tensor {self.names[number]!r} holds {values[int(place)].item()} at flat index {place}; fix it, leave "
                f"it out if that is intended (a mask, for example), or set {allow}, which spreads the value to all "
                "members"
            )


def sharing_memory(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Indices of tensors that may share memory with another one, such as tied weights."""
    shared: set[int] = set()
    extents = sorted((*_extent(tensor), index) for index, tensor in enumerate(tensors) if _is_dense(tensor))
    last, reached = -1, ("", 0)  # the tensor with the highest end so far
    for device, begin, end, index in extents:
        if (device, begin) < reached:
            shared |= {last, index}
        if (device, end) > reached:
            last, reached = index, (device, end)
    return frozenset(shared)


def digest_of_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """The XXH3 digest, 16 hex digits, of the concatenated bytes of dense tensors on any device."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        if tensor.numel():
            digest.update(view_memory(on_cpu(tensor)))
    return digest.hexdigest()


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _extent(tensor: torch.Tensor) -> tuple[str, int, int]:
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def finite_as(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return all_finite(tensor if tensor.dtype == dtype else tensor.to(dtype))


BATCH_BYTES = 1 << 20  # small tensors are looked at together up to this size

OBJECTS_AT_ONCE = 256
"""Views of small tensors that exist at the same time. Python's garbage collector runs after every 700 new objects that
stay, and walks all objects of the process if many do: that took a quarter of a round of 20,000 tensors."""


def first_not_finite(tensors: Sequence[torch.Tensor]) -> int | None:
    """The place of the first tensor that holds NaN or infinity; None if all elements of all are finite.

    Each device is waited for once, not once for each tensor.
    """
    on_device: dict[torch.device, list[int]] = {}
    suspects: list[int] = []
    for places in _batches(tensors):
        batch = [tensors[place] for place in places]
        if is_on_device(batch[0]):
            on_device.setdefault(batch[0].device, []).extend(places)
        elif not all_finite(batch[0] if len(batch) == 1 else torch.cat([tensor.reshape(-1) for tensor in batch])):
            suspects += places
    for places in on_device.values():
        sums = torch.stack([tensors[place].sum(dtype=torch.float32) for place in places])
        suspects += [place for place, finite in zip(places, torch.isfinite(sums).tolist(), strict=True) if not finite]
    return next((place for place in sorted(suspects) if not all_finite(tensors[place])), None)


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    batch: list[int] = []
    kind: tuple[torch.dtype, torch.device] | None = None
    nbytes = 0
    for place, tensor in enumerate(tensors):
        size, own = tensor.numel() * tensor.element_size(), (tensor.dtype, tensor.device)
        if batch and (own != kind or nbytes + size > BATCH_BYTES or len(batch) == OBJECTS_AT_ONCE):
            yield batch
            batch, nbytes = [], 0
        batch.append(place)
        kind, nbytes = own, nbytes + size
    if batch:
        yield batch


def all_finite(tensor: torch.Tensor) -> bool:
    # A sum is finite only if all its terms are. It can also overflow with finite terms; then every element is checked.
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
