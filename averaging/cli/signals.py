"""SIGINT, SIGTERM and SIGHUP end a command gracefully. A second signal ends it at once."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, TypeVar

from averaging.cli.error_reporting import DEFAULTS, Stopped, interrupted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


class Stop:
    """The request of a signal to end the command.

    Attributes:
        number: number of the first signal; 0 before any.
        wait: called at the first signal. True: the command will check `number` soon. False: its task is cancelled. A
            second signal always cancels it.
    """

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self.number = 0
        self.wait: Callable[[], bool] = lambda: False

    def request(self, number: int) -> None:
        """Handles a signal."""
        again, self.number = bool(self.number), self.number or number
        if again or not self.wait():
            self._task.cancel()


def run(main: Callable[[Stop], Awaitable[T]]) -> T:
    """Runs `main` on a new event loop. Signals cancel it, see `Stop`.

    Raises:
        Stopped: a signal cancelled it.
    """
    return asyncio.run(_run(main))


async def _run(main: Callable[[Stop], Awaitable[T]]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None:
        raise RuntimeError("not in a task")
    if interrupted():
        raise KeyboardInterrupt
    stop, numbers = Stop(task), list(DEFAULTS)
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
        raise Stopped(stop.number) from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        for number, handler in before.items():  # asyncio restores the default, which has another exit code
            signal.signal(number, handler)
