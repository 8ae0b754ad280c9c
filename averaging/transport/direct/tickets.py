"""The tickets with which connections are admitted: valid once, and for a short time. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from averaging.errors import BusyError
from averaging.transport.direct.sealing import Ciphers

VALID_SECONDS = 30.0
"""For which a ticket is valid. Callers connect at once."""

MAX_PER_HOST, MAX_IN_ALL = 256, 4096
"""Unused tickets of callers from one address, and of all callers."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What the holder of a ticket may do.

    Attributes:
        host: from which the ticket was requested.
        ticket: the ticket itself.
        check: raises a ForeignEndpointError if the holder may not use an endpoint as its own.
        ciphers: of the connection; None for a plain one.
    """

    host: str
    ticket: bytes
    check: Callable[[str], None]
    ciphers: Ciphers | None


class Tickets:
    """The tickets that were granted and not used."""

    def __init__(self) -> None:
        self._granted: dict[bytes, tuple[float, Admission]] = {}  # with the end of its time, earliest first
        self._hosts: Counter[str] = Counter()

    def grant(self, admission: Admission, now: float) -> None:
        """Adds a ticket.

        Args:
            admission: the ticket, and what it is for.
            now: seconds of a monotonic clock.

        Raises:
            BusyError: there are too many unused ones.
        """
        self._forget_old(now)
        if self._hosts[admission.host] >= MAX_PER_HOST or len(self._granted) >= MAX_IN_ALL:
            raise BusyError("too many direct connections were requested and not made")
        self._granted[admission.ticket] = now + VALID_SECONDS, admission
        self._hosts[admission.host] += 1

    def redeem(self, ticket: bytes, now: float) -> Admission | None:
        """Returns what a ticket is for, once; None if it is unknown, used or too old."""
        self._forget_old(now)
        return self._remove(ticket) if ticket in self._granted else None

    def _forget_old(self, now: float) -> None:
        while self._granted:
            ticket, (until, _) = next(iter(self._granted.items()))
            if until > now:
                return
            self._remove(ticket)

    def _remove(self, ticket: bytes) -> Admission:
        _, admission = self._granted.pop(ticket)
        self._hosts[admission.host] -= 1
        if not self._hosts[admission.host]:
            del self._hosts[admission.host]
        return admission
