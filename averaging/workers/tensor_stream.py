"""Tensors with names, on their way between two workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
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
    source: str, messages: AsyncGenerator[NamedTensor, None], silence: float = SILENCE_SECONDS
) -> AsyncGenerator[tuple[str, str, torch.Tensor], None]:
    """Yields (sample, name, tensor) from the messages of a worker.

    Args:
        source: Name of the worker.
        messages: They are closed at the end.
        silence: Maximum seconds without a message.

    Raises:
        WorkerLostError: The worker cannot be reached, or is silent for too long.
        WorkerError: The worker refuses.
        ProtocolViolationError: A message is malformed.
    """
    reader = TensorReader()
    head = NamedTensor()
    async with aclosing(messages):
        while True:
            try:
                async with asyncio.timeout(silence):
                    message = await anext(messages, None)
            except TimeoutError:
                raise WorkerLostError(source, f"{source} sent no tensors for {silence:g} s") from None
            except PeerUnreachableError as error:
                raise WorkerLostError(source, f"tensors of {source} cannot be fetched: {error}") from error
            except CallRefusedError as error:
                raise WorkerError(source, f"{source} gives no tensors: {error}") from error
            if message is None:
                break
            if reader.complete:
                head = NamedTensor(id=message.id, key=message.key, dtype=message.dtype)
            tensor = reader.read(message.tensor)
            if tensor is not None:
                dtype = TENSOR_DTYPES.get(head.dtype)
                if dtype is None:
                    raise ProtocolViolationError(f"{source} sent a tensor of the unknown dtype {head.dtype!r}")
                yield head.id, head.key, tensor.to(dtype)
    if not reader.complete:
        raise ProtocolViolationError(f"{source} sent an incomplete tensor")
