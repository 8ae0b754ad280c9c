"""Processes of a simulation that share its loop but can be stopped one by one, with all their tasks and timers."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple

from averaging.testing import virtual_time
from averaging.testing.virtual_time import VirtualTimeLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_PROCESS = contextvars.ContextVar("process", default="")


@contextmanager
def process(name: str) -> Iterator[None]:
    """Tasks and timers that are made inside, and whatever they make in turn, are those of this process."""
    token = _PROCESS.set(name)
    try:
        yield
    finally:
        _PROCESS.reset(token)


def clock() -> float:
    """The wall clock of the running process, in seconds since the epoch: that of all, and the steps of its own."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ProcessLoop)
    return virtual_time.clock() + loop.clock_steps.get(_PROCESS.get(), 0.0)


class ProcessLoop(VirtualTimeLoop):
    """Knows by the context of a callback to whose process it belongs.

    Attributes:
        clock_steps: by how many seconds the clock of a process was set, see `clock`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stopped: dict[str, list[_Step]] = {}
        self.clock_steps: dict[str, float] = {}

    def stop_process(self, name: str) -> None:
        """Nothing of it runs from now on, but for the step that is being taken."""
        self._stopped.setdefault(name, [])

    def continue_process(self, name: str) -> None:
        """What would have run meanwhile runs now, in that order."""
        for held in self._stopped.pop(name, []):
            super().call_soon(held, context=held.context)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.loop.call_soon`."""
        step = _Step(self._stopped, callback, args, context or contextvars.copy_context())
        step.handle = super().call_soon(step, context=step.context)
        return step.handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.loop.call_at`."""
        step = _Step(self._stopped, callback, args, context or contextvars.copy_context())
        step.handle = handle = super().call_at(when, step, context=step.context)
        return handle


class _Step:
    """A callback that is held while its process is stopped.

    Attributes:
        handle: by which it may be cancelled, also while it is held.
    """

    handle: asyncio.Handle

    def __init__(
        self,
        stopped: dict[str, list[_Step]],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
    ) -> None:
        self._stopped, self._function, self._args, self.context = stopped, function, args, context

    def __call__(self) -> None:
        held = self._stopped.get(_PROCESS.get())
        if held is not None:
            held.append(self)
        elif not self.handle.cancelled():
            self._function(*self._args)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `virtual_time.run`, with processes."""
    with asyncio.Runner(loop_factory=ProcessLoop) as runner:
        return runner.run(main)
