"""Who offers its state: declarations in discovery, and the order in which a newcomer asks."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import aclosing

import msgpack

from averaging.discovery.base import Discovery
from averaging.errors import AveragingError
from averaging.group import donors_key

logger = logging.getLogger(__name__)

LIFETIME, REFRESH = 60.0, 20.0
"""Seconds for which a declaration holds, and after which it is made again."""


class Donors:
    """The state donors of a run, as `endpoint` sees them and is one of them.

    The priority of a state is its version: who has averaged most is asked first.
    """

    def __init__(self, run_id: str, endpoint: str, discovery: Discovery, clock: Callable[[], float]) -> None:
        self._key = donors_key(run_id)
        self._endpoint, self._discovery, self._clock = endpoint, discovery, clock
        self._committed = asyncio.Event()

    def others(self) -> list[tuple[float, str]]:
        """Priority and endpoint of the other donors, the best first."""
        entries = self._discovery.get(self._key)
        found = [(unpack_priority(entry.value), name) for name, entry in entries.items() if name != self._endpoint]
        known = [(priority, name) for priority, name in found if priority is not None]
        return sorted(known, key=lambda donor: (-donor[0], donor[1]))

    async def appear(self, above: float, timeout: float) -> bool:
        """Whether somebody offers a state of a priority above `above`, now or within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout), aclosing(self._discovery.watch(self._key)) as changes:
                async for _ in changes:
                    if any(priority > above for priority, _ in self.others()):
                        return True
        except TimeoutError:
            return False
        return False

    def committed(self) -> None:
        """There is a new version to declare."""
        self._committed.set()

    async def keep_declaring(self, version: Callable[[], int]) -> None:
        """Declares this peer's state until cancelled: after each commit, and before a declaration expires."""
        while True:
            self._committed.clear()
            await self.declare(version())
            try:
                async with asyncio.timeout(REFRESH):
                    await self._committed.wait()
            except TimeoutError:
                continue

    async def declare(self, version: int) -> None:
        """Declares once that this peer's state can be downloaded."""
        value = msgpack.packb(float(version))
        try:
            await self._discovery.store(self._key, self._endpoint, value, self._clock() + LIFETIME)
        except AveragingError as error:
            logger.warning("could not declare that the state can be downloaded: %s", error)


def unpack_priority(value: bytes) -> float | None:
    """The priority in a donor's declaration; None if it is unreadable."""
    try:
        priority = msgpack.unpackb(value)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return None
    if isinstance(priority, bool) or not isinstance(priority, int | float) or not math.isfinite(priority):
        return None
    return float(priority)
