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
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from averaging.errors import BusyError
from averaging.transport.grpc import sockets
from averaging.transport.grpc.sockets import SOCKETS, Found, Handle, Remote, parse_peer

logger = logging.getLogger("averaging.transport")

LOOK_SECONDS = 0.05
"""While calls are unfinished, the bytes on their connections are counted this often."""

_PAUSE = 10
"""The next count waits for at least this many times as long as the last one took, 0.02 ms for each connection."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes that unfinished calls may hold.

    Attributes:
        per_connection: on one connection.
        per_host: on all connections of one address.
        in_all: on all connections.
    """

    per_connection: int
    per_host: int
    in_all: int


def excess(held: Mapping[Remote, int], limits: Limits) -> list[Remote]:
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
        calls: the unfinished calls.
        taken: bytes of messages that were read.
        level: bytes that have arrived, less `taken`, at the last count. Each call notes the level at which it begins,
            because what arrived before belongs to other calls.
        looked: when that count was made.
    """

    remote: Remote
    since: float
    handles: tuple[Handle, ...] = ()
    calls: dict[UnfinishedCall, None] = field(default_factory=dict)
    taken: int = 0
    level: int = 0
    looked: float = -1.0

    def look(self, now: float) -> None:
        """Counts the bytes that have arrived."""
        self.looked = now
        arrived = sockets.received(self.handles)
        if arrived is None:
            self.begin_again(now)
        else:
            self.level = arrived - self.taken

    def begin_again(self, now: float) -> None:
        """The connection is closed. A new one may come from the same address and port."""
        self.since = now
        self.handles = ()
        self.taken = self.level = 0
        for call in self.calls:
            call.level = 0

    @property
    def held(self) -> int:
        """Bytes that its unfinished calls may hold."""
        return self.level - min((call.level for call in self.calls), default=self.level)


class UnfinishedCall:
    """One call for which gRPC may hold bytes.

    Attributes:
        level: that of its connection when the call began.
    """

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._since = connection.since
        self._read = 0
        self._limit: asyncio.Timeout | None = None
        self.level = connection.level
        connection.calls[self] = None

    def took(self, nbytes: int) -> None:
        """A message was read. While the call is unfinished, its bytes count as held until `forget`."""
        self._read += nbytes
        if self not in self._connection.calls:
            self.forget()

    def forget(self) -> None:
        """The messages that were read are no longer in memory."""
        if self._connection.since == self._since:  # otherwise they came on an earlier connection
            self._connection.taken += self._read
        self._read = 0

    def finish(self) -> None:
        """The call is no longer unfinished: from now on, others bound what its caller sends."""
        self.forget()
        self._connection.calls.pop(self, None)

    @asynccontextmanager
    async def until_hung_up(self) -> AsyncIterator[None]:
        """A context for all that serves the call, except for telling the caller of an error.

        Raises:
            BusyError: the connection was closed for what it holds. The caller must be told of it: gRPC may notice that
                the connection is closed only when it writes, and holds everything until then, up to 20 s.
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
            self._limit.reschedule(0.0)


class Unfinished:
    """Counts what the unfinished calls of one server hold, and closes the connections that hold too much.

    Args:
        limits: the bytes that are allowed.
        find: searches for the sockets of this process; it may return an earlier result again.
        clock: the monotonic clock.
    """

    def __init__(
        self, limits: Limits, find: Callable[[], Found] = SOCKETS.find, clock: Callable[[], float] = time.monotonic
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
        """A context for a call of `peer`, as gRPC writes it; entered before anything of the request is read."""
        one = UnfinishedCall(self._connection(parse_peer(peer)))
        self._look_in(LOOK_SECONDS)
        try:
            yield one
        finally:
            one.finish()

    def look(self) -> None:
        """Counts what has arrived, and closes the connections that hold too much."""
        _n = self._clock()
        if any(one.since >= self._found.taken for one in self._connections.values()):
            self._find_sockets()
        now = _n
        busy = {remote: one for remote, one in self._connections.items() if one.calls and one.handles}
        for one in busy.values():
            one.look(now)
        for remote in excess({remote: one.held for remote, one in busy.items()}, self._limits):
            self._hang_up(busy[remote], now)

    def _connection(self, remote: Remote) -> _Connection:
        now = self._clock()
        one = self._connections.setdefault(remote, _Connection(remote, now))
        if one.handles and now - one.looked > LOOK_SECONDS:
            one.look(now)
        return one

    def _look_in(self, seconds: float) -> None:
        if self._timer is None and self._port:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look_and_go_on)

    def _look_and_go_on(self) -> None:
        self._timer = None
        began = self._clock()
        self.look()
        if any(one.calls or one.since >= self._found.taken for one in self._connections.values()):
            self._look_in(max(LOOK_SECONDS, _PAUSE * (self._clock() - began)))

    def _find_sockets(self) -> None:
        """Finds the sockets of new connections, and forgets connections that are closed."""
        found = self._find()
        if found is self._found:
            return
        self._found = found
        here = found.by_port.get(self._port, {})
        for remote, one in list(self._connections.items()):
            if one.since >= found.taken:
                continue
            one.handles = one.handles or here.get(remote, ())
            if remote not in here and not one.calls:
                del self._connections[remote]

    def _hang_up(self, one: _Connection, now: float) -> None:
        told = "closed the connection of %s: its unfinished requests hold %.0f MiB"
        logger.warning(told, one.remote, one.held / (1 << 20))
        sockets.hang_up(one.handles)
        one.begin_again(now)
        for call in one.calls:
            call.hang_up()
