"""State donors: their declarations in discovery, and the order in which a newcomer asks them."""

from __future__ import annotations

from collections.abc import Callable

import msgpack

from averaging.common.addresses import member_of
from averaging.common.safe_msgpack import is_number, unpack
from averaging.discovery.base import Discovery
from averaging.discovery.published_record import PublishedRecord
from averaging.protocol.group import donors_key

LIFETIME, REFRESH = 60.0, 20.0
"""Seconds until a declaration expires, and between its renewals."""

PAUSE = 1.0
"""Minimum seconds between two declarations: newcomers need no record of each of several rounds in a second."""


class Donors:
    """The state donors of a run, from the view of the peer `endpoint`.

    The priority of a donor is the version of its state: the peer that has averaged most often is asked first.

    Attributes:
        declaration: this peer's own record as a donor. It is published only if this peer shares its state.
    """

    def __init__(
        self, run_id: str, endpoint: str, discovery: Discovery, version: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._key = donors_key(run_id)
        self._endpoint, self._discovery = endpoint, discovery
        self.declaration = PublishedRecord(
            discovery,
            self._key,
            endpoint,
            lambda: msgpack.packb(float(version())),
            lifetime=LIFETIME,
            refresh=REFRESH,
            pause=PAUSE,
            clock=clock,
        )

    def others(self) -> list[tuple[float, str]]:
        """Priority and endpoint of the other donors, highest priority first."""
        entries = self._discovery.get(self._key)
        found = [(unpack_priority(entry.value), name) for name, entry in entries.items() if name != self._endpoint]
        known = [(priority, name) for priority, name in found if priority is not None]
        return sorted(known, key=lambda donor: (-donor[0], donor[1]))

    def members(self) -> dict[str, str]:
        """What each donor counts as, see `member_of`."""
        return {name: member_of(name, entry.holder) for name, entry in self._discovery.get(self._key).items()}


def unpack_priority(value: bytes) -> float | None:
    """Priority in a donor's declaration; None if it is unreadable."""
    try:
        priority = unpack(value, max_items=1)
    except ValueError:
        return None
    return float(priority) if is_number(priority) else None
