"""A minimal butterfly all-reduce over gRPC: the cost of the messages themselves.

Parts of 1 MiB are sent to their reducers in one stream each, summed in place and sent back, a few of them in flight.
Nothing is checked, no peer may fail or be late, and the members are fixed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import struct
import time
import warnings
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import torch
import torch.distributed

from benchmarks.allreduce.shapes import shapes

PART = 1 << 18
"""Elements per part."""

AHEAD = 4
"""Parts in flight per stream."""

METHOD = "/benchmarks.Bare/Exchange"

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.lookahead_bytes", 64 << 20),
    ("grpc.http2.bdp_probe", 0),
]


@dataclass(slots=True)
class _Round:
    """A reducer's view of its parts in one round."""

    left: list[int]
    ready: list[asyncio.Event]
    averages: dict[int, bytes] = field(default_factory=dict)
    senders: int = 0


class Bare:
    """The minimal all-reduce. Its peers meet through a file, as Gloo's do."""

    packages = ("grpcio",)

    def __init__(self, options: argparse.Namespace) -> None:
        self.tensors = [torch.empty(shape) for shape in shapes(options.tensors, options.kib)]
        self._rank, self._count, self.address = options.rank, options.peers, options.join
        parts = [part for tensor in self.tensors for part in torch.split(tensor.view(-1), PART)]
        bounds = [rank * len(parts) // self._count for rank in range(self._count + 1)]
        self._shards = [parts[start:stop] for start, stop in pairwise(bounds)]
        self._rounds: dict[int, _Round] = defaultdict(self._new_round)
        self._number = 0

    def _new_round(self) -> _Round:
        count = len(self._shards[self._rank])
        return _Round([self._count - 1] * count, [asyncio.Event() for _ in range(count)])

    async def __aenter__(self) -> Self:
        # before the import, as in averaging.transport.grpc
        os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
        import grpc

        from averaging.common.malloc import keep_freed_memory

        keep_freed_memory()
        handler: Any = grpc.stream_stream_rpc_method_handler(self._serve)
        service, _, method = METHOD[1:].partition("/")
        self._server = grpc.aio.server(options=OPTIONS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._store: Any = torch.distributed.FileStore(self.address.removeprefix("file://"), self._count)  # type: ignore[attr-defined]
        self._store.set(str(self._rank), str(port))
        self._channels: dict[int, Any] = {}
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop(0)
        for channel in self._channels.values():
            await channel.close()

    def writing(self) -> AbstractContextManager[object]:
        return nullcontext()

    async def average(self) -> float:
        import grpc

        if not self._channels:
            others = [rank for rank in range(self._count) if rank != self._rank]
            ports = {rank: (await asyncio.to_thread(self._store.get, str(rank))).decode() for rank in others}
            for rank, port in ports.items():
                self._channels[rank] = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
        begun = time.perf_counter()
        await asyncio.gather(*(self._exchange(rank) for rank in self._channels))
        self._number += 1
        return time.perf_counter() - begun

    async def _exchange(self, rank: int) -> None:
        shard, room = self._shards[rank], asyncio.Semaphore(AHEAD)

        async def parts() -> AsyncIterator[bytes]:
            for part in shard:
                await room.acquire()
                yield b"".join((struct.pack("<I", self._number), part.numpy().data))

        received = 0
        call: Any = self._channels[rank].stream_stream(METHOD)(parts())
        async for message in call:
            room.release()
            shard[received].copy_(_values(message, 0))
            received += 1

    async def _serve(self, messages: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        first = await anext(messages)
        (number,) = struct.unpack_from("<I", first)
        this_round = self._rounds[number]
        reading = asyncio.create_task(self._read(this_round, first, messages))
        for place, ready in enumerate(this_round.ready):
            await ready.wait()
            yield this_round.averages[place]
        await reading
        this_round.senders += 1
        if this_round.senders == self._count - 1:
            del self._rounds[number]

    async def _read(self, this_round: _Round, first: bytes, messages: AsyncIterator[bytes]) -> None:
        self._add(this_round, 0, first)
        place = 1
        async for message in messages:
            self._add(this_round, place, message)
            place += 1

    def _add(self, this_round: _Round, place: int, message: bytes) -> None:
        part = self._shards[self._rank][place]
        part.add_(_values(message, 4))
        this_round.left[place] -= 1
        if not this_round.left[place]:
            part.div_(self._count)
            this_round.averages[place] = part.numpy().tobytes()
            this_round.ready[place].set()


def _values(message: bytes, offset: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that the buffer is not writable
        return torch.frombuffer(message, dtype=torch.float32, offset=offset)
