"""Processes of benchmarks: started, told what to do line by line, and always ended. Both sides are here.

A command is a line of JSON such as {"do": "average"} with arguments. The process calls the method of that name and
answers with what it returns, as {"event": "average"} with values. It ends at the end of stdin. Imports nothing that
hivemind's environment does not have.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).parent.parent

START_LIMIT, STEP_LIMIT, GRACE = 180.0, 240.0, 15.0
"""Seconds for a process to start, to answer a command, and to end."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HIVEMIND_LOGLEVEL": "ERROR"}


class WorkerError(Exception):
    """A process did not answer."""


@dataclass(slots=True)
class Worker:
    """A process, and what it answered when it had started."""

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

    async def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command; returns the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        return await self.expect(command, STEP_LIMIT)

    async def kill(self) -> None:
        """Ends it and its descendants at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()

    async def end(self) -> None:
        """Lets it end gracefully, then kills it and its descendants."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await self.process.wait()
        await self.kill()

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


async def tell_all(workers: Sequence[Worker], command: str, **arguments: Any) -> list[dict[str, Any]]:
    """Sends a command to all; returns their answers."""
    return await all_of([worker.do(command, **arguments) for worker in workers])


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


def serve(role: AbstractAsyncContextManager[tuple[Any, dict[str, Any]]]) -> None:
    """The worker's side: enters the role, which yields an object and what to answer at the start, and obeys."""
    # Only answers may be on stdout; libraries may print there, too.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(_serve(role, out))


async def _serve(role: AbstractAsyncContextManager[tuple[Any, dict[str, Any]]], out: TextIO) -> None:
    def answer(event: str, values: Mapping[str, Any]) -> None:
        print(json.dumps({"event": event, **values}), file=out, flush=True)

    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    async with role as (known, started):
        answer("started", started)
        async for line in commands:
            arguments = json.loads(line)
            command = arguments.pop("do")
            answer(command, await getattr(known, command)(**arguments) or {})
