"""SIGINT and SIGTERM end a command in order, and a second one at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

from averaging.cli.error_reporting import DEFAULTS, Stopped, interrupted

T = TypeVar("T")


class Stop:
    """Whether a signal has asked the command to end.

    Attributes:
        number: of the first signal; 0 if there was none.
        wait: asked when the first signal comes; True = the command looks at `number` by itself soon, False = whatever
            it is waiting for is cancelled. A second signal cancels in any case.
    """

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self.number = 0
        self.wait: Callable[[], bool] = lambda: False

    def request(self, number: int) -> None:
        """Takes a signal."""
        again, self.number = bool(self.number), self.number or number
        if again or not self.wait():
            self._task.cancel()


def run(main: Callable[[Stop], Awaitable[T]]) -> T:
    """Runs `main` on an event loop of its own; it is cancelled by signals as `Stop` says.

    Raises:
        Stopped: it was.
    """
    return asyncio.run(_run(main))


async def _run(main: Callable[[Stop], Awaitable[T]]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None:
        raise RuntimeError("not in a task")
    if interrupted():
        raise KeyboardInterrupt
    stop, before = Stop(task), signal.getsignal(signal.SIGTERM)
    for number in DEFAULTS:
        loop.add_signal_handler(number, stop.request, number)
    try:
        return await main(stop)
    except asyncio.CancelledError:
        if not stop.number:
            raise
        raise Stopped(stop.number) from None
    finally:
        for number in DEFAULTS:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGTERM, before)  # asyncio leaves the default, with an exit code of its own
