"""A thread for the methods of backends, which block."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

_Job: TypeAlias = "tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]"


class Computations:
    """Runs functions one after the other, in a thread or in the event loop.

    Args:
        inline: Runs them in the event loop, for simulations on virtual time.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self._inline = inline
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        """Starts a thread that calls `work`."""
        if not self._inline:
            self._thread = threading.Thread(target=self.work, name=name, daemon=True)
            self._thread.start()

    def work(self) -> None:
        """Runs functions in the calling thread until `end`."""
        while (job := self._jobs.get()) is not None:
            action, loop, done = job
            result, error = None, None
            try:
                result = action()
            except Exception as failed:
                error = failed
            loop.call_soon_threadsafe(_finish, done, result, error)
            del job, action, loop, done, result, error  # the last result would stay in memory until the next job

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function, or a coroutine function in the event loop, and returns its result."""
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        if self._inline:
            return function(*args)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((lambda: function(*args), loop, done))
        return await done

    async def close(self) -> None:
        """Ends `work` after the function in progress, and waits for the thread if there is one."""
        self._jobs.put(None)
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.join)


def _finish(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
