"""A process of the benchmark of followers: the publisher, a follower, or an end of the HTTP or TCP baseline."""

import argparse
import asyncio
import functools
import http.server
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from averaging import WeightPublisher
from averaging.common import keep_freed_memory
from averaging.rpc import RpcServer, read_credentials
from averaging.weights.receiver import FollowerOptions, ModelReceiver
from benchmarks.workers import serve

LEARNING_RATE = 1e-6
TENSORS = 16
"""Equal tensors of the state, besides a small one that never changes."""


class Publisher:
    """Publishes bfloat16 weights of a float32 master copy."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._stack = AsyncExitStack()
        self._publisher = WeightPublisher()
        self._version = 0
        self._master: dict[str, torch.Tensor] = {}
        self._state: dict[str, torch.Tensor] = {}

    async def new(self, mib: int, tensors: int = TENSORS) -> dict[str, Any]:
        """New random weights in so many tensors, as a new publisher at a new port."""
        await self._stack.aclose()
        self._publisher = WeightPublisher(bases=1)
        server = RpcServer(f"{self._host}:0", [self._publisher], credentials=credentials(self._host), grace=0.0)
        endpoint = (await self._stack.enter_async_context(server)).endpoint
        count = (mib << 20) // 2 // tensors
        generator = torch.Generator().manual_seed(time.monotonic_ns())
        self._master = {f"layer{n}": 0.02 * torch.randn(count, generator=generator) for n in range(tensors)}
        self._convert()
        return {"endpoint": endpoint}

    async def step(self) -> None:
        """One step of Adam of the usual size, which moves each weight by about the learning rate."""
        for master in self._master.values():
            master.add_(torch.randn(len(master)).clamp_(-1, 1), alpha=LEARNING_RATE)
        self._convert()

    def _convert(self) -> None:
        self._state = {name: master.bfloat16() for name, master in self._master.items()}
        self._state["fixed"] = torch.arange(1000.0)

    async def publish(self) -> dict[str, Any]:
        before = self._publisher.bytes_sent
        self._version += 1
        began = time.monotonic()
        first = asyncio.create_task(self._first_byte(before))
        await self._publisher.publish(self._state, self._version)
        return {"began": began, "version": self._version, "sent": before, "first": await first}

    async def _first_byte(self, before: int) -> float:
        """The time at which weights begin to leave; 0 if nobody follows."""
        while self._publisher.followers and self._publisher.bytes_sent == before:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.0005)
        return time.monotonic() if self._publisher.followers else 0.0

    async def commits(self, seconds: float, interval: float) -> dict[str, Any]:
        """Publishes at an interval, each time another step. Returns when each version was published."""
        times: dict[str, float] = {}
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            began = loop.time()
            await self.step()
            self._version += 1
            times[str(self._version)] = time.monotonic()
            await self._publisher.publish(self._state, self._version)
            await asyncio.sleep(max(0.0, began + interval - loop.time()))
        return {"times": times}

    async def sent(self) -> dict[str, Any]:
        return {"sent": self._publisher.bytes_sent}


class Follower:
    """Receives and hands on, without a model."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._stack = AsyncExitStack()

    async def follow(self, endpoint: str) -> None:
        await self.leave()
        options = FollowerOptions(
            join=[endpoint],
            run_id="",
            listen=f"{self._host}:0",
            credentials=credentials(self._host),
            join_timeout=60.0,
            stall_timeout=60.0,
        )
        self._receiver = await self._stack.enter_async_context(ModelReceiver(options))

    async def has(self, version: int) -> dict[str, Any]:
        async with asyncio.timeout(200):
            await self._receiver.wait_newer(version - 1, None)
        return {"time": time.monotonic(), "received": self._receiver.bytes_received}

    async def watch(self, seconds: float) -> dict[str, Any]:
        """When each version was complete here, for some seconds."""
        held: dict[str, float] = {}
        version: int | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    await self._receiver.wait_newer(version, None)
                    newest = self._receiver.newest
                    version = None if newest is None else newest.manifest.version
                    held[str(version)] = time.monotonic()
        return {"held": held}

    async def leave(self) -> None:
        await self._stack.aclose()


class TcpServer:
    """Sends bytes over connections that have carried some before, and nothing since."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._connections: list[socket.socket] = []

    async def open(self, count: int) -> dict[str, Any]:
        self._server, self._count = socket.create_server((self._host, 0), backlog=count), count
        return {"port": self._server.getsockname()[1]}

    async def send(self, nbytes: int) -> dict[str, Any]:
        """Sends so many bytes over all connections together."""
        while len(self._connections) < self._count:
            self._connections.append((await asyncio.to_thread(self._server.accept))[0])
        began, share = time.monotonic(), nbytes // self._count
        await asyncio.gather(*(asyncio.to_thread(each.sendall, bytes(share)) for each in self._connections))
        return {"began": began}


class TcpClient:
    """Receives them."""

    def __init__(self, host: str) -> None:
        self._host = host

    async def open(self, host: str, port: int, count: int) -> None:
        self._connections = [socket.create_connection((host, port)) for _ in range(count)]

    async def receive(self, nbytes: int) -> dict[str, Any]:
        def take(connection: socket.socket) -> None:
            left, buffer = nbytes // len(self._connections), bytearray(1 << 20)
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

    async def write(self, mib: int) -> dict[str, Any]:
        count = (mib << 20) // 2 // TENSORS
        state = {f"layer{n}": (0.02 * torch.randn(count)).bfloat16() for n in range(TENSORS)}
        began = time.monotonic()
        save_file(state, Path(self._folder.name) / "now.safetensors")
        return {"began": began, "ended": time.monotonic(), "url": f"{self._url}/now.safetensors"}

    @property
    def _url(self) -> str:
        return f"http://{self._host}:{self._server.server_address[1]}"

    async def publish(self, mib: int, name: str) -> dict[str, Any]:
        """The same weights as a version in a folder of that name."""
        count = (mib << 20) // 2 // TENSORS
        state = {f"layer{n}": (0.02 * torch.randn(count)).bfloat16() for n in range(TENSORS)}
        began = time.monotonic()
        publisher = WeightPublisher(to=f"{self._folder.name}/{name}")
        await publisher.publish(state, 1)
        await asyncio.to_thread(publisher.close)  # until it is written
        return {"began": began, "ended": time.monotonic(), "url": f"{self._url}/{name}"}

    async def difference(self, steps: int = 40) -> dict[str, Any]:
        """The share of bfloat16 bytes that a step of AdamW has, whose gradients are noise, as most are in RL."""
        weights = torch.nn.Parameter(0.02 * torch.randn(1 << 21))
        optimizer, place = torch.optim.AdamW([weights], lr=LEARNING_RATE), f"{self._folder.name}/steps"
        publisher = WeightPublisher(to=place, dtype=torch.bfloat16)
        for step in range(steps):
            weights.grad = torch.randn_like(weights)
            optimizer.step()
            if step >= steps - 2:
                await publisher.publish({"w": weights.detach()}, step)
                await asyncio.to_thread(publisher.close)
        return {"share": sum(_sizes(place, "difference")) / (2 * weights.numel())}


def _sizes(place: str, kind: str) -> list[int]:
    return [each.stat().st_size for each in Path(place).glob(f"*.{kind}.*")]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        return


class HttpClient:
    """Downloads into memory, without a check."""

    def __init__(self, host: str) -> None:
        self._host = host

    async def get(self, url: str) -> dict[str, Any]:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def download() -> None:
            with direct.open(url) as reply:
                view, place = memoryview(bytearray(int(reply.headers["Content-Length"]))), 0
                while count := reply.readinto(view[place:]):
                    place += count

        await asyncio.to_thread(download)
        return {"time": time.monotonic()}


def credentials(host: str) -> Any:
    return read_credentials(insecure=not host.startswith("127."))


ROLES: dict[str, Any] = {
    "publisher": Publisher,
    "follower": Follower,
    "http-server": HttpServer,
    "http-client": HttpClient,
    "tcp-server": TcpServer,
    "tcp-client": TcpClient,
}


@asynccontextmanager
async def playing(role: str, host: str) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    yield ROLES[role](host), {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--host", default="127.0.0.1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    serve(playing(options.role, options.host))


if __name__ == "__main__":
    main()
