"""Tensors with names, on their way between two workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

import torch

from averaging.errors import (
    CallRefusedError,
    PeerUnreachableError,
    ProtocolViolationError,
    WorkerError,
    WorkerLostError,
)
from averaging.rpc import TENSOR_DTYPES, TensorReader, tensor_dtype_name, tensor_messages
from averaging.wire.workers_pb2 import NamedTensor

SILENCE_SECONDS = 60.0
"""A transfer without a message for this time has failed: its source hangs, or never gets the tensors itself."""

MIN_BYTES_PER_SECOND = 16 << 10
"""What a source must send once it has begun, on average over `SILENCE_SECONDS`: 128 kbit/s."""


class Pace:
    """The time that the source of a transfer may still take. Pure.

    The first message may take a whole window. From then on each window must bring as many bytes as the minimum rate
    demands. Windows count only seconds in which the receiver waits.

    Args:
        window: Seconds.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._enough = 0.0  # bytes until the next window begins; any message will do for the first
        self.waited = 0.0
        self.received = 0

    @property
    def left(self) -> float:
        """Seconds until the source is too slow, unless it sends more."""
        return self._window - self.waited

    def add(self, nbytes: int, seconds: float) -> None:
        """Counts a message, and the seconds that the receiver has waited for it."""
        self.waited += seconds
        self.received += nbytes
        if self.received >= self._enough:
            self._enough = MIN_BYTES_PER_SECOND * self._window
            self.waited, self.received = 0.0, 0

    def __str__(self) -> str:
        if not self.received:
            return f"sent no tensors for {self._window:g} s"
        return f"sent {self.received} bytes of tensors in {self._window:g} s; at least {self._enough:.0f} are expected"


async def send(tensors: Iterable[tuple[str, str, torch.Tensor]], compression: str) -> AsyncGenerator[NamedTensor, None]:
    """Yields the messages for (sample, name, tensor)."""
    for sample, key, tensor in tensors:
        first = True
        for message in tensor_messages(tensor, compression):
            if first:
                yield NamedTensor(id=sample, key=key, dtype=tensor_dtype_name(tensor.dtype), tensor=message)
            else:
                yield NamedTensor(tensor=message)
            first = False
            await asyncio.sleep(0)  # long transfers leave time for heartbeats


async def receive(
    source: str,
    messages: AsyncGenerator[NamedTensor, None],
    admit: Callable[[NamedTensor], None],
    silence: float = SILENCE_SECONDS,
) -> AsyncGenerator[tuple[str, str, torch.Tensor], None]:
    """Yields (sample, name, tensor) from the messages of a worker.

    Args:
        source: Name of the worker.
        messages: They are closed at the end.
        admit: Called with the first message of each tensor, before memory is taken for it; raises unless it is wanted.
        silence: Maximum seconds without a message. The source must also keep the minimum rate, see `Pace`.

    Raises:
        WorkerLostError: The worker cannot be reached, is silent for too long, or sends too slowly.
        WorkerError: The worker refuses.
        ProtocolViolationError: A message is malformed.
    """
    reader, pace = TensorReader(), Pace(silence)
    head = NamedTensor()
    async with aclosing(messages):
        while (message := await _next(source, messages, pace)) is not None:
            if reader.complete:
                if message.dtype not in TENSOR_DTYPES:
                    raise ProtocolViolationError(f"{source} sent a tensor of the unknown dtype {message.dtype!r:.100}")
                admit(message)
                head = NamedTensor(id=message.id, key=message.key, dtype=message.dtype)
            tensor = reader.read(message.tensor)
            if tensor is not None:
                yield head.id, head.key, tensor.to(TENSOR_DTYPES[head.dtype])
    if not reader.complete:
        raise ProtocolViolationError(f"{source} sent an incomplete tensor")


async def _next(source: str, messages: AsyncGenerator[NamedTensor, None], pace: Pace) -> NamedTensor | None:
    loop = asyncio.get_running_loop()
    since = loop.time()
    try:
        async with asyncio.timeout(pace.left):
            message = await anext(messages, None)
    except TimeoutError:
        raise WorkerLostError(source, f"{source} {pace}") from None
    except PeerUnreachableError as error:
        raise WorkerLostError(source, f"tensors of {source} cannot be fetched: {error}") from error
    except CallRefusedError as error:
        raise WorkerError(source, f"{source} gives no tensors: {error}") from error
    if message is not None:
        pace.add(message.ByteSize(), loop.time() - since)
    return message
