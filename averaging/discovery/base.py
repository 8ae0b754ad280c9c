"""The contract of discovery: small records under a key, one per subkey, that expire at a time chosen by their owner."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

MAX_VALUE_BYTES = 1024
"""The largest value of a record."""

MAX_LIFETIME = 3600.0
"""Largest number of seconds until a record expires. What should last longer must be stored again in time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record as readers see it.

    Attributes:
        value: its value.
        expiration: when it expires, in seconds since the epoch.
        holder: the certificate that its owner holds; empty in a run without certificates.
    """

    value: bytes
    expiration: float
    holder: str = ""


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """What discovery knows about another peer.

    Attributes:
        since: when it joined the run, by its own clock and as it claims, in seconds since the epoch.
        values: the values that it has stored, by key.
    """

    since: float
    values: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The other peers, and what may keep them from this peer, as far as discovery knows.

    Attributes:
        peers: the other peers of the run, by endpoint.
        silent: peers that did not answer this peer lately, and why.
        clock_offsets: peers whose clock differs by more than is allowed. The value is the number of seconds by which
            that clock is ahead; it is negative if it is behind.
        isolation: why there may be no other peers and what to do, if this follows from the `join` of this peer.
    """

    peers: Mapping[str, KnownPeer]
    silent: Mapping[str, str] = field(default_factory=dict)
    clock_offsets: Mapping[str, float] = field(default_factory=dict)
    isolation: str = ""


def clock_difference(ahead: float) -> str:
    """`40 s ahead of`, or `40 s behind` if it is negative."""
    seconds = abs(ahead)
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s {'ahead of' if ahead > 0 else 'behind'}"


class Discovery(Protocol):
    """One peer's access to the records of its run.

    It is an async context manager: entering it joins the run, leaving it withdraws the records of this peer.
    Reading is local and never waits for the network.
    """

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> None:
        """Stores or replaces this peer's record under (key, subkey). Does not wait until other peers have it.

        The owner that stored a record under (key, subkey) first holds the place until that record expires or is
        withdrawn. If another owner holds it, the new record is kept but not read, and takes the place afterwards. This
        is not an error: it happens after a restart, when the record from before is still there.

        Raises:
            DiscoveryError: the value is over 1 KiB, a name is over 256 bytes, it has expired already or expires more
                than an hour from now, or too many records are stored.
            ClosedError: the discovery has not been entered, or has been left.
        """
        ...

    async def withdraw(self, key: str, subkey: str) -> None:
        """Removes this peer's record before it expires; does nothing if there is none."""
        ...

    def get(self, key: str) -> Mapping[str, Entry]:
        """The records under `key` that have not expired, by subkey."""
        ...

    def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        """Yields what `get(key)` returns, at once and again whenever it changes, also by expiration.

        Changes that come faster than the reader are merged. Close it (`contextlib.aclosing`) to stop watching. It ends
        when the discovery is left.
        """
        ...

    def knows(self, endpoint: str) -> bool:
        """Whether any record of this run that has not expired has `endpoint` as its subkey."""
        ...

    def endpoints(self) -> frozenset[str]:
        """The peers that discovery knows: all subkeys of records that have not expired.

        A peer that seems to have died may be left out sooner.
        """
        ...

    def diagnose(self) -> Diagnosis:
        """The other peers and what may keep them from this one; used to explain why no group was found."""
        ...
