"""What unfinished calls hold, which connections are closed for it, and how their sockets are found."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from averaging.errors import BusyError
from averaging.transport.grpc import unfinished_calls
from averaging.transport.grpc.unfinished_calls import (
    ByteLimits,
    Remote,
    SocketHandle,
    SocketTable,
    UnfinishedCalls,
    excess,
    parse_peer,
)

LIMITS = ByteLimits(per_connection=10, per_host=15, in_all=30)


@pytest.mark.parametrize(
    ("held", "closed"),
    [
        ({}, []),
        ({"a:1": 10, "b:1": 10, "c:1": 10}, []),
        ({"a:1": 11, "b:1": 10}, ["a:1"]),
        ({"a:1": 8, "a:2": 7}, []),
        ({"a:1": 8, "a:2": 7, "a:3": 1}, ["a:1"]),
        ({"a:1": 8, "a:2": 7, "a:3": 9, "b:1": 10}, ["a:3"]),
        ({"a:1": 8, "a:2": 9, "a:3": 10, "a:4": 2}, ["a:3", "a:2"]),
        ({"a:1": 12, "a:2": 7, "a:3": 7}, ["a:1"]),  # what is closed no longer counts
        ({"a:1": 9, "b:1": 9, "c:1": 9, "d:1": 5}, ["a:1"]),
        ({"a:1": 10, "b:1": 6, "b:2": 7, "c:1": 9}, ["b:2"]),  # not the largest, but of the host that holds the most
    ],
)
def test_the_largest_connections_are_closed_until_the_rest_is_within_the_limits(
    held: dict[str, int], closed: list[str]
) -> None:
    named = {Remote(name[0], int(name[2])): nbytes for name, nbytes in held.items()}
    assert [str(remote) for remote in excess(named, LIMITS)] == closed


@pytest.mark.parametrize(
    ("peer", "address", "port"),
    [
        ("ipv4:192.0.2.7:4222", "192.0.2.7", 4222),
        ("ipv6:%5B2001:db8::7%5D:4222", "2001:db8::7", 4222),
        ("ipv6:[2001:db8::7]:4222", "2001:db8::7", 4222),
        ("ipv6:%5Bfe80::7%25eth0%5D:1", "fe80::7", 1),
        ("ipv6:%5B::ffff:192.0.2.7%5D:1", "192.0.2.7", 1),
        ("", "", 0),
        ("unknown", "unknown", 0),
        ("unix:/tmp/socket", "unix:/tmp/socket", 0),
        ("ipv4:192.0.2.7:", "ipv4:192.0.2.7:", 0),
    ],
)
def test_grpc_s_text_for_a_caller_is_parsed(peer: str, address: str, port: int) -> None:
    assert parse_peer(peer) == Remote(address, port)


class Connection:
    """A connection on loopback; `own` is the accepted end."""

    def __init__(self, stack: ExitStack, family: socket.AddressFamily, host: str, dual: bool) -> None:
        self._stack = stack
        self._listener = stack.enter_context(
            socket.create_server((host, 0), family=family, dualstack_ipv6=dual, backlog=1)
        )
        self.port = self._listener.getsockname()[1]
        self._where = "127.0.0.1" if dual else host
        self._connect(0)
        self.remote = Remote(self._where, self.other.getsockname()[1])

    def _connect(self, port: int) -> None:
        self.other = self._stack.enter_context(
            socket.create_connection((self._where, self.port), source_address=(self._where, port))
        )
        self.own = self._stack.enter_context(self._listener.accept()[0])

    @property
    def handle(self) -> SocketHandle:
        status = os.fstat(self.own.fileno())
        return SocketHandle(self.own.fileno(), (status.st_dev, status.st_ino), (self.port, self.remote))

    def arrives(self, nbytes: int) -> None:
        self.other.sendall(bytes(nbytes))
        while nbytes:
            nbytes -= len(self.own.recv(nbytes))

    def connect_again(self) -> None:
        """Closes it, and connects from the same address and port."""
        self.other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no TIME_WAIT
        self.other.close()
        self.own.close()
        self._connect(self.remote.port)


@pytest.fixture(params=["IPv4", "IPv6", "IPv4 within IPv6"])
def connection(request: pytest.FixtureRequest) -> Iterator[Connection]:
    family, host = (socket.AF_INET, "127.0.0.1") if request.param == "IPv4" else (socket.AF_INET6, "::1")
    dual = request.param == "IPv4 within IPv6"
    with ExitStack() as stack:
        yield Connection(stack, family, "::" if dual else host, dual)


def table() -> SocketTable:
    table = SocketTable()
    table.search()
    return table


def test_the_socket_of_a_connection_is_found_and_counts_what_has_arrived(connection: Connection) -> None:
    (handle,) = table().of(connection.port, connection.remote)
    assert handle == connection.handle
    assert handle.received() == 0
    connection.other.sendall(bytes(1000))
    connection.own.recv(1)
    assert handle.received() == 1000  # also what is not read


def test_a_connection_is_shut_down_and_its_socket_remains_open(connection: Connection) -> None:
    connection.handle.hang_up()
    assert connection.other.recv(1) == b""
    assert connection.own.recv(1) == b""
    assert connection.handle.received() is None
    connection.other.close()
    connection.handle.hang_up()  # it is no longer connected


def test_another_socket_or_file_with_the_same_descriptor_is_left_alone(connection: Connection) -> None:
    handle = connection.handle
    device, inode = handle.identity
    another = replace(handle, identity=(device, inode + 1))
    assert another.received() is None
    another.hang_up()
    connection.other.sendall(b"x")
    assert connection.own.recv(1) == b"x"
    assert replace(handle, descriptor=1 << 20).received() is None


def test_a_later_search_sees_what_has_closed_and_what_is_new(connection: Connection) -> None:
    sockets = table()
    (before,) = sockets.of(connection.port, connection.remote)
    connection.connect_again()
    sockets.search()
    (after,) = sockets.of(connection.port, connection.remote)
    assert before != after == connection.handle
    connection.own.close()
    sockets.search()
    assert sockets.of(connection.port, connection.remote) == ()


def test_a_search_keeps_the_locks_of_files(tmp_path: Path) -> None:
    """A process loses its POSIX locks on a file when it closes any descriptor of that file."""
    with (tmp_path / "file").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        table()
        another = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        ran = subprocess.run([sys.executable, "-c", another, file.name], capture_output=True, text=True, check=False)
    assert "BlockingIOError" in ran.stderr


class Account:
    """The account of a server that accepts `connection`, with limits that nothing here exceeds."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.unfinished = UnfinishedCalls(ByteLimits(1 << 40, 1 << 40, 1 << 40), clock=lambda: 0.0)
        self.unfinished.start(connection.port)
        self.peer = f"ipv4:{connection.remote.address}:{connection.remote.port}"

    def held(self) -> int:
        self.unfinished.look()
        return self.unfinished._connections[self.connection.remote].charged


@pytest.fixture
def account() -> Iterator[Account]:
    with ExitStack() as stack:
        account = Account(Connection(stack, socket.AF_INET, "127.0.0.1", dual=False))
        yield account
        account.unfinished.stop()


@pytest.mark.asyncio
async def test_what_arrives_while_a_call_is_unfinished_is_held_for_it(account: Account) -> None:
    account.connection.arrives(10)  # of a new connection also what came before its first call was seen
    with account.unfinished.call(account.peer) as call:
        assert account.held() == 10
        account.connection.arrives(100)
        assert account.held() == 110
        call.took(60)
        assert account.held() == 110  # a message that was read is in memory as well
        call.release()
        assert account.held() == 50
        call.took(20)
        call.finish()
        assert account.held() == 0
        call.took(30)
    assert account.held() == 0


@pytest.mark.asyncio
async def test_what_came_before_a_call_is_not_held_for_it(account: Account) -> None:
    with account.unfinished.call(account.peer):
        assert account.held() == 0  # the socket is found
    account.connection.arrives(1000)
    with account.unfinished.call(account.peer):
        assert account.held() == 0
        account.connection.arrives(10)
        assert account.held() == 10


@pytest.mark.asyncio
async def test_what_arrives_before_a_socket_is_found_is_held(connection: Connection) -> None:
    """A search may be too recent for another one."""
    now = iter([0.0, 1.0, 2.0, 12.0, 12.0])
    unfinished = UnfinishedCalls(ByteLimits(100, 100, 100), lambda: next(now))
    unfinished.start(connection.port)
    with unfinished.call("ipv4:192.0.2.7:1"):
        connection.connect_again()
        with unfinished.call(f"ipv4:{connection.remote.address}:{connection.remote.port}"):
            connection.arrives(101)
            assert connection.handle.received() == 101
            unfinished.look()
            assert connection.handle.received() is None
    unfinished.stop()


@pytest.mark.asyncio
async def test_what_belongs_to_calls_that_ended_is_not_held_for_those_that_overlapped(account: Account) -> None:
    with ExitStack() as calls:
        for _ in range(3):
            following = ExitStack()
            following.enter_context(account.unfinished.call(account.peer))
            calls.close()
            assert account.held() == 0
            account.connection.arrives(100)
            assert account.held() == 100
            calls.push(following)


@pytest.mark.asyncio
async def test_parts_that_are_read_are_not_held(account: Account) -> None:
    """Parts of a sender that a round has accepted, beside another call that is unfinished."""
    with account.unfinished.call(account.peer), account.unfinished.call(account.peer) as parts:
        parts.finish()
        for _ in range(3):
            account.connection.arrives(100)
            assert account.held() == 100
            parts.took(100)
            assert account.held() == 0


@pytest.mark.asyncio
async def test_a_new_connection_from_the_same_address_and_port_has_an_account_of_its_own(account: Account) -> None:
    with account.unfinished.call(account.peer) as earlier:
        account.connection.arrives(1000)
        assert account.held() == 1000
        account.connection.connect_again()
        with account.unfinished.call("ipv4:192.0.2.7:1"), account.unfinished.call(account.peer):
            account.connection.arrives(10)
            account.unfinished.look()  # it searches for the other one, and then sees that this one is closed
            assert account.held() == 10
            earlier.took(1000)
            earlier.finish()
            assert account.held() == 10


@pytest.mark.asyncio
async def test_a_second_connection_from_the_same_address_and_port_is_not_overlooked() -> None:
    """It leads to another address of this machine; gRPC's text for its caller is the same."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", 0)))
        source, accepted = ("127.0.0.1", 0), []

        def connect(host: str) -> socket.socket:
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(source)
            one.connect((host, listener.getsockname()[1]))
            accepted.append(stack.enter_context(listener.accept()[0]))
            return one

        first = connect("127.0.0.1")
        source = first.getsockname()
        unfinished = UnfinishedCalls(ByteLimits(100, 100, 100), clock=lambda: 0.0)
        unfinished.start(listener.getsockname()[1])
        stack.callback(unfinished.stop)
        peer = f"ipv4:{source[0]}:{source[1]}"
        with unfinished.call(peer):
            unfinished.look()
            second = connect("127.0.0.2")
            second.sendall(bytes(101))
            accepted[1].recv(1)
            with unfinished.call(peer):
                unfinished.look()
        assert first.recv(1) == b""
        with unfinished.call(peer):
            unfinished.look()
        assert second.recv(1) == b""


@pytest.mark.asyncio
async def test_a_process_without_free_descriptors_keeps_its_connections_and_its_counts(account: Account) -> None:
    with account.unfinished.call(account.peer):
        account.connection.arrives(100)
        assert account.held() == 100
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                table()
            with account.unfinished.call(account.peer):
                assert account.held() == 100
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        account.connection.arrives(10)
        assert account.held() == 110


@pytest.mark.asyncio
async def test_the_calls_of_a_connection_that_is_closed_for_what_it_holds_end(account: Account) -> None:
    """gRPC may notice only when it writes that the connection is closed."""
    account.unfinished._limits = ByteLimits(per_connection=100, per_host=1 << 40, in_all=1 << 40)
    account.connection.arrives(101)

    async def serve() -> None:
        with account.unfinished.call(account.peer) as call, account.unfinished.call(account.peer) as finished:
            finished.finish()
            async with asyncio.timeout(20), finished.until_hung_up(), call.until_hung_up():
                account.unfinished.look()
                await asyncio.Event().wait()

    with pytest.raises(BusyError, match="hold too much memory"):
        await serve()
    assert account.connection.other.recv(1) == b""


@pytest.mark.asyncio
async def test_connections_that_are_closed_are_forgotten(account: Account) -> None:
    with account.unfinished.call(account.peer), account.unfinished.call("ipv4:192.0.2.7:1"):
        account.unfinished.look()
    with account.unfinished.call("ipv4:192.0.2.7:2"):
        account.unfinished.look()
        assert set(account.unfinished._connections) == {account.connection.remote, Remote("192.0.2.7", 2)}


@pytest.mark.asyncio
async def test_on_a_system_without_proc_nothing_is_counted_and_nothing_closed(
    account: Account, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(unfinished_calls, "_DESCRIPTORS", str(tmp_path / "absent"))
    unfinished = UnfinishedCalls(ByteLimits(1, 1, 1), clock=lambda: 0.0)
    for number in range(3):
        with unfinished.call(account.peer), unfinished.call(f"ipv4:192.0.2.7:{number}") as call:
            account.connection.arrives(1000)
            unfinished.look()
            call.took(10)
            unfinished.look()
            assert not any(one.charged for one in unfinished._connections.values())
    with unfinished.call("ipv4:192.0.2.8:1"):
        unfinished.look()
        assert len(unfinished._connections) == 1
    assert not caplog.records
    account.connection.other.setblocking(False)
    with pytest.raises(BlockingIOError):
        account.connection.other.recv(1)
