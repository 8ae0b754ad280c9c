"""Whether a connection comes from this user on this machine: from the table of sockets, and with real ones."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys

import pytest

from averaging.control import is_own_user
from averaging.control.socket_owner import SocketEntry, is_owned_by, parse_connection, parse_table

HERE, THERE = ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("192.0.2.9")
CALLER, PEER = (HERE, 40000), (HERE, 4222)
SERVED = SocketEntry(PEER, CALLER, 1000)


@pytest.mark.parametrize(
    ("sockets", "owned"),
    [
        ([SERVED, SocketEntry(CALLER, PEER, 1000)], True),
        ([SERVED, SocketEntry(CALLER, PEER, 0)], True),
        ([SERVED, SocketEntry(CALLER, PEER, 1001)], False),  # another user of this machine
        ([SERVED], False),  # a caller elsewhere whose address was translated to one of this machine
        ([SERVED, SocketEntry(CALLER, (THERE, 443), 1000)], False),  # ... to that of a connection of this user
        ([SERVED, SocketEntry(CALLER, PEER, None)], False),  # closed by its process
        ([SocketEntry(CALLER, PEER, 1000)], False),  # not served here
        # The caller has the port of another connection of this machine, to another address of the peer.
        ([SERVED, SocketEntry((THERE, 4222), CALLER, 0), SocketEntry(CALLER, PEER, 1000)], False),
        ([], False),
    ],
)
def test_who_holds_the_other_end_of_a_connection(sockets: list[SocketEntry], owned: bool) -> None:
    assert is_owned_by({1000, 0}, CALLER, sockets) is owned


def test_a_table_of_linux_is_read() -> None:
    header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
    line = "   0: 0100007F:107E 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 777 1 0 20"
    six = line.replace("0100007F:107E", "00000000000000000000000001000000:107E").replace("777", "0")
    mapped = line.replace("0100007F:107E", "0000000000000000FFFF00000100007F:107E")
    listening = line.replace(" 01 ", " 0A ")
    if sys.byteorder == "little":
        assert parse_table([header, line, six, mapped, listening]) == [
            SERVED,
            SocketEntry((ipaddress.ip_address("::1"), 4222), CALLER, None),
            SERVED,
        ]


@pytest.mark.parametrize(
    ("connection", "address"),
    [
        ("ipv4:127.0.0.1:40000", CALLER),
        ("ipv6:%5B::1%5D:40000", (ipaddress.ip_address("::1"), 40000)),
        ("ipv6:%5B::ffff:127.0.0.1%5D:40000", CALLER),
        ("unix:", None),
        ("", None),
        ("ipv4:nowhere:1", None),
    ],
)
def test_the_names_of_connections(connection: str, address: object) -> None:
    assert parse_connection(connection) == address


NOBODY = 65534


@pytest.mark.asyncio
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_callers_are_told_apart_by_their_user(host: str) -> None:
    """A child that gives up its rights, as far as this process may start one, is another user."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    other = os.geteuid() == 0
    with socket.create_server((host, 0), family=family) as server:
        server.settimeout(30.0)
        address = server.getsockname()[:2]
        drop = f"os.setuid({NOBODY}); " if other else ""
        code = (
            f"import encodings.idna, os, socket, sys; {drop}s = socket.create_connection({address!r}); sys.stdin.read()"
        )
        child = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs in this loop
            [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE
        )
        with child, socket.create_connection(address) as own:
            callers: dict[int, socket.socket] = {}
            while len(callers) < 2:
                accepted, name = server.accept()
                callers[name[1]] = accepted
            own_port = own.getsockname()[1]
            for port in callers:
                named = f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
                assert await is_own_user(named) is (port == own_port or not other)
            for accepted in callers.values():
                accepted.close()
            child.communicate(b"")


@pytest.mark.asyncio
async def test_callers_from_elsewhere_cost_no_look_at_the_table() -> None:
    def read() -> list[SocketEntry]:
        raise AssertionError("read")

    assert not await is_own_user("ipv4:192.0.2.9:40000", read)
