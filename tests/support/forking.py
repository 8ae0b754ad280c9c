"""Workers forked from a process that has imported torch already, which alone takes a second and a half of CPU."""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

FORKED = {
    "averaging": "averaging.cli",
    "tests.support.worker": "tests.support.worker",
    "tests.support.trainer": "tests.support.trainer",
    "tests.feed.rank": "tests.feed.rank",
    "tests.synchronizer.worker": "tests.synchronizer.worker",
    "tests.weights.weights_worker": "tests.weights.weights_worker",
    "tests.support.site_worker": "tests.support.site_worker",
    "tests.workers.model_worker": "tests.workers.model_worker",
    "tests.weights.shard_worker": "tests.weights.shard_worker",
    "tests.monitor.monitored": "tests.monitor.monitored",
}
"""What is started so, and what of it is imported before: modules that start no thread when they are imported.

Not a process with loaders of data that is killed: its loaders would go on, and hold its output open.
"""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([*FORKED.values(), "torch._dynamo"])  # which an optimizer imports


class End:
    """An end of a pipe that travels with the request for a process, so that none stays here if that dies at once.

    A `DupFd` made before would be a copy that waits here to be fetched, and keeps whoever reads from the pipe waiting.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (DupFd(self._number),)


class ForkedProcess:
    """As far as it is used here, what `subprocess.Popen` is, for `python -m module arguments…`.

    Args:
        program: the module, the path of a script that ends in `.py`, or `-c` for the code in the first argument.
        arguments: of the program.
        env: its environment; this process's own if not given.
        directory: where it runs; that of the forkserver if not given.
    """

    def __init__(
        self, program: str, *arguments: str, env: Mapping[str, str] | None, directory: Path | None = None
    ) -> None:
        (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        ends = [End(end) for end in (stdin, stdout, stderr)]
        self._process = _CONTEXT.Process(
            target=_run, args=(ends, program, arguments, dict(env or os.environ), directory)
        )
        self._process.start()
        for end in (stdin, stdout, stderr):
            os.close(end)
        self.stdin = os.fdopen(to_stdin, "w")
        self.stdout, self.stderr = os.fdopen(from_stdout), os.fdopen(from_stderr)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended, and the fork server has reaped it already
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _same(end: Any) -> Any:
    return end


def _run(
    ends: list[Any], program: str, arguments: tuple[str, ...], env: dict[str, str], directory: Path | None
) -> None:
    for number, end in enumerate(ends):
        os.dup2(end.detach(), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(env)
    if directory:
        os.chdir(directory)
    sys.argv = [program, *arguments]
    if program == "-c":
        exec(arguments[0], {"__name__": "__main__"})
    elif program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        sys.modules.pop(program, None)  # it is run anew, what it imports is there
        runpy.run_module(program, run_name="__main__", alter_sys=True)
