"""The contract of discovery: small records under a key, one per subkey, that expire by their own time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

MAX_VALUE_BYTES = 1024
"""The largest value a record may carry."""

MAX_LIFETIME = 3600.0
"""A record may expire at most so many seconds from now; what lasts longer is stored again in time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What somebody stored. `expiration` is in seconds since the epoch."""

    value: bytes
    expiration: float


@dataclass(frozen=True, slots=True)
class Sighting:
    """What discovery knows of another peer.

    Attributes:
        since: when it took its place in the run, by its own word and clock, in seconds since the epoch.
        values: what it has stored, by key.
    """

    since: float
    values: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Outlook:
    """The others, and what stands between them and this peer, as far as discovery knows.

    Attributes:
        peers: those in the run, without this one.
        silent: who did not answer this peer lately, and why.
        apart: whose clock differs by more than is allowed: by how many seconds it is ahead, or below 0 behind.
        alone: why nobody else may be there and what to do, where that follows from whom this peer was told to join.
    """

    peers: Mapping[str, Sighting]
    silent: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, float] = field(default_factory=dict)
    alone: str = ""


def clock_difference(ahead: float) -> str:
    """`40 s ahead of`, or `40 s behind` if it is below 0."""
    seconds = abs(ahead)
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s {'ahead of' if ahead > 0 else 'behind'}"


class Discovery(Protocol):
    """Where peers of one run tell each other who and what is there.

    It is an async context manager: entering joins the run, leaving withdraws what this peer stored.
    Reading is local and never waits for the network.
    """

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> None:
        """Stores or replaces this peer's record under (key, subkey), and tells the others without waiting for them.

        Whoever took (key, subkey) first holds it until that record expires or is withdrawn. A record that somebody
        else holds, such as one that this peer stored before it was restarted, is no error: this one waits, nobody
        reads it, and it takes the place everywhere once the other has gone.

        Raises:
            DiscoveryError: the value is over 1 KiB, a name is over 256 bytes, it has expired already or expires more
                than an hour from now, or too many records are stored.
            ClosedError: the discovery has not been entered, or has been left.
        """
        ...

    async def withdraw(self, key: str, subkey: str) -> None:
        """Takes this peer's record back before it expires; nothing happens if there is none."""
        ...

    def get(self, key: str) -> Mapping[str, Entry]:
        """The records under `key` that have not expired, by subkey."""
        ...

    def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        """Yields what `get(key)` returns, at once and again whenever it changes, expiry included.

        Changes that come faster than the reader are merged. Close it (`contextlib.aclosing`) to stop watching; it ends
        by itself when the discovery is left.
        """
        ...

    def names(self, endpoint: str) -> bool:
        """Whether any record of this run that has not expired has `endpoint` as its subkey."""
        ...

    def endpoints(self) -> frozenset[str]:
        """All subkeys of records that have not expired: the peers that discovery knows of.

        A peer that has given no sign of life for long may be left out sooner.
        """
        ...

    def outlook(self) -> Outlook:
        """The others, and what stands between them and this peer; it is asked when no group came together."""
        ...
