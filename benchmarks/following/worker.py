"""A process of the benchmark of followers: the publisher, a follower, or the server or client of the HTTP baseline.

Each line on stdin is a method of the role and its arguments. The answer is one JSON line of the same name.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import http.server
import json
import os
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from averaging import WeightPublisher
from averaging.common import keep_freed_memory
from averaging.rpc import RpcServer
from averaging.weights.receiver import FollowerOptions, ModelReceiver

LEARNING_RATE = 1e-6
TENSORS = 16
"""Equal tensors of the state, besides a small one that never changes."""

Command = Callable[..., Awaitable[dict[str, Any]]]


class Publisher:
    """Publishes bfloat16 weights of a float32 master copy."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._stack = AsyncExitStack()
        self._publisher = WeightPublisher()
        self._version = 0
        self._master: dict[str, torch.Tensor] = {}
        self._state: dict[str, torch.Tensor] = {}

    async def new(self, mib: str, tensors: str = str(TENSORS)) -> dict[str, Any]:
        """New random weights in so many tensors, as a new publisher at a new port."""
        await self._stack.aclose()
        self._master, self._state = {}, {}
        self._publisher = WeightPublisher(bases=1)
        server = RpcServer(f"{self._host}:0", [self._publisher], credentials=credentials(self._host), grace=0.0)
        endpoint = (await self._stack.enter_async_context(server)).endpoint
        count = (int(mib) << 20) // 2 // int(tensors)
        generator = torch.Generator().manual_seed(time.monotonic_ns())
        self._master = {f"layer{n}": 0.02 * torch.randn(count, generator=generator) for n in range(int(tensors))}
        self._convert()
        return {"endpoint": endpoint}

    async def step(self) -> dict[str, Any]:
        """One step of Adam of the usual size, which moves each weight by about the learning rate."""
        for master in self._master.values():
            master.add_(torch.randn(len(master)).clamp_(-1, 1), alpha=LEARNING_RATE)
        self._convert()
        return {}

    def _convert(self) -> None:
        self._state = {name: master.bfloat16() for name, master in self._master.items()}
        self._state["fixed"] = torch.arange(1000.0)

    async def publish(self) -> dict[str, Any]:
        before = self._publisher.bytes_sent
        self._version += 1
        began = time.monotonic()
        first = asyncio.create_task(self._first_byte(before))
        await self._publisher.publish(self._state, self._version)
        ended = time.monotonic()
        return {"began": began, "ended": ended, "version": self._version, "sent": before, "first": await first}

    async def _first_byte(self, before: int) -> float:
        """The time at which weights begin to leave; 0 if nobody follows."""
        while self._publisher.followers and self._publisher.bytes_sent == before:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.0005)
        return time.monotonic() if self._publisher.followers else 0.0

    async def commits(self, seconds: str, interval: str) -> dict[str, Any]:
        """Publishes at an interval, each time another step. Returns when each version was published, and the memory."""
        times: dict[str, float] = {}
        most, held, loop = 0.0, 0.0, asyncio.get_running_loop()
        end = loop.time() + float(seconds)
        while loop.time() < end:
            began = loop.time()
            await self.step()
            self._version += 1
            times[str(self._version)] = time.monotonic()
            await self._publisher.publish(self._state, self._version)
            most, held = max(most, resident_mib()), max(held, self._held_mib())
            await asyncio.sleep(max(0.0, began + float(interval) - loop.time()))
        return {"times": times, "resident_mib": most, "held_mib": held}

    def _held_mib(self) -> float:
        """Memory of all versions that the publisher keeps."""
        buffers = {id(each): len(each) for kept in self._publisher._store._kept for each in kept.buffers}
        return sum(buffers.values()) / (1 << 20)

    async def resident(self) -> dict[str, Any]:
        return {"resident_mib": resident_mib()}

    async def sent(self) -> dict[str, Any]:
        return {"sent": self._publisher.bytes_sent, "followers": self._publisher.followers}


class Follower:
    """Receives and hands on, without a model."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._stack = AsyncExitStack()

    async def follow(self, endpoint: str) -> dict[str, Any]:
        await self.leave()
        options = FollowerOptions(
            join=[endpoint],
            run_id="",
            listen=f"{self._host}:0",
            credentials=credentials(self._host),
            join_timeout=60.0,
            stall_timeout=60.0,
        )
        self._tasks = await self._stack.enter_async_context(ModelReceiver(options))
        return {}

    async def bytes(self) -> dict[str, Any]:
        return {"received": self._tasks.bytes_received}

    async def has(self, version: str) -> dict[str, Any]:
        async with asyncio.timeout(200):
            await self._tasks.wait_newer(int(version) - 1, None)
        return {"time": time.monotonic(), "received": self._tasks.bytes_received}

    async def watch(self, seconds: str) -> dict[str, Any]:
        """When each version was complete here, for some seconds."""
        held: dict[str, float] = {}
        version: int | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(float(seconds)):
                while True:
                    await self._tasks.wait_newer(version, None)
                    newest = self._tasks.newest
                    version = None if newest is None else newest.manifest.version
                    held[str(version)] = time.monotonic()
        return {"held": held, "retries": self._tasks.retries}

    async def leave(self) -> dict[str, Any]:
        await self._stack.aclose()
        return {}


class TcpServer:
    """Sends bytes over connections that have carried some before, and nothing since."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._connections: list[socket.socket] = []

    async def open(self, count: str) -> dict[str, Any]:
        self._server = socket.create_server((self._host, 0), backlog=int(count))
        self._accepting = threading.Thread(target=self._accept, args=(int(count),), daemon=True)
        self._accepting.start()
        return {"port": self._server.getsockname()[1]}

    def _accept(self, count: int) -> None:
        self._connections = [self._server.accept()[0] for _ in range(count)]

    async def send(self, nbytes: str) -> dict[str, Any]:
        """Sends so many bytes over all connections together."""
        await asyncio.to_thread(self._accepting.join)
        began, share = time.monotonic(), int(nbytes) // len(self._connections)
        await asyncio.gather(*(asyncio.to_thread(each.sendall, bytes(share)) for each in self._connections))
        return {"began": began}


class TcpClient:
    """Receives them."""

    def __init__(self, host: str) -> None:
        self._host = host

    async def open(self, host: str, port: str, count: str) -> dict[str, Any]:
        self._connections = [socket.create_connection((host, int(port))) for _ in range(int(count))]
        return {}

    async def receive(self, nbytes: str) -> dict[str, Any]:
        def take(connection: socket.socket) -> None:
            left, buffer = int(nbytes) // len(self._connections), bytearray(1 << 20)
            while left:
                left -= connection.recv_into(buffer, min(left, len(buffer)))

        await asyncio.gather(*(asyncio.to_thread(take, each) for each in self._connections))
        return {"time": time.monotonic()}


class HttpServer:
    """Python's own server of one safetensors file."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._folder = tempfile.TemporaryDirectory()
        handler = functools.partial(_Quiet, directory=self._folder.name)
        self._server = http.server.ThreadingHTTPServer((host, 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    async def write(self, mib: str) -> dict[str, Any]:
        count = (int(mib) << 20) // 2 // TENSORS
        state = {f"layer{n}": (0.02 * torch.randn(count)).bfloat16() for n in range(TENSORS)}
        began = time.monotonic()
        save_file(state, Path(self._folder.name) / "now.safetensors")
        port = self._server.server_address[1]
        return {"began": began, "ended": time.monotonic(), "url": f"http://{self._host}:{port}/now.safetensors"}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        return


class HttpClient:
    """Downloads into memory, without a check."""

    def __init__(self, host: str) -> None:
        self._host = host

    async def get(self, url: str) -> dict[str, Any]:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def download() -> int:
            with direct.open(url) as reply:
                content = bytearray(int(reply.headers["Content-Length"]))
                view, place = memoryview(content), 0
                while count := reply.readinto(view[place:]):
                    place += count
            return place

        received = await asyncio.to_thread(download)
        return {"time": time.monotonic(), "received": received}


def resident_mib() -> float:
    """Memory of this process that is its own, without shared libraries."""
    words = Path("/proc/self/statm").read_text().split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def credentials(host: str) -> Any:
    from averaging.rpc import read_credentials

    return read_credentials(insecure=not host.startswith("127."))


ROLES = {
    "publisher": Publisher,
    "follower": Follower,
    "http-server": HttpServer,
    "http-client": HttpClient,
    "tcp-server": TcpServer,
    "tcp-client": TcpClient,
}


async def work(role: Any, out: Any) -> None:
    def answer(event: str, values: dict[str, Any]) -> None:
        print(json.dumps({"event": event, **values}), file=out, flush=True)

    answer("started", {})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, *arguments = line.split()
        answer(command, await getattr(role, command)(*arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--host", default="127.0.0.1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    out = os.fdopen(os.dup(1), "w")  # only answers may be on stdout
    os.dup2(2, 1)
    asyncio.run(work(ROLES[options.role](options.host), out))


if __name__ == "__main__":
    main()
