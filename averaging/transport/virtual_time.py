"""An asyncio event loop whose time jumps to the next timer instead of waiting for it: an hour passes in milliseconds.

Together with `transport.memory` it runs whole swarms in one process, the same way for the same seed.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH = 1_700_000_000.0
"""The wall clock of a simulation at its start, in seconds since the epoch."""


class DeadlockError(RuntimeError):
    """Every task waits and no timer is set: nothing can ever happen again."""


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type, unused-ignore]
    """Never waits: reports what is ready, else lets the loop's time jump by what it would have waited."""

    jumped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise DeadlockError("every task waits and no timer is set")
            self.jumped += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0. Threads and sockets are not for it: time does not wait for them."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.jumped


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, on virtual time.

    Raises:
        DeadlockError: nothing can happen any more and `main` has not returned.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def stand_still(seconds: float) -> None:
    """Lets time go on while nothing else does, as on a machine that sleeps.

    Raises:
        TypeError: the running loop's time is not virtual.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualTimeLoop):
        raise TypeError(f"the time of {loop!r} is not virtual; start this with virtual_time.run()")
    loop._jumping.jumped += seconds


def clock() -> float:
    """The wall clock that goes with the running loop's time, in seconds since the epoch."""
    return EPOCH + asyncio.get_running_loop().time()
