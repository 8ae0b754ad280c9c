"""A thread with an event loop, in which a peer lives while the training thread computes."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeVar

from averaging.errors import ClosedError
from averaging.training.signal_safe_future import SignalSafeFuture

logger = logging.getLogger("averaging.training")

T = TypeVar("T")

SIGNAL_PERIOD = 0.5
"""Seconds after which a waiting thread looks up: a signal that came just before a wait does not interrupt that wait."""


class _EventLoop(asyncio.SelectorEventLoop):
    """Ends its executor itself: asyncio starts a thread for that, which Python 3.12 refuses as the interpreter ends."""

    def __init__(self) -> None:
        super().__init__()
        self._executor = ThreadPoolExecutor()
        self.set_default_executor(self._executor)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._executor.shutdown()


class EventLoopThread:
    """A daemon thread whose event loop keeps one async context entered until `close`, or until the context fails.

    The constructor returns once the context is entered. At the end of the interpreter the thread is closed in order.

    The threads that call it share no lock with it: a signal's exception may come between any two instructions of
    theirs, and would leave it taken.

    Args:
        context: entered and left by the same task, so it may hold a TaskGroup: if that fails, the thread ends.
        name: of the thread, and of what the errors speak.

    Raises:
        Exception: whatever entering the context raises; there is no thread then.
    """

    def __init__(self, context: AbstractAsyncContextManager[object], name: str) -> None:
        self._context = context
        self._name = name
        self._pid = os.getpid()
        self._runner = asyncio.Runner(loop_factory=_EventLoop)
        self._loop = self._runner.get_loop()
        self._entered: SignalSafeFuture[None] = SignalSafeFuture()
        self._closing = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._calls: set[_Call] = set()  # of this thread alone
        self._ended = False  # from here on no call begins
        self._gone = False  # from here on no call ends
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        atexit.register(self.close)
        try:
            self._thread.start()
            self._wait_for(self._entered)
            self._entered.result()
        except BaseException:
            self.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs `coroutine` in the thread's loop and waits for it.

        Any exception in the waiting thread, such as a KeyboardInterrupt, cancels the coroutine, waits until it has
        ended, and is raised then.

        Raises:
            ClosedError: the thread was closed or its context failed, before or meanwhile; the failure is its cause.
            Exception: whatever the coroutine raises.
        """
        call = _Call(coroutine)
        try:
            self._submit(call)
            self._wait_for(call.result)
        except BaseException:
            self._give_up(call)
            raise
        result: T = call.result.result()
        return result

    def start(self, coroutine: Coroutine[Any, Any, T]) -> SignalSafeFuture[T]:
        """Runs `coroutine` in the thread's loop without waiting for it; at the end of the thread it is cancelled.

        Raises:
            ClosedError: as `run`; so does the future.
        """
        call = _Call(coroutine)
        try:
            self._submit(call)
        except BaseException:
            self._give_up(call)
            raise
        return call.result

    def wait(self, result: SignalSafeFuture[T]) -> T:
        """Waits for what `start` returned; a KeyboardInterrupt ends the wait and not what is waited for.

        Raises:
            ClosedError: the thread ended before the coroutine began, or this is a fork of its process.
            Exception: whatever the coroutine raises.
        """
        self._wait_for(result)
        return result.result()

    def check(self) -> None:
        """Whether the thread still lives.

        Raises:
            ClosedError: it does not.
        """
        if self._ended or self._elsewhere:
            raise self._not_running()

    def begin_to_close(self) -> None:
        """Begins what `close` does, without waiting for it."""
        if not self._elsewhere:
            self._schedule(self._stop)

    def close(self) -> None:
        """Cancels the calls in progress, leaves the context, and ends the thread; again, it does nothing."""
        if self._elsewhere:
            return
        self._schedule(self._stop)
        while self._thread.is_alive():
            self._thread.join(SIGNAL_PERIOD)
        atexit.unregister(self.close)

    @property
    def _elsewhere(self) -> bool:
        """Whether this is a forked copy of the process, in which the thread does not exist."""
        return os.getpid() != self._pid

    def _not_running(self) -> ClosedError:
        if self._elsewhere:
            return ClosedError(f"{self._name} lives in process {self._pid}; this fork of it cannot use it")
        if self._failure is None:
            return ClosedError(f"{self._name} has been closed")
        error = ClosedError(f"{self._name} has ended after {_first(self._failure)!r}; start a new one")
        error.__cause__ = self._failure
        return error

    def _submit(self, call: _Call) -> None:
        self.check()
        if not self._schedule(self._begin, call):
            raise self._not_running()

    def _schedule(self, callback: Callable[..., object], *args: object) -> bool:
        """Has the thread call it, unless its loop is closed."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():  # a signal's handler has raised it
                raise
            return False
        return True

    def _wait_for(self, result: SignalSafeFuture[Any]) -> None:
        while not result.done():
            if self._elsewhere:  # what was begun before the fork ends in the parent
                raise self._not_running()
            result.wait(SIGNAL_PERIOD)
            if self._gone and not result.done():
                raise self._not_running()

    def _give_up(self, call: _Call) -> None:
        """Nobody waits for the call any more: an exception came in between, no matter where."""
        if not self._elsewhere:
            with suppress(RuntimeError, ClosedError):
                self._loop.call_soon_threadsafe(self._cancel, call)
                self._wait_for(call.result)
        if not call.result.done():
            call.coroutine.close()

    # In the thread

    def _work(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._live())
        except BaseException as error:
            self._failure = error
            if self._entered.done():
                logger.error("%s has ended after an error", self._name, exc_info=error)
            else:
                self._entered.set_exception(error)
        for call in self._calls:
            if call.task is None:
                call.coroutine.close()
            call.result.set_exception(self._not_running())
        self._calls.clear()
        self._gone = True

    async def _live(self) -> None:
        try:
            self._life = asyncio.current_task()
            async with self._context:
                self._entered.set_result(None)
                try:
                    await self._closing.wait()
                finally:
                    await self._end_calls()
        except BaseException as error:
            self._failure = error  # known before the end is
            raise
        finally:
            self._ended = True

    async def _end_calls(self) -> None:
        self._closing.set()  # no call begins from here on
        tasks = [call.task for call in self._calls if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self) -> None:
        self._closing.set()
        if self._life is not None and not self._entered.done():
            self._life.cancel()

    def _begin(self, call: _Call) -> None:
        self._calls.add(call)
        if not self._closing.is_set():
            call.task = self._loop.create_task(call.coroutine)
            call.task.add_done_callback(lambda task: self._finish(call, task))

    def _cancel(self, call: _Call) -> None:
        call.given_up = True
        if call.task is not None:
            call.task.cancel()
        elif not call.result.done():  # the exception came before it could begin
            self._calls.discard(call)
            call.coroutine.close()
            call.result.set_exception(asyncio.CancelledError())

    def _finish(self, call: _Call, task: asyncio.Task[Any]) -> None:
        if task.cancelled() and self._closing.is_set() and not call.given_up:
            return  # the end of the thread tells why
        self._calls.discard(call)
        # The end of a task calls Python code, in which an exception of a signal would be lost: not in their thread.
        call.task = None
        if task.cancelled():
            call.result.set_exception(asyncio.CancelledError())
        elif error := task.exception():
            call.result.set_exception(error)
        else:
            call.result.set_result(task.result())


async def on_loop(read: Callable[[], T]) -> T:
    """Calls `read` in the event loop that awaits this."""
    return read()


class _Call:
    """A coroutine that some other thread waits for."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.coroutine = coroutine
        self.result: SignalSafeFuture[Any] = SignalSafeFuture()
        self.task: asyncio.Task[Any] | None = None
        self.given_up = False


def _first(error: BaseException) -> BaseException:
    """The first error in a group of them."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
