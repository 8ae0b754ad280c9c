"""Copies between devices and the host. No other file moves the elements of averaged tensors from one side to the other.

On CUDA they travel in chunks, on a stream beside that of training, and through page-locked memory, which the device
reads and writes at the speed of the bus. Other devices copy when they are asked to, one tensor after the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch

CHUNK_BYTES = 16 << 20
"""Bytes that are copied before what waits for them is told: 0.3 ms on a fast bus, and many times what a copy costs."""

SEND_BYTES = 64 << 20
"""Bytes that are sent to a device at a time, unless a single tensor has more: so much memory is taken there."""

_ALIGNMENT = 64
_PAGE = 4096


def is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def host_memory(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """New contiguous tensors of zeros on the CPU, in one page-locked piece if they are for CUDA.

    They have the shapes of `tensors`, which are on the devices with which elements are exchanged. The piece is as long
    as it must be, while torch's own allocator takes the next power of two.
    """
    if not any(tensor.is_cuda for tensor in tensors):
        pairs = zip(tensors, dtypes, strict=True)
        return [torch.zeros(tensor.shape, dtype=dtype, device="cpu") for tensor, dtype in pairs]
    sizes = [prod(tensor.shape) * dtype.itemsize for tensor, dtype in zip(tensors, dtypes, strict=True)]
    starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)])
    piece = torch.from_numpy(_page_locked(int(starts[-1])))
    return [
        piece[start : start + size].view(dtype).view(tensor.shape)
        for tensor, dtype, start, size in zip(tensors, dtypes, starts.tolist(), sizes, strict=False)
    ]


def _page_locked(nbytes: int) -> Any:
    """Bytes on pages of their own that CUDA may copy directly; ordinary memory if the system has no more of these."""
    pages = -(-max(nbytes, 1) // _PAGE) * _PAGE
    whole = np.zeros(pages + _PAGE, dtype=np.uint8)
    offset = -whole.ctypes.data % _PAGE
    place = whole.ctypes.data + offset
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(place, pages, 0)) == 0:
        weakref.finalize(whole, runtime.cudaHostUnregister, place).atexit = False
    return whole[offset : offset + nbytes]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def computed(tensors: Iterable[torch.Tensor]) -> list[torch.cuda.Event]:
    """Marks of what the caller's thread has had devices compute so far, for other threads that read these tensors."""
    events = []
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events


def wait_for(events: Iterable[torch.cuda.Event], tensors: Iterable[torch.Tensor]) -> None:
    """What the caller's thread has devices do with these tensors from now on comes after the marks."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    for event in events:
        for device in devices:
            torch.cuda.current_stream(device).wait_event(event)


def finish(tensors: Iterable[torch.Tensor]) -> None:
    """Waits until devices have done what the caller's thread has had them do with these tensors."""
    for event in computed(tensors):
        event.synchronize()


class HostCopies:
    """Copies of tensors on the host, in their shapes, which are made again and again in the same memory.

    The tensors are contiguous or not, on any device; those on the CPU are copied at once. `into` has contiguous tensors
    on the CPU of the same shapes; None takes new memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = None) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self.copies = list(into or host_memory(self._tensors, [tensor.dtype for tensor in tensors]))
        # The last element of each chunk under way of each tensor, and when it has arrived; of the last begin().
        self._chunks: dict[int, list[tuple[int, torch.cuda.Event]]] = {}

    @torch.no_grad()
    def begin(self, *, keep: bool = False) -> None:
        """Begins to copy what the caller's thread has had the devices compute so far.

        With `keep` the tensors may be written from now on: the device keeps what they hold until it has arrived.
        Otherwise nobody may write them before `wait` returns.
        """
        self._chunks = {}
        on_cuda: dict[torch.device, list[int]] = {}
        for number, tensor in enumerate(self._tensors):
            if tensor.is_cuda and tensor.numel():
                on_cuda.setdefault(tensor.device, []).append(number)
            else:
                self.copies[number].copy_(tensor)
        for device, numbers in on_cuda.items():
            with torch.cuda.device(device):
                self._begin_on(device, numbers, keep=keep)

    def _begin_on(self, device: torch.device, numbers: Sequence[int], *, keep: bool) -> None:
        compute, side = torch.cuda.current_stream(), _side_stream(device)
        sources = [self._tensors[number] for number in numbers]
        kept = _kept(sources) if keep else None
        flat = [source.reshape(-1) for source in kept or sources]
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            for piece in _chunks_of(flat, CHUNK_BYTES):
                for place, start, stop in piece:
                    target = self.copies[numbers[place]].view(-1)[start:stop]
                    target.copy_(flat[place][start:stop].to(target.dtype), non_blocking=True)
                arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                arrived.record(side)
                for place, _, stop in piece:
                    self._chunks.setdefault(numbers[place], []).append((stop, arrived))
        for tensor in flat:
            tensor.record_stream(side)
        if keep and kept is None:
            compute.wait_stream(side)

    def has(self, number: int, stop: int) -> bool:
        arrived = self._arrival(number, stop)
        return arrived is None or bool(arrived.query())  # type: ignore[no-untyped-call]

    def wait(self, number: int | None = None, stop: int | None = None) -> None:
        """Waits until the elements of a tensor before `stop` have arrived, by default all of all tensors."""
        for each in [*self._chunks] if number is None else [number]:
            arrived = self._arrival(each, self._tensors[each].numel() if stop is None else stop)
            if arrived is not None:
                arrived.synchronize()

    def _arrival(self, number: int, stop: int) -> torch.cuda.Event | None:
        chunks = self._chunks.get(number, [])
        return next((arrived for end, arrived in chunks if end >= stop), None)

    def send_back(self, number: int, pieces: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
        """Pieces of a tensor, (first element, 1-D values), on its device and in its dtype. They overwrite its copy."""
        places, staged = [], []
        flat = self.copies[number].view(-1)
        for start, values in pieces:
            places.append(start)
            staged.append(flat[start : start + values.numel()].copy_(values))
        tensor = self._tensors[number]
        yield from zip(places, sent(staged, [tensor] * len(staged)), strict=True)


def copy_to_host(tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    copies = HostCopies(tensors, [target.detach() for target in into])
    copies.begin()
    copies.wait()


class StagedTensor:
    """A tensor of `copies` on the host, 1-D, of which the first elements may be read while the last are copied."""

    def __init__(self, copies: HostCopies, number: int) -> None:
        self._copies, self._number = copies, number
        self._flat = copies.copies[number].view(-1)

    def has(self, stop: int) -> bool:
        return self._copies.has(self._number, stop)

    def __getitem__(self, place: slice) -> torch.Tensor:
        _, stop, _ = place.indices(self._flat.numel())
        self._copies.wait(self._number, stop)
        return self._flat[place]

    def whole(self) -> torch.Tensor:
        return self[: self._flat.numel()]


def _kept(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Copies on the same device, made after what it has been told to do; None if they took half of its free memory."""
    device, nbytes = tensors[0].device, sum(tensor.nbytes for tensor in tensors)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if 2 * nbytes > free:  # what training may need stays
        return None
    try:
        copies = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    except torch.cuda.OutOfMemoryError:
        return None
    torch._foreach_copy_(copies, list(tensors))
    return copies


def _chunks_of(flat: Sequence[torch.Tensor], nbytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cuts 1-D tensors into chunks of about `nbytes`: (place of the tensor, first element, one past the last) each."""
    chunk: list[tuple[int, int, int]] = []
    left = nbytes
    for place, tensor in enumerate(flat):
        start, size = 0, tensor.element_size()
        while start < tensor.numel():
            stop = min(tensor.numel(), start + max(1, left // size))
            chunk.append((place, start, stop))
            left -= (stop - start) * size
            start = stop
            if left < size:
                yield chunk
                chunk, left = [], nbytes
    if chunk:
        yield chunk


@torch.no_grad()
def sent(values: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each of some tensors on the CPU, on the device of the tensor `like` it, some of them at a time.

    What the caller's thread has the device do with one comes after its arrival. Its memory on the host may be
    overwritten as soon as it is yielded. A tensor whose counterpart is on the CPU is yielded itself.
    """
    group: list[int] = []
    nbytes = 0
    for number, (value, other) in enumerate(zip(values, like, strict=True)):
        if group and (nbytes + value.nbytes > SEND_BYTES or other.device != like[group[0]].device):
            yield from _sent_together([values[each] for each in group], like[group[0]].device)
            group, nbytes = [], 0
        group.append(number)
        nbytes += value.nbytes
    if group:
        yield from _sent_together([values[each] for each in group], like[group[0]].device)


def _sent_together(values: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    if device.type != "cuda":
        return [value.to(device) for value in values]
    with torch.cuda.device(device):
        compute, side = torch.cuda.current_stream(), _side_stream(device)
        with torch.cuda.stream(side):
            arrived = [value.to(device, non_blocking=True) for value in values]
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(side)
        event.synchronize()
        for tensor in arrived:
            tensor.record_stream(compute)
    return arrived


def copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()
