"""Throughput of a feed server, compared with the server of atroposlib.

`python -m benchmarks.feed --atropos .venv-feed/bin/python` starts each server in turn, with N environments that post
groups and one trainer that fetches batches, all in one process beside the server. As in atroposlib, an environment
opens a connection for each post, and does not post while enough batches wait.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import math
import os
import random
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from benchmarks.runner import make_folder, make_parser, markdown, write
from examples.children import ending_children

BATCH_SIZE, GROUP_SIZE, TOKENS, MAX_WAITING = 64, 8, 512, 4
"""Sequences of a batch and of a group, tokens of a sequence, and batches in the queue while environments post."""

WARM_UP = 2.0

REGISTRATION = {
    "wandb_group": "benchmark",
    "wandb_project": "benchmark",
    "batch_size": BATCH_SIZE,
    "max_token_len": 2 * TOKENS,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 1,
    "starting_step": 0,
    "num_steps": 1 << 40,
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Throughput and CPU time of one server in one run."""

    system: str
    environments: int
    batches_per_second: float
    sequences_per_second: float
    cpu_ms_per_sequence: float


class Client:
    """A minimal HTTP client on one connection, so that the server dominates the measurement."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Client:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def call(self, method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
        """Sends a request. Returns the body of the reply, which may be compressed."""
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        self._writer.write(head.encode() + body)
        head_of_reply = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        assert head_of_reply.startswith(b"http/1.1 200"), head_of_reply
        length = int(head_of_reply.partition(b"content-length:")[2].partition(b"\r\n")[0])
        return await self._reader.readexactly(length)


def a_group(env_id: int, rng: random.Random) -> bytes:
    """Returns a compressed group."""
    tokens = [[rng.randrange(32_000) for _ in range(TOKENS)] for _ in range(GROUP_SIZE)]
    masks = [[-100] * (TOKENS // 4) + sequence[TOKENS // 4 :] for sequence in tokens]
    logprobs = [[1.0] * (TOKENS // 4) + [-rng.random() for _ in range(TOKENS * 3 // 4)] for _ in tokens]
    scores = [rng.random() for _ in tokens]
    group = {"tokens": tokens, "masks": masks, "scores": scores, "inference_logprobs": logprobs, "env_id": env_id}
    return gzip.compress(json.dumps(group).encode())


async def measure(system: str, port: int, server: psutil.Process, environments: int, seconds: float) -> Figures:
    """Measures the server on `port` with environments and a trainer."""
    rng = random.Random(0)
    room = asyncio.Semaphore(MAX_WAITING * BATCH_SIZE // GROUP_SIZE)
    json_body = "Content-Type: application/json\r\n"
    env = {"max_token_length": 2 * TOKENS, "desired_name": "e", "weight": 1.0, "group_size": GROUP_SIZE}

    async def environment(body: bytes) -> None:
        while time.monotonic() < ends:
            await room.acquire()
            async with Client(port) as client:
                await client.call("POST", "/scored_data", body, f"{json_body}Content-Encoding: gzip\r\n")

    async with Client(port) as trainer:
        await trainer.call("POST", "/register", json.dumps(REGISTRATION).encode(), json_body)
        await trainer.call("GET", "/batch")
        bodies = []
        for _ in range(environments):
            reply = await trainer.call("POST", "/register-env", json.dumps(env).encode(), json_body)
            bodies.append(a_group(json.loads(reply)["env_id"], rng))
        batches, counting, cpu = 0, time.monotonic() + WARM_UP, 0.0
        ends = counting + seconds
        async with asyncio.TaskGroup() as tasks:
            for body in bodies:
                tasks.create_task(environment(body))
            while (now := time.monotonic()) < ends:
                reply = await trainer.call("GET", "/batch", headers="Accept-Encoding: gzip\r\n")
                if len(reply) < 100:
                    await asyncio.sleep(0.002)
                    continue
                if now >= counting:
                    batches += 1
                    cpu = cpu or sum(server.cpu_times()[:2])
                for _ in range(BATCH_SIZE // GROUP_SIZE):
                    room.release()
            took, cpu = time.monotonic() - counting, sum(server.cpu_times()[:2]) - cpu
            for _ in bodies:
                room.release()
    sequences = batches * BATCH_SIZE
    return Figures(system, environments, batches / took, sequences / took, 1000 * cpu / max(1, sequences))


@asynccontextmanager
async def serving(command: list[str], port: int) -> AsyncIterator[psutil.Process]:
    """Runs a server in a separate process. Yields it after its first answer."""
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet, env=dict(os.environ))
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    async with Client(port) as client:
                        await client.call("GET", "/info")
                    break
                except (OSError, asyncio.IncompleteReadError):
                    await asyncio.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        await process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def commands(atropos: str | None, folder: str, port: int) -> dict[str, list[str]]:
    """Returns the command that starts each server."""
    ours = [sys.executable, "-m", "averaging", "feed", "--listen", f"127.0.0.1:{port}", "--store"]
    found = {
        "averaging feed": [*ours, f"{folder}/{port}.sqlite"],
        "averaging feed --fsync": [*ours, f"{folder}/{port}.sqlite", "--fsync"],
    }
    if atropos:
        found["run-api"] = [atropos, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)]
    return found


def table(results: list[Figures]) -> str:
    """Returns the medians and their ratio to those of run-api as Markdown."""
    header = ("environments", "server", "batches/s", "sequences/s", "of run-api", "CPU ms per sequence")
    rows = []
    medians: dict[tuple[int, str], tuple[float, float]] = {}
    for each in results:
        runs = [r for r in results if (r.environments, r.system) == (each.environments, each.system)]
        medians[each.environments, each.system] = (
            statistics.median(run.batches_per_second for run in runs),
            statistics.median(run.cpu_ms_per_sequence for run in runs),
        )
    for (environments, system), (batches, cpu) in medians.items():
        base = medians.get((environments, "run-api"))
        ratio = f"{batches / base[0]:.1f} ×" if base else "-"
        rows.append((f"{environments}", system, f"{batches:.1f}", f"{batches * BATCH_SIZE:.0f}", ratio, f"{cpu:.2f}"))
    return markdown(header, rows)


async def run(arguments: argparse.Namespace) -> list[Figures]:
    results = []
    with tempfile.TemporaryDirectory(dir=arguments.output) as folder:
        for environments in arguments.environments:
            for _ in range(arguments.repeats):
                for system in commands(arguments.atropos, folder, 0):
                    port = free_port()
                    async with serving(commands(arguments.atropos, folder, port)[system], port) as server:
                        results.append(await measure(system, port, server, environments, arguments.seconds))
                    print(json.dumps(asdict(results[-1])), flush=True)
    return results


@ending_children()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--environments", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=10.0, help="of the measurement, after 2 s of warm-up")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each server, in turn; the table shows medians")
    parser.add_argument("--atropos", help="a Python with atroposlib; `make .venv-feed/installed` creates one")
    arguments = parser.parse_args()
    if min(*arguments.environments, arguments.repeats) < 1:
        parser.error("needs at least 1 environment and 1 repeat")
    if not 0 < arguments.seconds < math.inf:
        parser.error("needs --seconds above 0")
    if arguments.atropos and not shutil.which(arguments.atropos):
        parser.error(f"--atropos {arguments.atropos}: there is no such program")
    make_folder(parser, arguments.output)
    results: list[Any] = asyncio.run(run(arguments))
    write(arguments.output / "feed.json", [asdict(each) for each in results])
    print(table(results))


if __name__ == "__main__":
    main()
