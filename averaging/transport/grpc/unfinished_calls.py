"""Bounds the memory that unfinished calls take in gRPC, and closes the connections that exceed the bounds.

gRPC keeps the bytes of a message until the message is complete. Its flow control counts only bytes of messages. But a
few of them keep the whole block of memory in which they arrived, whatever else is in it: 6 MiB of a message, sent in
small pieces between frames of an unknown type, keep 1.6 GiB. This module therefore counts what the system says has
arrived on a connection since its oldest unfinished call began, less the messages that were read from the connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from averaging.errors import BusyError
from averaging.timing import expire
from averaging.transport.grpc import accepted_sockets
from averaging.transport.grpc.accepted_sockets import SEARCH, Found, Remote, SocketHandle, parse_peer

logger = logging.getLogger("averaging.transport")

LOOK_SECONDS = 0.05
"""Interval at which the bytes on connections with unfinished calls are counted."""

_PAUSE = 10
"""Minimum pause between two counts, as a multiple of the duration of the last one (0.02 ms per connection)."""


DOUBT_SECONDS = 1.0
"""Time for which bytes that may belong to calls that have ended are not held for another call.

They arrived before the socket was found, so nobody knows when. They count for a call that is still unfinished then."""


@dataclass(frozen=True, slots=True)
class ByteLimits:
    """Bytes that unfinished calls may hold.

    Attributes:
        per_connection: limit of one connection.
        per_host: limit of all connections from one address.
        in_all: limit of all connections.
    """

    per_connection: int
    per_host: int
    in_all: int


def excess(held: Mapping[Remote, int], limits: ByteLimits) -> list[Remote]:
    """Selects the connections to close, so that the others keep within the limits.

    A host over its limit loses its largest connections. If all hosts together are over the limit, the host that holds
    the most loses its largest connections.

    Args:
        held: the bytes of each connection.
        limits: the bytes that are allowed.
    """
    gone: list[Remote] = []
    left: dict[str, list[Remote]] = {}
    totals: Counter[str] = Counter()
    for remote in sorted(held, key=lambda remote: held[remote], reverse=True):
        if held[remote] > limits.per_connection:
            gone.append(remote)
        else:
            left.setdefault(remote.address, []).append(remote)
            totals[remote.address] += held[remote]
    while totals:
        host, total = totals.most_common(1)[0]
        if total <= limits.per_host and totals.total() <= limits.in_all:
            break
        largest = left[host].pop(0)
        gone.append(largest)
        totals[host] -= held[largest]
    return gone


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection on which there has been a call.

    Attributes:
        remote: its other end.
        since: when its first call began, on the monotonic clock.
        handles: its sockets; empty until they are found.
        calls: the unfinished calls, each with the `level` when it began: earlier bytes belong to other calls.
        taken: bytes of messages that were read.
        level: bytes that have arrived, less `taken`, at the last count.
        ended_unseen: whether a call ended before its sockets were found.
        doubtful: the level when they were found, if one had.
        doubted_until: end of `DOUBT_SECONDS`.
    """

    remote: Remote
    since: float
    handles: tuple[SocketHandle, ...] = ()
    calls: dict[UnfinishedCall, int] = field(default_factory=dict)
    taken: int = 0
    level: int = 0
    ended_unseen: bool = False
    doubtful: int = 0
    doubted_until: float = 0.0

    def found(self, handles: tuple[SocketHandle, ...], now: float) -> None:
        """Records its sockets."""
        self.handles = handles
        if self.ended_unseen and self.count():
            self.doubtful, self.doubted_until = self.level, now + DOUBT_SECONDS

    def count(self) -> bool:
        """Counts the bytes that have arrived; False if the connection is closed."""
        if not self.handles:
            return True
        with suppress(OSError):  # without a free descriptor the last count stands
            arrived = accepted_sockets.received(self.handles)
            if arrived is None:
                return False
            self.level = arrived - self.taken
        return True

    def held(self, now: float) -> int:
        """Bytes that its unfinished calls may hold."""
        since = min(self.calls.values(), default=self.level)
        if now < self.doubted_until:
            since = min(max(since, self.doubtful), self.level)
        return self.level - since


class UnfinishedCall:
    """One call for which gRPC may hold bytes."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._read = 0
        self._limit: asyncio.Timeout | None = None
        connection.calls[self] = connection.level

    def took(self, nbytes: int) -> None:
        """Records that a message was read. In an unfinished call its bytes count as held until `release`."""
        self._read += nbytes
        if self not in self._connection.calls:
            self.release()

    def release(self) -> None:
        """Records that the messages that were read are no longer in memory."""
        self._connection.taken += self._read
        self._read = 0

    def finish(self) -> None:
        """Ends the count of this call. The service that reads it bounds what the caller sends from now on."""
        self.release()
        self._connection.calls.pop(self, None)
        self._connection.ended_unseen |= not self._connection.handles

    @asynccontextmanager
    async def until_hung_up(self) -> AsyncIterator[None]:
        """A context for everything that serves the call, except for the reply with an error.

        Raises:
            BusyError: the connection was closed because it holds too much. An error must be sent to the caller: gRPC
                may notice the closed connection only when it writes, and keeps the memory until then, up to 20 s.
        """
        try:
            async with asyncio.timeout(None) as self._limit:
                yield
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            raise BusyError("the unfinished requests on this connection hold too much memory") from None
        finally:
            self._limit = None

    def hang_up(self) -> None:
        """Ends `until_hung_up`."""
        if self._limit is not None:
            expire(self._limit)


class UnfinishedCalls:
    """Counts what the unfinished calls of one server hold, and closes the connections that hold too much.

    Args:
        limits: the bytes that are allowed.
        find: searches for the sockets of this process; it may return an earlier result again.
        clock: the monotonic clock.
    """

    def __init__(
        self, limits: ByteLimits, find: Callable[[], Found] = SEARCH.find, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._find = find
        self._clock = clock
        self._port = 0
        self._connections: dict[Remote, _Connection] = {}
        self._found = Found()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, port: int) -> None:
        """Begins to count what arrives on connections to `port`."""
        self._port = port

    def stop(self) -> None:
        """Stops counting."""
        self._port = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @contextmanager
    def call(self, peer: str) -> Iterator[UnfinishedCall]:
        """A context for a call of `peer`, as gRPC writes it. Enter it before the request is read."""
        call = UnfinishedCall(self._connection(parse_peer(peer)))
        self._look_in(LOOK_SECONDS)
        try:
            yield call
        finally:
            call.finish()

    def hang_up(self, peer: str) -> None:
        """Closes the connection of `peer`, as gRPC writes it."""
        self._find_sockets()
        one = self._connections.get(parse_peer(peer))
        if one is not None:
            self._end(one)

    def look(self) -> None:
        """Counts what has arrived, and closes the connections that hold too much."""
        if self._has_work():
            self._find_sockets()
        held: dict[Remote, int] = {}
        now = self._clock()
        for remote, one in list(self._connections.items()):
            if not one.calls:
                continue
            if one.count():
                held[remote] = one.held(now)
            else:
                self._end(one)
        for remote in excess(held, self._limits):
            text = "closed the connection of %s: its unfinished requests hold %.0f MiB"
            logger.warning(text, remote, held[remote] / (1 << 20))
            self._end(self._connections[remote])

    def _connection(self, remote: Remote) -> _Connection:
        """Returns the connection of a new call, with a count of what has arrived."""
        one = self._connections.get(remote)
        if one is not None and not one.count():
            self._end(one)
            one = None
        if one is None:
            one = self._connections[remote] = _Connection(remote, self._clock())
        return one

    def _look_in(self, seconds: float) -> None:
        if self._timer is None and self._port:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look_and_go_on)

    def _look_and_go_on(self) -> None:
        self._timer = None
        began = self._clock()
        self.look()
        if self._has_work():
            self._look_in(max(LOOK_SECONDS, _PAUSE * (self._clock() - began)))

    def _has_work(self) -> bool:
        """Whether a call is unfinished, or the socket of a connection has not been searched for."""
        return any(one.calls or one.since >= self._found.taken for one in self._connections.values())

    def _find_sockets(self) -> None:
        """Finds the sockets of new connections, and forgets connections that are closed."""
        found = self._find()
        if found is self._found:
            return
        self._found = found
        for one in list(self._connections.values()):
            if one.since >= found.taken:
                continue
            handles = found.sockets.get((self._port, one.remote), ())
            if one.handles and handles and handles != one.handles:
                self._end(one)  # a later connection from the same address and port
            elif handles and not one.handles:
                one.found(handles, self._clock())
            elif not handles and not one.calls:
                del self._connections[one.remote]

    def _end(self, one: _Connection) -> None:
        """Closes a connection, in case it is not closed yet, and ends its unfinished calls."""
        del self._connections[one.remote]
        accepted_sockets.hang_up(one.handles)
        for call in one.calls:
            call.hang_up()
