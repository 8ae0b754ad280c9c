"""Training scripts in a simulation: real averagers with real strategies, whose every wait is of virtual time.

An averager blocks the script that calls it. Here each script is a greenlet: where it would wait for its peer's thread,
it switches back to the event loop, in which all peers of the simulation live.
"""

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import greenlet
import pytest

from averaging import Peer
from averaging.common.event_loop_thread import SignalSafeFuture
from averaging.errors import ClosedError
from averaging.peer import PeerContext
from averaging.testing import virtual_time

T = TypeVar("T")


def wait_for(awaitable: Awaitable[T]) -> T:
    """Waits for something of the event loop; called in a script."""
    parent = greenlet.getcurrent().parent
    assert parent is not None
    result: T = parent.switch(awaitable)
    return result


def sleep(seconds: float) -> None:
    wait_for(asyncio.sleep(seconds))


async def run_script(script: Callable[[], T]) -> T:
    """Runs a script to its end."""
    child = greenlet.greenlet(script)
    child.gr_context = contextvars.copy_context()
    result = child.switch()
    try:
        while not child.dead:
            try:
                value = await result
            except Exception as error:
                result = child.throw(error)
            else:
                result = child.switch(value)
    finally:
        if not child.dead:  # it was cancelled; else it would end in a garbage collection, when no loop is running
            child.throw(greenlet.GreenletExit)
    ended: T = result
    return ended


class ScriptThread:
    """Takes the place of `EventLoopThread`: the peer lives in the loop in which the script runs, too."""

    def __init__(self, context: AbstractAsyncContextManager[object], name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._entered: asyncio.Future[None] = self._loop.create_future()
        self._closing = asyncio.Event()
        self._calls: set[asyncio.Task[Any]] = set()
        self._results: WeakKeyDictionary[SignalSafeFuture[Any], asyncio.Event] = WeakKeyDictionary()
        self._life = self._loop.create_task(self._live(context))
        wait_for(asyncio.shield(self._entered))

    async def _live(self, context: AbstractAsyncContextManager[object]) -> None:
        try:
            async with context:
                self._entered.set_result(None)
                await self._closing.wait()
                for call in self._calls:
                    call.cancel()
                await asyncio.gather(*self._calls, return_exceptions=True)
        except Exception as error:
            if self._entered.done():
                raise
            self._entered.set_exception(error)
        finally:
            self._closing.set()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.wait(self.start(coroutine))

    def start(self, coroutine: Coroutine[Any, Any, T]) -> SignalSafeFuture[T]:
        """See `EventLoopThread.start`."""
        try:
            self.check()
        except ClosedError:
            coroutine.close()
            raise
        result: SignalSafeFuture[T] = SignalSafeFuture()
        is_set = self._results[result] = asyncio.Event()
        task = self._loop.create_task(coroutine)
        self._calls.add(task)

        def ended(task: asyncio.Task[T]) -> None:
            self._calls.discard(task)
            if task.cancelled():
                result.set_exception(ClosedError(f"{self._name} has been closed"))
            elif error := task.exception():
                result.set_exception(error)
            else:
                result.set_result(task.result())
            is_set.set()

        task.add_done_callback(ended)
        return result

    def wait(self, result: SignalSafeFuture[T]) -> T:
        """See `EventLoopThread.wait`."""
        if not result.done():
            wait_for(self._results[result].wait())
        return result.result()

    def check(self) -> None:
        """See `EventLoopThread.check`."""
        if self._closing.is_set():
            raise ClosedError(f"{self._name} has been closed")

    def close(self) -> None:
        """See `EventLoopThread.close`."""
        self._closing.set()
        if not self._life.done():
            wait_for(asyncio.shield(self._life))


@contextmanager
def scripted(seed: int, clock: Callable[[], float] = virtual_time.clock) -> Iterator[random.Random]:
    """Averagers that are made inside work in scripts; yields the source of everything random in them."""
    rng = random.Random(seed)
    clocks = SimpleNamespace(time=clock, monotonic=lambda: asyncio.get_running_loop().time())

    def make_peer(*args: Any, context: PeerContext, **options: Any) -> Peer:
        inside = replace(context, clock=clock, rng=random.Random(rng.getrandbits(64)))
        return Peer(*args, context=inside, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("averaging.averager.EventLoopThread", ScriptThread)
        patch.setattr("averaging.averager.Peer", make_peer)
        patch.setattr("averaging.averager.leave_on_signals", lambda *_: None)  # a killed one never closes
        patch.setattr("averaging.averager.note_open", lambda _: None)  # likewise, and each has a process of its own
        patch.setattr("averaging.averager.random", SimpleNamespace(SystemRandom=lambda: rng))
        patch.setattr("averaging.strategies.lockstep.secrets", SimpleNamespace(token_bytes=rng.randbytes))
        patch.setattr("averaging.training.context.time", clocks)
        patch.setattr("averaging.training.announcements.time", clocks)
        yield rng
