"""The tickets with which connections are admitted: valid once, and for a short time. Pure.

A ticket is found by the nonce of which the caller has sent a digest, and admits the caller that knows both.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from averaging.errors import BusyError, ProtocolViolationError
from averaging.transport.direct.frames import commitment_to, proof_of
from averaging.transport.direct.sealing import Ciphers

VALID_SECONDS = 30.0
"""For which a ticket is valid. Callers connect at once."""

MAX_PER_HOST, MAX_IN_ALL = 256, 4096
"""Tickets within `VALID_SECONDS`, used or not, of callers from one address and of all callers. So connections that are
made and ended again and again come at no higher rate."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What the holder of a ticket may do.

    Attributes:
        host: from which the ticket was requested.
        ticket: the ticket itself.
        check: raises a ForeignEndpointError if the holder may not use an endpoint as its own.
        seal: makes the ciphers of the connection from the caller's proof; None for a plain one.
    """

    host: str
    ticket: bytes
    check: Callable[[str], None]
    seal: Callable[[bytes], Ciphers] | None


@dataclass(slots=True)
class _Grant:
    """A ticket of the last `VALID_SECONDS`; without `admission` it was used."""

    until: float
    host: str
    admission: Admission | None


class Tickets:
    """The tickets that were granted in the last `VALID_SECONDS`."""

    def __init__(self) -> None:
        self._granted: dict[bytes, _Grant] = {}  # by the caller's commitment, earliest first
        self._hosts: Counter[str] = Counter()

    def grant(self, admission: Admission, commitment: bytes, now: float) -> None:
        """Adds a ticket.

        Args:
            admission: the ticket, and what it is for.
            commitment: the digest of the caller's nonce, 32 bytes.
            now: seconds of a monotonic clock.

        Raises:
            BusyError: there are too many.
            ProtocolViolationError: another ticket has the same commitment.
        """
        self._forget_old(now)
        if self._hosts[admission.host] >= MAX_PER_HOST or len(self._granted) >= MAX_IN_ALL:
            raise BusyError(f"too many direct connections were requested within {VALID_SECONDS:g} s")
        if commitment in self._granted:
            raise ProtocolViolationError("a nonce that was used for another direct connection")
        self._granted[commitment] = _Grant(now + VALID_SECONDS, admission.host, admission)
        self._hosts[admission.host] += 1

    def redeem(self, nonce: bytes, proof: bytes, now: float) -> Admission | None:
        """Returns what the ticket of a nonce is for, once; None if it is unknown, used or too old."""
        self._forget_old(now)
        grant = self._granted.get(commitment_to(nonce))
        if grant is None or grant.admission is None:
            return None
        admission, grant.admission = grant.admission, None
        return admission if hmac.compare_digest(proof, proof_of(nonce, admission.ticket)) else None

    def _forget_old(self, now: float) -> None:
        while self._granted:
            commitment, grant = next(iter(self._granted.items()))
            if grant.until > now:
                return
            del self._granted[commitment]
            self._hosts[grant.host] -= 1
            if not self._hosts[grant.host]:
                del self._hosts[grant.host]
