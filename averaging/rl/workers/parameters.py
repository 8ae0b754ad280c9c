"""The hook `param_realloc`: parameters on their way from one model to another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing

import torch

from averaging.errors import (
    CallRefusedError,
    ConfigError,
    PeerUnreachableError,
    ProtocolViolationError,
    TensorError,
    WorkerError,
)
from averaging.rl.workers.backend import kind_of
from averaging.rl.workers.payload import FETCH_PARAMETERS, Realloc, WorkerChannels
from averaging.rpc import TensorReader, tensor_messages
from averaging.tensors import STATE_DTYPES, copy_to_cpu, dtype_name
from averaging.wire.workers_pb2 import FetchParametersRequest, NamedTensor

# Tensors with names, on their way between two workers.


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
                yield NamedTensor(id=sample, key=key, dtype=dtype_name(tensor.dtype), tensor=message)
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
        messages: The messages, which are closed at the end.
        admit: Function that gets the first message of each tensor before memory is taken for it, and raises if the
            tensor was not requested.
        silence: Maximum seconds without a message. The source must also keep the minimum rate, see `Pace`.

    Raises:
        WorkerError: The worker cannot be reached, is silent for too long, or sends too slowly.
        WorkerError: The worker refuses.
        ProtocolViolationError: A message is malformed.
    """
    reader, pace = TensorReader(), Pace(silence)
    head = NamedTensor()
    async with aclosing(messages):
        while (message := await _next(source, messages, pace)) is not None:
            if reader.complete:
                if message.dtype not in STATE_DTYPES:
                    raise ProtocolViolationError(f"sent a tensor of the unknown dtype {message.dtype!r:.100}", source)
                admit(message)
                head = NamedTensor(id=message.id, key=message.key, dtype=message.dtype)
            tensor = reader.read(message.tensor)
            if tensor is not None:
                yield head.id, head.key, tensor.to(STATE_DTYPES[head.dtype])
    if not reader.complete:
        raise ProtocolViolationError("sent an incomplete tensor", source)


async def _next(source: str, messages: AsyncGenerator[NamedTensor, None], pace: Pace) -> NamedTensor | None:
    loop = asyncio.get_running_loop()
    since = loop.time()
    try:
        async with asyncio.timeout(pace.left):
            message = await anext(messages, None)
    except TimeoutError:
        raise WorkerError(source, f"{source} {pace}", lost=True) from None
    except PeerUnreachableError as error:
        raise WorkerError(source, f"tensors of {source} cannot be fetched: {error}", lost=True) from error
    except CallRefusedError as error:
        raise WorkerError(source, f"{source} gives no tensors: {error}") from error
    if message is not None:
        pace.add(message.ByteSize(), loop.time() - since)
    return message


MAX_PUBLISHED = 64
"""Pairs of models whose parameters can be under way at one worker."""


class ParameterExchange:
    """Copies of parameters that this worker has published, and the parameters that it takes from others.

    A copy is kept until all targets have taken it, or until the source publishes for the same target again. If the
    source waited for its targets instead, two workers that are source and target of each other would wait without end.
    """

    def __init__(self, worker: str, channels: WorkerChannels) -> None:
        self.endpoints: Mapping[str, str] = {}
        self._worker = worker
        self._channels = channels
        self._published: dict[tuple[str, str], _Published] = {}  # by source and target
        self._changed = asyncio.Event()

    def publish(self, realloc: Realloc, copy: dict[str, torch.Tensor] | None) -> None:
        """Keeps a copy of parameters for its takers; None says that the source has failed.

        Raises:
            ConfigError: Too many copies wait for their takers.
        """
        models = realloc.source, realloc.target
        if copy is not None and models not in self._published and len(self._published) >= MAX_PUBLISHED:
            raise ConfigError(f"{self._worker} holds parameters for {MAX_PUBLISHED} models that have not taken them")
        if realloc.takers > 0:
            self._published[models] = _Published(realloc.transfer, copy, realloc.takers)
        self._changed.set()
        self._changed = asyncio.Event()

    async def take(self, realloc: Realloc, target: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the parameters that the origin of a transfer, perhaps this worker, publishes.

        Args:
            realloc: The side of the target.
            target: The parameters that they are for; others are refused before memory is taken for them.

        Raises:
            WorkerError: The worker cannot be reached.
            WorkerError: The worker is unknown, or does not publish them in time.
            ProtocolViolationError: It sent something malformed.
            TensorError: It sent other parameters than the target has.
        """
        origin, transfer = realloc.origin, realloc.transfer
        if origin == self._worker:
            return await self._get(transfer)
        if origin not in self.endpoints:
            raise WorkerError(origin, f"{self._worker} is to get parameters of {origin!r}, which is not in its plan")
        request = FetchParametersRequest(caller=self._worker, transfer=transfer)
        left = dict(target)

        def admit(head: NamedTensor) -> None:
            if head.key not in left and head.key in target:
                raise ProtocolViolationError(f"{origin} sent the parameter {head.key!r} twice")
            check_alike(realloc.target, head.key, left.pop(head.key, None), (head.dtype, head.tensor.size))

        messages = self._channels[self.endpoints[origin]].stream(FETCH_PARAMETERS, request)
        async with aclosing(receive(origin, messages, admit)) as tensors:
            return {name: tensor async for _, name, tensor in tensors}

    async def serve(self, request: FetchParametersRequest) -> AsyncGenerator[NamedTensor, None]:
        """Answers `fetch_parameters`: waits until they are published, and sends them without compression."""
        tensors = [("", name, tensor) for name, tensor in (await self._get(request.transfer)).items()]
        async with aclosing(send(tensors, "none")) as messages:
            async for message in messages:
                yield message

    async def _get(self, transfer: str) -> dict[str, torch.Tensor]:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                while (models := self._models_of(transfer)) is None:
                    await self._changed.wait()
        except TimeoutError:
            raise WorkerError(
                self._worker, f"{self._worker} has published no parameters for the transfer {transfer:.200}"
            ) from None
        published = self._published[models]
        published.takers -= 1
        if published.takers <= 0:
            del self._published[models]
        if published.parameters is None:
            raise WorkerError(self._worker, f"{self._worker} has failed and gives no parameters")
        return published.parameters

    def _models_of(self, transfer: str) -> tuple[str, str] | None:
        return next((models for models, copy in self._published.items() if copy.transfer == transfer), None)


class _Published:
    def __init__(self, transfer: str, parameters: dict[str, torch.Tensor] | None, takers: int) -> None:
        self.transfer, self.parameters, self.takers = transfer, parameters, takers


def copy_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns copies on the CPU."""
    return {name: copy_to_cpu(tensor) for name, tensor in parameters.items()}


def blend(target: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor], eta: float, model: str) -> None:
    """Sets target = eta · source + (1 - eta) · target, in place. Tensors of integers are copied unless eta is 0.

    Raises:
        TensorError: The two have different names, shapes or dtypes. Nothing is changed then.
    """
    if target.keys() != source.keys():
        check_alike(model, min(target.keys() ^ source.keys()), None, ("", ()))
    for name, tensor in target.items():
        check_alike(model, name, tensor, kind_of(source[name]))
    with torch.no_grad():
        for name, tensor in target.items():
            new = source[name].to(tensor.device)
            if eta == 1.0 or not tensor.is_floating_point():
                if eta > 0.0:
                    tensor.copy_(new)
            else:
                tensor.mul_(1.0 - eta).add_(new, alpha=eta)


def check_alike(model: str, name: str, target: torch.Tensor | None, source: tuple[str, Sequence[int]]) -> None:
    """Checks one parameter against that of the target.

    Args:
        model: Name of the target.
        name: Name of the parameter.
        target: The target's parameter; None if it has none of this name.
        source: Dtype and shape of the source's parameter.

    Raises:
        TensorError: They differ.
    """
    if target is None:
        raise TensorError(f"param_realloc to {model!r}: only one of the two models has the parameter {name!r:.200}")
    dtype, shape = kind_of(target)
    if (dtype, list(shape)) != (source[0], list(source[1])):
        raise TensorError(
            f"param_realloc to {model!r}: {name!r} is torch.{source[0]}{list(source[1])} at the source and "
            f"torch.{dtype}{list(shape)} at the target"
        )
