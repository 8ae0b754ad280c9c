"""How much memory the unfinished calls of others take in gRPC, and the end of connections that take too much.

gRPC keeps what arrives of a message until the message is complete. Its flow control counts the bytes of messages alone.
But a few bytes of a message keep the whole block of memory in which they arrived, whatever else was in it: 6 MiB of a
message, sent in small pieces between frames that mean nothing, keep 1.6 GiB. So what counts here is what has arrived on
the connection, as the system tells it, since it has had an unfinished call, less the messages that were taken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from averaging.errors import BusyError
from averaging.transport.grpc import sockets
from averaging.transport.grpc.sockets import Found, Remote, parse_peer

logger = logging.getLogger("averaging.transport")

LOOK_SECONDS = 0.05
"""While calls are unfinished, their connections are looked at this often."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes that may be held for unfinished calls.

    Attributes:
        per_connection: on one connection.
        per_host: on all connections of one address.
        in_all: on all connections.
    """

    per_connection: int
    per_host: int
    in_all: int


def excess(held: Mapping[str, int], hosts: Mapping[str, str], limits: Limits) -> list[str]:
    """Which connections must go, so that the others keep the limits.

    Of a host that has too much its largest ones go, and if all hosts together have too much, those of the host that
    has the most.

    Args:
        held: the bytes of each connection.
        hosts: the address from which each one comes.
        limits: what may be held.
    """
    largest = sorted(held, key=lambda peer: held[peer], reverse=True)
    gone: list[str] = []
    left: dict[str, list[str]] = {}
    totals: Counter[str] = Counter()
    for peer in largest:
        if held[peer] > limits.per_connection:
            gone.append(peer)
        else:
            left.setdefault(hosts[peer], []).append(peer)
            totals[hosts[peer]] += held[peer]
    while totals:
        host, total = totals.most_common(1)[0]
        if total <= limits.per_host and totals.total() <= limits.in_all:
            break
        peer = left[host].pop(0)
        gone.append(peer)
        totals[host] -= held[peer]
    return gone


def host_of_peer(peer: str) -> str:
    """The address in gRPC's text for the other end of a call, without the port."""
    return peer.rpartition(":")[0]


class UnfinishedCall:
    """One call of which gRPC may hold bytes.

    Attributes:
        level: that of its connection when it began.
    """

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._since = connection.since
        self._taken = 0
        self._limit: asyncio.Timeout | None = None
        self.level = connection.level
        connection.calls[self] = None

    def took(self, nbytes: int) -> None:
        """A message of so many bytes was read. It counts as held until the call is finished, or it is forgotten."""
        self._taken += nbytes
        if self not in self._connection.calls:
            self.forget()

    def forget(self) -> None:
        """The messages that were read are held no longer."""
        if self._connection.since == self._since:  # else they came on a connection before it
            self._connection.taken += self._taken
        self._taken = 0

    @asynccontextmanager
    async def until_hung_up(self) -> AsyncIterator[None]:
        """Around everything that is done for it, but to tell its caller of an error.

        Raises:
            BusyError: its connection was hung up. To tell the caller so is a write, which shows gRPC at once that the
                connection is closed; without one it may take 20 s to see that, and holds everything meanwhile.
        """
        try:
            async with asyncio.timeout(None) as self._limit:
                yield
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            raise BusyError("this connection has too much of unfinished requests") from None
        finally:
            self._limit = None

    def hang_up(self) -> None:
        """Ends it; its connection is closed."""
        if self._limit is not None:
            self._limit.reschedule(0.0)

    def finish(self) -> None:
        """Nothing more is held for it than its caller may have on the way."""
        self.forget()
        self._connection.calls.pop(self, None)


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection on which there has been a call.

    Attributes:
        remote: its other end.
        since: when its first call came, on the monotonic clock.
        descriptors: of its sockets; none until they are found.
        calls: the unfinished ones.
        taken: bytes of messages that were taken.
        level: bytes that had arrived and were not taken, when that was last looked at. Each call keeps the level that
            it found: what belongs to earlier calls, which may be over, is not held for it.
        looked: when that was.
    """

    peer: str
    remote: Remote | None
    since: float
    descriptors: tuple[int, ...] = ()
    calls: dict[UnfinishedCall, None] = field(default_factory=dict)
    taken: int = 0
    level: int = 0
    looked: float = 0.0

    def look(self, port: int) -> None:
        """Brings the level up to date."""
        self.looked = time.monotonic()
        arrived = None if self.remote is None else sockets.received(self.descriptors, port, self.remote)
        if arrived is None:
            self.begin()
        else:
            self.level = arrived - self.taken

    def begin(self) -> None:
        """Nothing is known of it: it is closed, or another one from the same address and port."""
        self.since = time.monotonic()
        self.descriptors = ()
        self.taken = self.level = 0
        for call in self.calls:
            call.level = 0

    @property
    def held(self) -> int:
        """Bytes that may be held for its unfinished calls."""
        return self.level - min((call.level for call in self.calls), default=self.level)


class Unfinished:
    """Keeps account of the unfinished calls of one server, and hangs up connections that hold too much for them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._port = 0
        self._connections: dict[str, _Connection] = {}
        self._busy: dict[_Connection, None] = {}  # with unfinished calls, and some whose calls have ended since
        self._new: dict[_Connection, None] = {}  # whose sockets are not found yet
        self._found = Found()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, port: int) -> None:
        """Begins to look at connections to `port`."""
        self._port = port

    def stop(self) -> None:
        """Looks at none any more."""
        self._port = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @contextmanager
    def call(self, peer: str) -> Iterator[UnfinishedCall]:
        """Around a call, from before anything of it is read."""
        one = UnfinishedCall(self._connection(peer))
        self._look_later()
        try:
            yield one
        finally:
            one.finish()

    def _connection(self, peer: str) -> _Connection:
        """The connection of a new call."""
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection(peer, parse_peer(peer), time.monotonic())
            self._new[connection] = None
        elif connection.descriptors and time.monotonic() - connection.looked > LOOK_SECONDS:
            self._look_at(connection)
        self._busy[connection] = None
        return connection

    def _look_at(self, connection: _Connection) -> None:
        connection.look(self._port)
        if not connection.descriptors:
            self._new[connection] = None

    def _look_later(self) -> None:
        if self._timer is None and self._port:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._new:
            self._find()
        self._busy = {one: None for one in self._busy if one.calls}
        for one in self._busy:
            if one.descriptors:
                self._look_at(one)
        held = {one.peer: one.held for one in self._busy if one.descriptors}
        for peer in excess(held, {peer: host_of_peer(peer) for peer in held}, self._limits):
            self._hang_up(self._connections[peer], held[peer])
        if self._busy or self._new:
            self._look_later()

    def _find(self) -> None:
        """Finds the sockets of new connections, and forgets connections that are gone."""
        found = sockets.SOCKETS.find()
        if found is self._found:
            return
        self._found = found
        here = found.by_port.get(self._port, {})
        for one in [one for one in self._new if one.since < found.taken]:
            del self._new[one]
            if one.remote is not None:
                one.descriptors = here.get(one.remote, ())
        for one in list(self._connections.values()):
            if one.since < found.taken and not one.calls and one.remote not in here:
                del self._connections[one.peer]

    def _hang_up(self, one: _Connection, held: int) -> None:
        told = "%s sent %.0f MiB of requests without completing them; its connection was closed"
        logger.warning(told, one.peer, held / (1 << 20))
        if one.remote is not None:
            sockets.hang_up(one.descriptors, self._port, one.remote)
        one.begin()
        self._new[one] = None
        for call in one.calls:
            call.hang_up()
