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
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from averaging import WeightPublisher
from averaging.common import keep_freed_memory
from averaging.rpc import RpcServer
from averaging.weights.receiver import FollowerOptions, VersionReceiver

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

    async def new(self, mib: str) -> dict[str, Any]:
        """New random weights, as a new publisher at a new port."""
        await self._stack.aclose()
        self._publisher = WeightPublisher(bases=1)
        server = RpcServer(f"{self._host}:0", [self._publisher], credentials=credentials(self._host), grace=0.0)
        endpoint = (await self._stack.enter_async_context(server)).endpoint
        count = (int(mib) << 20) // 2 // TENSORS
        generator = torch.Generator().manual_seed(time.monotonic_ns())
        self._master = {f"layer{n}": 0.02 * torch.randn(count, generator=generator) for n in range(TENSORS)}
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
        await self._publisher.publish(self._state, self._version)
        return {"began": began, "ended": time.monotonic(), "version": self._version, "sent": before}

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
        self._tasks = await self._stack.enter_async_context(VersionReceiver(options))
        return {}

    async def bytes(self) -> dict[str, Any]:
        return {"received": self._tasks.bytes_received}

    async def has(self, version: str) -> dict[str, Any]:
        async with asyncio.timeout(200):
            await self._tasks.wait_newer(int(version) - 1, None)
        return {"time": time.monotonic(), "received": self._tasks.bytes_received}

    async def leave(self) -> dict[str, Any]:
        await self._stack.aclose()
        return {}


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


def credentials(host: str) -> Any:
    from averaging.rpc import read_credentials

    return read_credentials(insecure=not host.startswith("127."))


ROLES = {"publisher": Publisher, "follower": Follower, "http-server": HttpServer, "http-client": HttpClient}


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
