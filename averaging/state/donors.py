"""Who offers its state: declarations in discovery, and the order in which a newcomer asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import msgpack

from averaging.common.safe_msgpack import is_number, unpack
from averaging.discovery.base import Discovery
from averaging.discovery.published_record import PublishedRecord
from averaging.protocol.group import donors_key

LIFETIME, REFRESH = 60.0, 20.0
"""Seconds for which a declaration holds, and after which it is made again."""


class Donors:
    """The state donors of a run, as `endpoint` sees them and is one of them.

    The priority of a state is its version: who has averaged most is asked first.

    Attributes:
        notice: the declaration of this peer; it is kept only if this peer offers its state.
    """

    def __init__(
        self, run_id: str, endpoint: str, discovery: Discovery, version: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._key = donors_key(run_id)
        self._endpoint, self._discovery = endpoint, discovery
        self.notice = PublishedRecord(
            discovery,
            self._key,
            endpoint,
            lambda: msgpack.packb(float(version())),
            lifetime=LIFETIME,
            refresh=REFRESH,
            clock=clock,
        )

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


def unpack_priority(value: bytes) -> float | None:
    """The priority in a donor's declaration; None if it is unreadable."""
    try:
        priority = unpack(value, max_items=1)
    except ValueError:
        return None
    return float(priority) if is_number(priority) else None
