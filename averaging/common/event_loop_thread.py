"""A thread with an event loop, in which the peer runs beside the training thread."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, NoReturn, TypeVar

from averaging.errors import ClosedError, ConfigError

# A future for threads in which signal handlers raise, such as the main thread on Ctrl+C.


T = TypeVar("T")


class SignalSafeFuture(Generic[T]):
    """One thread sets it and others wait, even if a signal handler raises between any two of their instructions.

    `concurrent.futures` acquires its locks in Python code. An exception right after that leaves a lock held, and the
    thread that sets the result waits forever (https://bugs.python.org/issue29988). Here no thread holds a lock that
    another one needs.
    """

    def __init__(self) -> None:
        self._done = False
        self._value: T
        self._error: BaseException | None = None
        self._unset = threading.Lock()  # held until it is set; its methods, in C, acquire it or raise
        self._unset.acquire()

    def done(self) -> bool:
        return self._done

    def wait(self, seconds: float) -> None:
        """Waits until it is set; if several threads wait, it may take all of `seconds` although it was set earlier."""
        if not self._done:
            self._unset.acquire(timeout=seconds)

    def result(self) -> T:
        """The value that was set."""
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            del self  # avoids a reference cycle of the error and its frame

    def set_result(self, value: T) -> None:
        self._value = value
        self._set()

    def set_exception(self, error: BaseException) -> None:
        """Sets what `result` raises, once."""
        self._error = error
        self._set()

    def _set(self) -> None:
        self._done = True
        self._unset.release()


logger = logging.getLogger("averaging.training")


SIGNAL_PERIOD = 0.5
"""Seconds between two checks of a waiting thread, since a signal right before a wait does not interrupt it."""


EXIT_SECONDS = 10.0  # maximum seconds for which interpreter exit waits until a daemon thread has ended what it computes


def compute_in_one_thread() -> None:
    """Keeps torch's operations in the calling thread from using further threads, from now on.

    Operations on parts are short: their threads wait for one another longer than they compute, and on a busy machine
    many times as long. Other threads keep the number that they have.
    """
    torch = sys.modules.get("torch")  # not imported for it
    if torch is None or (count := torch.get_num_threads()) == 1:
        return
    torch.set_num_threads(1)
    # That also sets the number of all threads that compute for the first time from now on; another thread resets it.
    resetting = threading.Thread(target=torch.set_num_threads, args=(count,))
    resetting.start()
    resetting.join()


class _EventLoop(asyncio.SelectorEventLoop):
    """Shuts its executor down directly: asyncio would start a thread, which Python 3.12 forbids at interpreter exit."""

    def __init__(self) -> None:
        super().__init__()
        self._executor = ThreadPoolExecutor()
        self.set_default_executor(self._executor)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._executor.shutdown()


def call_in(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: Any) -> None:
    """Calls `callback` in an event loop: at once in the running one, soon in that of another thread.

    Nothing is called if that loop is closed.
    """
    if asyncio._get_running_loop() is loop:
        callback(*arguments)
        return
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)


class EventLoopThread:
    """A daemon thread whose event loop keeps an async context entered until `close`, or until the context fails.

    The constructor returns once the context is entered. At interpreter exit the thread is closed in order. A daemon
    thread that uses it then stops in its next call, and never returns: a thread that computes with torch while the
    interpreter ends would abort the process.

    Calling threads share no lock with it: a signal handler may raise between any two of their instructions, and would
    leave the lock held.

    Args:
        context: entered and left by the same task, so it may hold a TaskGroup. If the group fails, the thread ends.
        name: name of the thread, also for errors.

    Raises:
        Exception: whatever entering the context raises; the thread has ended then.
    """

    def __init__(self, context: AbstractAsyncContextManager[object], name: str) -> None:
        self._context = context
        self._name = name
        self._pid = os.getpid()
        self._runner = asyncio.Runner(loop_factory=_EventLoop)
        self._loop = self._runner.get_loop()
        self._entered: SignalSafeFuture[None] = SignalSafeFuture()
        self._closing = asyncio.Event()
        self._main_task: asyncio.Task[None] | None = None
        self._calls: set[_PendingCall] = set()  # used by this thread only
        self._ended = False  # from here on no call starts
        self._gone = False  # from here on no call returns
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run_thread, name=name, daemon=True)
        self._users = _Users()
        self._exiting = False
        atexit.register(self._close_at_exit)
        try:
            self._thread.start()
            self._wait_for(self._entered)
            self._entered.result()
        except BaseException:
            self.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs `coroutine` in the thread's loop and waits for its result.

        If the waiting thread raises, for example a KeyboardInterrupt, the coroutine is cancelled; the exception
        propagates once it has ended.

        Raises:
            ClosedError: the thread was closed or its context has failed, before or meanwhile; the failure is its cause.
            Exception: whatever the coroutine raises.
        """
        call = _PendingCall(coroutine)
        try:
            self.check()
            self._loop.call_soon_threadsafe(self._begin, call)
            self._wait_for(call.result)
        except BaseException as error:
            self._abandon(call, error)
            raise
        result: T = self._result(call.result)
        return result

    def start(self, coroutine: Coroutine[Any, Any, T]) -> SignalSafeFuture[T]:
        """Runs `coroutine` in the thread's loop without waiting; it is cancelled when the thread ends.

        Raises:
            ClosedError: as for `run`; the future may raise it as well.
        """
        call = _PendingCall(coroutine)
        try:
            self.check()
            self._loop.call_soon_threadsafe(self._begin, call)
        except BaseException as error:
            self._abandon(call, error)
            raise
        return call.result

    def wait(self, result: SignalSafeFuture[T]) -> T:
        """Waits for what `start` returned. A KeyboardInterrupt ends the wait, not the coroutine.

        Raises:
            ClosedError: the thread ended before the coroutine did, or this process is a fork.
            Exception: whatever the coroutine raises.
        """
        self._wait_for(result)
        return self._result(result)

    def check(self) -> None:
        """Checks that the thread is running.

        Raises:
            ClosedError: it is not.
        """
        self._users.note(time.monotonic())
        if self._ended or self._in_fork:
            self.stop_at_exit()
            raise self._not_running()

    def stop_at_exit(self) -> None:
        """Called where the thread is found closed; does not return in a daemon thread at interpreter exit."""
        if self._exiting and not self._in_fork and threading.current_thread().daemon:
            self._users.stop()

    def _result(self, future: SignalSafeFuture[T]) -> T:
        try:
            return future.result()
        except ClosedError:
            self.stop_at_exit()
            raise

    def _close_at_exit(self) -> None:
        self._exiting = True
        self.close()
        if not self._in_fork:
            self._users.wait_for_stop(time.monotonic())

    def begin_to_close(self) -> None:
        """Starts to close the thread without waiting for its end."""
        if not self._in_fork:
            self._begin_to_stop()

    def close(self) -> None:
        """Cancels the calls in progress, leaves the context, and ends the thread. Further calls do nothing."""
        if self._in_fork:
            return
        self._begin_to_stop()
        while self._thread.is_alive():
            self._thread.join(SIGNAL_PERIOD)
        atexit.unregister(self._close_at_exit)

    @property
    def _in_fork(self) -> bool:
        """Whether this process is a fork, in which the thread does not exist."""
        return os.getpid() != self._pid

    def _not_running(self) -> ClosedError:
        if self._in_fork:
            return ClosedError(f"{self._name} runs in process {self._pid}; a fork of that process cannot use it")
        if self._failure is None:
            return ClosedError(f"{self._name} has been closed")
        error = ClosedError(f"{self._name} has ended after {first_error(self._failure)!r}; start a new one")
        error.__cause__ = self._failure
        return error

    def _begin_to_stop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._stop)
        except RuntimeError:
            if not self._loop.is_closed():  # a signal handler has raised it
                raise

    def _wait_for(self, result: SignalSafeFuture[Any]) -> None:
        while not result.done():
            if self._in_fork:  # the call ends in the parent process only
                raise self._not_running()
            result.wait(SIGNAL_PERIOD)
            if self._gone and not result.done():
                raise self._not_running()

    def _abandon(self, call: _PendingCall, why: BaseException) -> None:
        """Cancels a call for which nobody waits, after an exception at any point of the waiting thread.

        Raises:
            ClosedError: the exception says that the loop is closed.
        """
        if not self._in_fork:
            with suppress(RuntimeError, ClosedError):
                self._loop.call_soon_threadsafe(self._cancel, call)
                self._wait_for(call.result)
        if not call.result.done():
            call.coroutine.close()
        if isinstance(why, RuntimeError) and self._loop.is_closed():
            raise self._not_running() from None

    # In the thread

    def _run_thread(self) -> None:
        compute_in_one_thread()
        try:
            with self._runner:
                self._runner.run(self._main())
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

    async def _main(self) -> None:
        try:
            self._main_task = asyncio.current_task()
            async with self._context:
                self._entered.set_result(None)
                try:
                    await self._closing.wait()
                finally:
                    await self._end_calls()
        except BaseException as error:
            self._failure = error  # before `_ended` is set
            raise
        finally:
            self._ended = True

    async def _end_calls(self) -> None:
        self._closing.set()  # from here on no call starts
        tasks = [call.task for call in self._calls if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self) -> None:
        self._closing.set()
        if self._main_task is not None and not self._entered.done():
            self._main_task.cancel()

    def _begin(self, call: _PendingCall) -> None:
        self._calls.add(call)
        if not self._closing.is_set():
            call.task = self._loop.create_task(call.coroutine)
            call.task.add_done_callback(lambda task: self._finish(call, task))

    def _cancel(self, call: _PendingCall) -> None:
        call.abandoned = True
        if call.task is not None:
            call.task.cancel()
        elif not call.result.done():  # it has not started yet
            self._calls.discard(call)
            call.coroutine.close()
            call.result.set_exception(asyncio.CancelledError())

    def _finish(self, call: _PendingCall, task: asyncio.Task[Any]) -> None:
        if task.cancelled() and self._closing.is_set() and not call.abandoned:
            return  # `_run_thread` sets the reason
        self._calls.discard(call)
        # Drops the task here: its finalizer runs Python code, in which a signal in the waiting thread would be lost.
        call.task = None
        if task.cancelled():
            call.result.set_exception(asyncio.CancelledError())
        elif error := task.exception():
            call.result.set_exception(error)
        else:
            call.result.set_result(task.result())


class _Users:
    """The daemon thread that has used an `EventLoopThread` last, and how long it computes between two uses."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._last = 0.0
        self._gaps: deque[float] = deque(maxlen=32)
        self._stopped = threading.Event()

    def note(self, now: float) -> None:
        """Notes a use by the present thread, in seconds of a monotonic clock."""
        thread = threading.current_thread()
        if not thread.daemon:
            return
        if thread is self._thread:
            self._gaps.append(now - self._last)
        self._thread, self._last = thread, now

    def stop(self) -> None:
        """Stops the present thread for ever."""
        self._stopped.set()
        threading.Event().wait()

    def wait_for_stop(self, now: float) -> None:
        """Waits until the thread has stopped, if it will be back soon."""
        limit = min(EXIT_SECONDS, 0.5 + 2 * max(self._gaps, default=0.0))
        if self._thread is not None and self._thread.is_alive() and now - self._last < limit:
            self._stopped.wait(limit)


async def on_loop(read: Callable[[], T]) -> T:
    return read()


class _PendingCall:
    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.coroutine = coroutine
        self.result: SignalSafeFuture[Any] = SignalSafeFuture()
        self.task: asyncio.Task[Any] | None = None
        self.abandoned = False


def first_error(error: BaseException) -> BaseException:  # of the groups that TaskGroup makes
    return first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


# Objects with threads and connections, which exist in one process only.


class InProcess:
    """Refuses to be copied or pickled, also as a part of something else, such as the `collate_fn` of a DataLoader."""

    _instead = "make another one there"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError(
            f"a {type(self).__name__} holds a thread and connections, so it cannot be copied or pickled; "
            f"{self._instead}. "
            "A DataLoader with the start method spawn or forkserver pickles its dataset, collate_fn and worker_init_fn "
            "for its worker processes: none of these may refer to it, as the method of an object does that holds it"
        )
