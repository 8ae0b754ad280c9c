"""Real processes that tell what they do as JSON lines: started, waited for with a deadline, never left behind."""

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

from tests.support.forking import FORKED, ForkedProcess

DEADLINE = 60.0
"""Seconds after which waiting for anything fails: generous, since the machines that run tests are slow and shared."""


class JsonProcess:
    """A child process. Use it as a context manager: at the end it is killed if it still runs.

    Args:
        arguments: the command; a leading "python" stands for the running interpreter.
        env: its environment; this process's own if not given.
    """

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.arguments = arguments
        self._process = _start(arguments, env)
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.seen: list[dict[str, Any]] = []
        self.other_lines: list[str] = []
        self._errors: list[str] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_events, self._read_errors)]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr(self) -> str:
        return "".join(self._errors)

    def poll(self) -> int | None:
        """Its exit code; None if it still runs."""
        return self._process.poll()

    def expect(self, event: str | None, timeout: float = DEADLINE) -> dict[str, Any]:
        """The next event of that name, None for without one; others before are passed over (they stay in `seen`)."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                found = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {event!r} within {timeout:g} s; {self._told()}") from None
            if found is None:
                raise AssertionError(f"ended without {event!r}; {self._told()}")
            self.seen.append(found)
            if found.get("event") == event:
                return found

    def wait(self, timeout: float = DEADLINE) -> int:
        """Its exit code; everything it printed is in `seen` then."""
        code = self._process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
            # To close a pipe that a thread reads would wait for that without end.
            assert not reader.is_alive(), f"it has ended, and another process holds its output open; {self._told()}"
        while not self._events.empty():
            if (event := self._events.get_nowait()) is not None:
                self.seen.append(event)
        return code

    def drain(self) -> None:
        """What it has told so far is in `seen`, without waiting."""
        while not self._events.empty():
            if (event := self._events.get_nowait()) is not None:
                self.seen.append(event)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.seen if event.get("event") == name]

    def send(self, line: str) -> None:
        """Writes a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _told(self) -> str:
        return (
            f"{' '.join(self.arguments)}\nevents: {self.seen}\nother output: {self.other_lines}\nstderr: {self.stderr}"
        )

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._events.put(json.loads(line))
            except json.JSONDecodeError:
                self.other_lines.append(line)
        self._events.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)


def _start(arguments: Sequence[str], env: Mapping[str, str] | None) -> subprocess.Popen[str] | ForkedProcess:
    match arguments:
        case ["python", "-m", module, *rest] if module in FORKED:
            return ForkedProcess(module, *rest, env=env)
        case ["python", *rest]:
            command = [sys.executable, *rest]
        case _:
            command = list(arguments)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=dict(env) if env else None)


def all_expect(processes: Sequence[JsonProcess], event: str, timeout: float = DEADLINE) -> list[dict[str, Any]]:
    return [process.expect(event, timeout) for process in processes]


def averaging_process(*arguments: str) -> JsonProcess:
    return JsonProcess("python", "-m", "averaging", *arguments, "--json")


def averaging_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`averaging …`, which tells no JSON, to its end. Not from several threads: all processes are of one list."""
    with JsonProcess("python", "-m", "averaging", *arguments) as process:
        code = process.wait()
        return subprocess.CompletedProcess(process.arguments, code, "".join(process.other_lines), process.stderr)


class Workers:
    """The processes of one test; the first one founds the run, the others join it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._join: list[str] = []
        self.endpoints: list[str] = []

    def start(self, *all_options: dict[str, Any]) -> list[JsonProcess]:
        """Starts one worker per options, the first before the others, and waits until all are ready."""
        workers = []
        for options in all_options:
            told = {"run_id": "run", "group_wait": 20.0, "stall_timeout": 5.0, "join": self._join} | options
            worker = JsonProcess("python", "-m", "tests.support.worker", json.dumps(told))
            workers.append(self._stack.enter_context(worker))
            if not self._join:
                self.endpoints.append(worker.expect("ready")["endpoint"])
                self._join = [self.endpoints[0]]
        for worker in workers[len(workers) - len(all_options) + (1 if not self.endpoints[1:] else 0) :]:
            if not any(event["event"] == "ready" for event in worker.seen):
                self.endpoints.append(worker.expect("ready")["endpoint"])
        return workers


def average(*processes: JsonProcess) -> list[dict[str, Any]]:
    """All average at once; their receipts."""
    for process in processes:
        process.send("average")
    return all_expect(processes, "receipt")
