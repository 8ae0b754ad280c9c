"""Signals: Ctrl+C, SIGTERM and SIGHUP end a command gracefully, as do those of a peer's `leave_on`.

A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from averaging.cli.failure import SIGNALLED, CommandError, Stopped

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
    from types import FrameType

    from averaging.cli.output import CommandOutput

T = TypeVar("T")

DEFAULTS: Mapping[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""The signals that end a command, with Python's default handlers."""


class Interrupted(KeyboardInterrupt):
    """Raised by a signal before the command has handlers of its own.

    It is a subclass, because a KeyboardInterrupt that has left an `exec`, such as those of dataclasses, makes
    `python -m` end by SIGINT regardless of the exit code.
    """


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


@contextmanager
def starting() -> Iterator[None]:
    """Converts a signal into `Stopped` while the command has no handlers of its own."""
    # SIGTERM needs a handler: the first process of a container ignores it by default.
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number, default in DEFAULTS.items() if signal.getsignal(number) is default]
    for number in ours:
        signal.signal(number, _interrupt)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise Stopped(interrupt.args[0] if isinstance(interrupt, Interrupted) else signal.SIGINT) from None
    finally:
        for number in ours:
            signal.signal(number, DEFAULTS[number])


class Stop:
    """The request of a signal to end the command.

    Attributes:
        number: number of the first signal; 0 before any.
        wait: callback of the first signal. If it returns True, the command will check `number` soon; else its task is
            cancelled. A second signal always cancels it.
    """

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self.number = 0
        self.wait: Callable[[], bool] = lambda: False

    def request(self, number: int) -> None:
        again, self.number = bool(self.number), self.number or number
        if again or not self.wait():
            self._task.cancel()


class ServedUntilStopped(Protocol):
    """What `serve` waits for."""

    async def wait(self) -> None:
        """Waits until the server ends. It ends only if it fails."""


def run(main: Callable[[Stop], Awaitable[T]], leave_on: Collection[str] = (), when: str = "") -> T:
    """Runs `main` on a new event loop. Signals, and those that `leave_on` names, cancel it, see `Stop`.

    Raises:
        Stopped: a signal cancelled it; `when` is what its message says then.
    """
    return asyncio.run(_run(main, leave_on, when))


def serve(report: CommandOutput, start: Callable[[AsyncExitStack], Awaitable[ServedUntilStopped]]) -> None:
    """Runs a server until a signal ends the command, which is no failure once the server is ready.

    Args:
        report: prints what happens.
        start: enters the server, and what it needs, says that it is ready, and returns it.

    Raises:
        CommandError: a signal came before.
    """
    ready = False

    async def main(_: Stop) -> None:
        nonlocal ready
        async with AsyncExitStack() as stack:
            server = await start(stack)
            ready = True
            await server.wait()

    try:
        run(main)
    except Stopped as stop:
        if not ready:
            raise CommandError("stopped during the start", SIGNALLED + stop.number) from None
    report.emit({"event": "done"}, "stopped")


async def _run(main: Callable[[Stop], Awaitable[T]], leave_on: Collection[str], when: str) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None:
        raise RuntimeError("not in a task")
    further = {signal.Signals[name] for name in leave_on}
    stop, numbers = Stop(task), [*DEFAULTS, *sorted(further - DEFAULTS.keys() - {signal.SIGHUP})]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored
        numbers.append(signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers if number != signal.SIGINT}
    for number in numbers:
        loop.add_signal_handler(number, stop.request, number)
    try:
        return await main(stop)
    except asyncio.CancelledError:
        if not stop.number:
            raise
        raise Stopped(stop.number, when) from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        for number, handler in before.items():  # asyncio restores the default, which has another exit code
            signal.signal(number, handler)
