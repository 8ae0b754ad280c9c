"""The hook `param_realloc`: parameters on their way from one model to another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

import torch

from averaging.errors import ConfigError, ProtocolViolationError, TensorError, WorkerError
from averaging.wire.workers_pb2 import FetchParametersRequest, NamedTensor
from averaging.workers.methods import FETCH_PARAMETERS, Channels
from averaging.workers.payload import Realloc
from averaging.workers.samples import kind_of
from averaging.workers.tensor_stream import SILENCE_SECONDS, receive, send

MAX_PUBLISHED = 64
"""Pairs of models whose parameters can be under way at one worker."""


class ParameterExchange:
    """Copies of parameters that this worker has published, and the parameters that it takes from others.

    A copy is kept until all targets have taken it, or until the source publishes for the same target again. If the
    source waited for its targets instead, two workers that are source and target of each other would wait without end.
    """

    def __init__(self, worker: str, channels: Channels) -> None:
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
            WorkerLostError: The worker cannot be reached.
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
        return next((models for models, one in self._published.items() if one.transfer == transfer), None)


class _Published:
    def __init__(self, transfer: str, parameters: dict[str, torch.Tensor] | None, takers: int) -> None:
        self.transfer, self.parameters, self.takers = transfer, parameters, takers


def copy_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns copies on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in parameters.items()}


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
        source: Dtype and shape of the other one.

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
