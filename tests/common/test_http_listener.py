"""The listening socket of HTTP servers: whose connections it accepts, and where it listens."""

import resource
import socket
from contextlib import ExitStack, suppress

import pytest

from averaging.errors import ListenError
from averaging.http_server import HttpListener, _with_descriptors, listening, network_of


def accepted(listener: HttpListener, clients: ExitStack, host: str, count: int) -> list[socket.socket]:
    """What it accepts of so many connections of an address."""
    found = []
    for _ in range(count):
        clients.enter_context(socket.create_connection(listener.getsockname(), 30, (host, 0)))
        with suppress(BlockingIOError):
            found.append(clients.enter_context(listener.accept()[0]))
    return found


def test_without_free_descriptors_a_connection_is_refused_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        listener = stack.enter_context(listening("127.0.0.1:0"))
        clients = [stack.enter_context(socket.create_connection(listener.getsockname(), 30)) for _ in range(3)]
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (clients[-1].fileno() + 1, limits[1]))
        with suppress(OSError):
            while True:
                stack.enter_context(socket.socket())
        for client in clients:
            with pytest.raises(BlockingIOError):
                listener.accept()
            assert client.recv(1) == b"", "it is closed"
    assert [record.message for record in caplog.records] == [
        "the HTTP server refuses connections: this process may open no more files; raise its limit (ulimit -n)"
    ]


def test_few_addresses_with_many_connections_leave_room_for_others(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listening("127.0.0.1:0"))
        listener.limit(16, b"")
        taken = [accepted(listener, stack, f"127.0.0.{number}", 20) for number in (2, 3, 4)]
        assert [len(each) for each in taken] == [8, 4, 2]
        assert len(accepted(listener, stack, "127.0.0.5", 1)) == 1
        taken[0].pop().close()
        assert len(accepted(listener, stack, "127.0.0.6", 1)) == 1, "a closed connection does not count"
    assert [record.message for record in caplog.records] == [
        "the HTTP server refuses connections: 127.0.0.2 has as many connections as are left for others (8 are open)"
    ]


@pytest.mark.parametrize(
    ("limits", "connections", "raised", "most"),
    [
        ((512, 4096), 100, 512, 100),
        ((512, 4096), 400, 800, 400),
        ((1024, 1024), 1024, 1024, 768),
        ((512, 4096), 1 << 16, 4096, 3072),
        ((512, resource.RLIM_INFINITY), 1000, 2000, 1000),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1000, resource.RLIM_INFINITY, 1000),
    ],
)
def test_connections_stay_below_the_limit_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], connections: int, raised: int, most: int
) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: now.append(new))
    assert _with_descriptors(connections) == most
    assert now[-1] == (raised, limits[1])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::2:3:4:5", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
    ],
)
def test_addresses_that_one_client_can_have(one: str, other: str, same: bool) -> None:
    assert (network_of(one) == network_of(other)) == same


@pytest.mark.parametrize("address", ["[::1]:0", "localhost:0", "127.0.0.1:0"])
def test_a_socket_listens_at_the_address(address: str) -> None:
    with listening(address) as listener:
        host, port = listener.getsockname()[:2]
        socket.create_connection((host, port), 5.0).close()
        with pytest.raises(ListenError, match="choose another port"):
            listening(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
