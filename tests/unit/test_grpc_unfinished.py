"""Which connections are closed for what they hold, and what the system tells of their sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from averaging.errors import BusyError
from averaging.transport.grpc import sockets
from averaging.transport.grpc.sockets import Remote, Sockets, hang_up, parse_peer, received
from averaging.transport.grpc.unfinished import LOOK_SECONDS, Limits, Unfinished, excess, host_of_peer

LIMITS = Limits(per_connection=10, per_host=15, in_all=30)


@pytest.mark.parametrize(
    ("held", "gone"),
    [
        ({}, []),
        ({"a:1": 10, "b:1": 10, "c:1": 10}, []),
        ({"a:1": 11, "b:1": 10}, ["a:1"]),
        ({"a:1": 8, "a:2": 7}, []),
        ({"a:1": 8, "a:2": 7, "a:3": 1}, ["a:1"]),
        ({"a:1": 8, "a:2": 7, "a:3": 9, "b:1": 10}, ["a:3"]),
        ({"a:1": 8, "a:2": 9, "a:3": 10, "a:4": 2}, ["a:3", "a:2"]),
        ({"a:1": 12, "a:2": 7, "a:3": 7}, ["a:1"]),  # what is closed counts no longer
        ({"a:1": 9, "b:1": 9, "c:1": 9, "d:1": 5}, ["a:1"]),
        ({"a:1": 10, "b:1": 6, "b:2": 7, "c:1": 9}, ["b:2"]),  # not the largest, but of the host that has the most
    ],
)
def test_the_largest_connections_go_until_the_rest_is_small_enough(held: dict[str, int], gone: list[str]) -> None:
    assert excess(held, {peer: host_of_peer(peer) for peer in held}, LIMITS) == gone


@pytest.mark.parametrize(
    ("peer", "address", "port"),
    [
        ("ipv4:192.0.2.7:4222", "192.0.2.7", 4222),
        ("ipv6:%5B2001:db8::7%5D:4222", "2001:db8::7", 4222),
        ("ipv6:[2001:db8::7]:4222", "2001:db8::7", 4222),
        ("ipv6:%5Bfe80::7%25eth0%5D:1", "fe80::7", 1),
        ("ipv6:%5B::ffff:192.0.2.7%5D:1", "192.0.2.7", 1),
    ],
)
def test_grpc_s_words_for_the_other_end_are_understood(peer: str, address: str, port: int) -> None:
    assert parse_peer(peer) == Remote(address, port)


@pytest.mark.parametrize("peer", ["", "unknown", "unix:", "unix:/tmp/socket", "ipv4:192.0.2.7:"])
def test_what_is_no_address_is_none(peer: str) -> None:
    assert parse_peer(peer) is None


class Connection:
    """One on loopback; `own` listens."""

    def __init__(self, stack: ExitStack, family: socket.AddressFamily, host: str, dual: bool) -> None:
        listener = stack.enter_context(socket.create_server((host, 0), family=family, dualstack_ipv6=dual, backlog=1))
        self.port = listener.getsockname()[1]
        where = "127.0.0.1" if dual else host
        self.other = stack.enter_context(socket.create_connection((where, self.port)))
        self.own = stack.enter_context(listener.accept()[0])
        self.remote = Remote(where, self.other.getsockname()[1])


@pytest.fixture(params=["IPv4", "IPv6", "IPv4 within IPv6"])
def connection(request: pytest.FixtureRequest) -> Iterator[Connection]:
    family, host = (socket.AF_INET, "127.0.0.1") if request.param == "IPv4" else (socket.AF_INET6, "::1")
    dual = request.param == "IPv4 within IPv6"
    with ExitStack() as stack:
        yield Connection(stack, family, "::" if dual else host, dual)


def test_a_connection_s_socket_is_found_and_tells_what_has_arrived(connection: Connection) -> None:
    descriptors = Sockets().find().by_port[connection.port][connection.remote]
    assert descriptors == (connection.own.fileno(),)
    assert received(descriptors, connection.port, connection.remote) == 0
    connection.other.sendall(bytes(1000))
    connection.own.recv(1)
    assert received(descriptors, connection.port, connection.remote) == 1000  # also what is not read


def test_a_connection_is_hung_up_and_its_socket_stays_its_owner_s(connection: Connection) -> None:
    descriptors = (connection.own.fileno(),)
    hang_up(descriptors, connection.port, connection.remote)
    assert connection.other.recv(1) == b""
    assert connection.own.recv(1) == b""
    os.fstat(connection.own.fileno())


def test_another_socket_under_the_same_number_is_left_alone(connection: Connection) -> None:
    descriptors = (connection.own.fileno(),)
    for port, remote in (
        (connection.port + 1, connection.remote),
        (connection.port, Remote(connection.remote.address, connection.remote.port + 1)),
    ):
        assert received(descriptors, port, remote) is None
        hang_up(descriptors, port, remote)
    connection.other.sendall(b"x")
    assert connection.own.recv(1) == b"x"
    with Path(os.devnull).open() as file:
        assert received((file.fileno(),), connection.port, connection.remote) is None
    assert received((1 << 20,), connection.port, connection.remote) is None


def test_sockets_are_looked_up_a_fiftieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = 100.0, 0

    def look_up() -> dict[int, dict[Remote, tuple[int, ...]]]:
        nonlocal now, looks
        now += 0.01
        looks += 1
        return {}

    monkeypatch.setattr(sockets, "_look_up", look_up)
    monkeypatch.setattr("averaging.transport.grpc.sockets.time", SimpleNamespace(monotonic=lambda: now))
    found = Sockets()
    assert found.find().taken == 100.0
    for _ in range(49):
        now += 0.01
        assert found.find().taken == 100.0
    now += 0.02
    assert found.find().taken > 100.5
    assert looks == 2


class Account:
    """Of a server that accepts `connection`, with limits that nothing here reaches."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.unfinished = Unfinished(Limits(1 << 40, 1 << 40, 1 << 40))
        self.unfinished.start(connection.port)
        self.peer = f"ipv4:{connection.remote.address}:{connection.remote.port}"

    def arrives(self, nbytes: int) -> None:
        self.connection.other.sendall(bytes(nbytes))
        while nbytes:
            nbytes -= len(self.connection.own.recv(nbytes))

    async def held(self) -> int:
        """After the next look."""
        await asyncio.sleep(2 * LOOK_SECONDS)
        return self.unfinished._connections[self.peer].held


@pytest.fixture
def account() -> Iterator[Account]:
    with ExitStack() as stack:
        account = Account(Connection(stack, socket.AF_INET, "127.0.0.1", dual=False))
        yield account
        account.unfinished.stop()


@pytest.mark.asyncio
async def test_what_arrives_while_a_call_is_unfinished_is_held_for_it(account: Account) -> None:
    account.arrives(10)  # of a new connection also what came before its first call was seen
    with account.unfinished.call(account.peer) as call:
        assert await account.held() == 10
        account.arrives(100)
        assert await account.held() == 110
        call.took(60)
        assert await account.held() == 110  # a message that was read is in memory as well
        call.forget()
        assert await account.held() == 50
        call.took(20)
        call.finish()
        assert await account.held() == 0
        call.took(30)
    assert await account.held() == 0


@pytest.mark.asyncio
async def test_what_came_before_a_call_is_not_held_for_it(account: Account) -> None:
    with account.unfinished.call(account.peer):
        assert await account.held() == 0  # the socket is found
    account.arrives(1000)
    await asyncio.sleep(2 * LOOK_SECONDS)
    with account.unfinished.call(account.peer):
        assert await account.held() == 0
        account.arrives(10)
        assert await account.held() == 10


@pytest.mark.asyncio
async def test_what_belongs_to_calls_that_are_over_is_not_held_for_those_that_overlapped(account: Account) -> None:
    with ExitStack() as calls:
        for _ in range(3):
            following = ExitStack()
            following.enter_context(account.unfinished.call(account.peer))
            calls.close()
            assert await account.held() == 0
            account.arrives(100)
            assert await account.held() == 100
            calls.push(following)


@pytest.mark.asyncio
async def test_parts_that_are_read_make_room(account: Account) -> None:
    """Of a sender that a round has accepted, beside another call that is unfinished."""
    with account.unfinished.call(account.peer), account.unfinished.call(account.peer) as parts:
        parts.finish()
        for _ in range(3):
            account.arrives(100)
            assert await account.held() == 100
            parts.took(100)
            assert await account.held() == 0


@pytest.mark.asyncio
async def test_the_calls_of_a_connection_that_is_hung_up_end(account: Account) -> None:
    """gRPC may be slow to see that the connection is closed, but not once it has something to write."""
    account.unfinished._limits = Limits(per_connection=100, per_host=1 << 40, in_all=1 << 40)
    account.arrives(101)
    with account.unfinished.call(account.peer) as call, account.unfinished.call(account.peer) as finished:
        finished.finish()
        with pytest.raises(BusyError, match="too much of unfinished requests"):
            async with asyncio.timeout(20), finished.until_hung_up(), call.until_hung_up():
                await asyncio.Event().wait()
    assert account.connection.other.recv(1) == b""


@pytest.mark.asyncio
async def test_connections_that_are_gone_are_forgotten(account: Account) -> None:
    other = "ipv4:192.0.2.7:1"  # which nobody has
    with account.unfinished.call(account.peer), account.unfinished.call(other):
        await account.held()
    with account.unfinished.call("ipv4:192.0.2.7:2"):
        await account.held()
        await account.held()
    assert other not in account.unfinished._connections
    assert account.peer in account.unfinished._connections
