"""Worker processes of benchmarks: started, controlled line by line, and always ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).parent.parent

START_LIMIT, STEP_LIMIT, GRACE = 180.0, 240.0, 15.0
"""Seconds for a peer to start, to answer a command, and to end."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HIVEMIND_LOGLEVEL": "ERROR",
}


class WorkerError(Exception):
    """A worker did not answer."""


@dataclass(slots=True)
class Worker:
    """A peer's process."""

    process: asyncio.subprocess.Process
    errors: IO[bytes]
    started: dict[str, Any] = field(default_factory=dict)

    async def expect(self, event: str, limit: float) -> dict[str, Any]:
        """Returns the next answer, which must have that name."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(limit):
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise WorkerError(f"no {event!r} within {limit:g} s; {self._told()}") from None
        if not line:
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE):
                    await self.process.wait()
            killed = self.process.returncode == -signal.SIGKILL
            how = ", killed by the system, perhaps because memory ran out" if killed else ""
            raise WorkerError(f"ended without {event!r}{how}; {self._told()}")
        answer: dict[str, Any] = json.loads(line)
        if answer["event"] != event:
            raise WorkerError(f"answered {answer}, not {event!r}")
        return answer

    async def do(self, command: str, event: str) -> dict[str, Any]:
        """Sends a command; returns the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())
        return await self.expect(event, STEP_LIMIT)

    async def end(self) -> None:
        """Lets it end gracefully, then kills it and its descendants."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await self.process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()

    def _told(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return "it wrote:\n" + "\n".join(lines[-15:]) if lines else "it wrote nothing"


async def all_of(steps: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits all; returns their results, or raises the first failure after all have ended."""
    results = await asyncio.gather(*steps, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


class Crew:
    """Workers that end together, with a common environment."""

    def __init__(self, new_file: Callable[[], IO[bytes]], environment: Mapping[str, str]) -> None:
        self.workers: list[Worker] = []
        self._new_file, self._environment = new_file, environment

    async def start(self, *command: object) -> Worker:
        """Starts a process in the project's folder; returns when it has answered `started`."""
        errors = self._new_file()
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            cwd=ROOT,
            env=self._environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        worker = Worker(process, errors)
        self.workers.append(worker)
        worker.started = await worker.expect("started", START_LIMIT)
        return worker


@asynccontextmanager
async def crew(**environment: str) -> AsyncIterator[Crew]:
    """Yields an empty crew. All processes started inside have ended on exit."""
    with ExitStack() as files:
        started = Crew(lambda: files.enter_context(tempfile.TemporaryFile()), os.environ | ENVIRONMENT | environment)
        try:
            yield started
        finally:
            await asyncio.shield(asyncio.gather(*(worker.end() for worker in started.workers)))


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Runs processes without Ctrl+C, which a terminal sends to all of its processes: their parent ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
