"""An asyncio event loop whose time jumps to the next timer instead of waiting for it: an hour passes in milliseconds.

With `transport.memory` it runs simulations of many peers in one process, reproducible from a seed.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH = 1_700_000_000.0  # the wall clock of a simulation at its start, in seconds since the epoch


class DeadlockError(RuntimeError):
    """All tasks are waiting and no timer is set, so nothing can happen any more."""


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type, unused-ignore]
    """Never blocks: if nothing is ready, it advances the loop's time by the timeout instead of waiting."""

    jumped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise DeadlockError("all tasks are waiting and no timer is set")
            self.jumped += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, which starts at 0. Do not use threads or sockets: time does not wait for them."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.jumped


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, on virtual time.

    Raises:
        DeadlockError: all tasks are waiting, no timer is set, and `main` has not returned.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def stand_still(seconds: float) -> None:
    """Advances time while nothing runs, as on a machine that sleeps.

    Raises:
        TypeError: the running loop is not a `VirtualTimeLoop`.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualTimeLoop):
        raise TypeError(f"the time of {loop!r} is not virtual; start this with virtual_time.run()")
    loop._jumping.jumped += seconds


def clock() -> float:
    return EPOCH + asyncio.get_running_loop().time()
