"""A peer calls back only the address that calls it, one connection a call, a few times a minute."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import Peer
from averaging.config import PeerConfig
from averaging.doctor.comparison import judge_call_back, judge_nat
from averaging.doctor.dial_back import (
    IN_ALL,
    NONCE_BYTES,
    PER_HOST,
    PERIOD_SECONDS,
    DialLimits,
    DialListener,
    DialOutcome,
    caller_address,
    dial_back,
    greeting_of,
)
from averaging.doctor.findings import Severity
from averaging.doctor.probe import DIAL_BACK
from averaging.doctor.tls import server_context
from averaging.errors import BusyError, CallRefusedError, ProtocolViolationError
from averaging.rpc import RpcChannel
from averaging.wire import probe_pb2
from tests.support.certificates import tls, write
from tests.support.doctors import about, examined
from tests.support.ports import free_address, free_port

HERE, NONCE = "ipv4:127.0.0.1", bytes(range(NONCE_BYTES))


class CountingServer:
    """Counts the connections to it."""

    def __init__(self) -> None:
        self.connections = 0

    def greet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.close()


@asynccontextmanager
async def counting(host: str = "127.0.0.1") -> AsyncIterator[tuple[CountingServer, int]]:
    counts = CountingServer()
    async with await asyncio.start_server(counts.greet, host, 0) as server:
        yield counts, server.sockets[0].getsockname()[1]


async def dial(endpoint: str, host: str = HERE, *, loopback: bool = True, nonce: bytes = NONCE) -> Any:
    return await dial_back(host, endpoint, nonce, None, DialLimits(), loopback=loopback)


@pytest.mark.asyncio
async def test_the_listener_of_the_caller_is_recognised() -> None:
    async with DialListener("127.0.0.1:0", None) as listener:
        endpoint = f"127.0.0.1:{listener.port}"
        began = time.monotonic()
        reached = await dial(endpoint, nonce=listener.nonce)
        took = time.monotonic() - began
        another = await dial(endpoint)
    assert reached.outcome is DialOutcome.REACHED
    assert 0 < reached.seconds <= took
    assert another.outcome is DialOutcome.OTHER


@pytest.mark.asyncio
async def test_one_connection_and_nothing_that_was_read_is_told() -> None:
    async with counting() as (counts, port):
        dialled = await dial(f"127.0.0.1:{port}")
    assert counts.connections == 1
    assert (dialled.outcome, dialled.reason) == (DialOutcome.OTHER, "")


@pytest.mark.asyncio
async def test_no_address_but_the_caller_s_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether another one is given by its number or by a name, also together with that of the caller."""
    real = socket.getaddrinfo

    def names(host: Any, *rest: Any, **more: Any) -> Any:
        addresses = {"other.example": ["127.0.0.1"], "both.example": ["127.0.0.1", "203.0.113.7"]}.get(host)
        if addresses is None:
            return real(host, *rest, **more)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", names)
    dialled: list[Any] = []

    async def record(host: str, *_: Any, **__: Any) -> Any:
        dialled.append(host)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", record)
    for endpoint in ("127.0.0.1:80", "other.example:80", "nobody.invalid:80", "169.254.169.254:80"):
        refused = await dial(endpoint, "ipv4:203.0.113.7")
        assert (refused.outcome, refused.at_caller) == (DialOutcome.NOT_YOURS, DialOutcome.REFUSED)
        assert "203.0.113.7" in refused.reason
    assert dialled == ["203.0.113.7"] * 4
    assert (await dial("both.example:80", "ipv4:203.0.113.7")).outcome is DialOutcome.REFUSED
    assert {*dialled} == {"203.0.113.7"}


@pytest.mark.asyncio
async def test_a_link_local_caller_is_dialled_over_the_interface_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled: list[Any] = []

    async def record(host: str, *_: Any, **__: Any) -> Any:
        dialled.append(host)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", record)
    found = await dial("[fe80::7%wlan0]:4222", "ipv6:%5Bfe80::7%25eth1%5D", loopback=False)
    assert found.outcome is DialOutcome.REFUSED
    assert dialled == ["fe80::7%eth1"]
    other = await dial("[fe80::8%wlan0]:4222", "ipv6:%5Bfe80::7%25eth1%5D", loopback=False)
    assert other.outcome is DialOutcome.NOT_YOURS


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("host", "endpoint", "loopback"),
    [
        (HERE, "127.0.0.1:80", False),
        ("ipv4:169.254.169.254", "169.254.169.254:80", True),
        ("ipv6:%5B::1%5D", "[::1]:80", False),
        ("", "127.0.0.1:80", True),
        ("unix:/tmp/socket", "127.0.0.1:80", True),
        (HERE, "127.0.0.1:0", True),
    ],
)
async def test_addresses_at_which_no_peer_can_be(host: str, endpoint: str, loopback: bool) -> None:
    with pytest.raises(ProtocolViolationError):
        await dial(endpoint, host, loopback=loopback)


@pytest.mark.asyncio
async def test_a_nonce_of_another_size_is_refused() -> None:
    with pytest.raises(ProtocolViolationError, match="nonce"):
        await dial("127.0.0.1:80", nonce=b"short")


def test_addresses_of_callers() -> None:
    assert str(caller_address("ipv4:192.0.2.7")) == "192.0.2.7"
    assert str(caller_address("ipv6:%5B2001:db8::7%5D")) == "2001:db8::7"
    assert str(caller_address("ipv6:%5B::ffff:192.0.2.7%5D")) == "192.0.2.7"
    assert caller_address("unix:") is None


def test_connections_back_are_limited_for_a_host_and_in_all() -> None:
    now = 0.0
    limits = DialLimits(lambda: now)
    for _ in range(PER_HOST):
        limits.take("a")
    with pytest.raises(BusyError, match="in a minute"):
        limits.take("a")
    for number in range(IN_ALL - PER_HOST):
        limits.take(str(number))
    with pytest.raises(BusyError, match=str(IN_ALL)):
        limits.take("b")
    now = PERIOD_SECONDS
    limits.take("a")


@pytest.mark.asyncio
async def test_a_real_peer_limits_them_and_asks_for_the_run() -> None:
    async with (
        counting() as (counts, port),
        Peer([torch.ones(2)], run_id="run") as peer,
        RpcChannel(peer.endpoint) as to,
    ):

        async def ask(run_id: str = "run", host: str = "127.0.0.1") -> probe_pb2.DialBackReply:
            request = probe_pb2.DialBackRequest(run_id=run_id, endpoint=f"{host}:{port}", nonce=NONCE)
            return await to.call(DIAL_BACK, request, timeout=20)

        with pytest.raises(CallRefusedError, match="another run"):
            await ask("other")
        assert (await ask(host="127.0.0.2")).outcome == DialOutcome.REFUSED  # loopback is one machine
        assert (await ask(host="192.0.2.200")).outcome == DialOutcome.NOT_YOURS
        for _ in range(PER_HOST - 2):
            await ask()
        with pytest.raises(CallRefusedError, match="ask again in a minute"):
            await ask()
        found = await examined(peer.endpoint, listen=free_address())
    assert counts.connections == PER_HOST - 1  # also for the foreign address, at that of the caller
    [call_back] = about(found, "call-back")
    assert call_back.severity is Severity.WARNING
    assert call_back.remedy == "ask again in a minute"


@pytest.mark.asyncio
async def test_with_tls_a_caller_is_called_back_at_the_hosts_of_its_certificate_only(tmp_path: Path) -> None:
    files: Any = write(tmp_path, "127.0.0.1")
    async with Peer([torch.ones(2)], run_id="run", **files) as peer:
        fits = await examined(peer.endpoint, listen=free_address(), **files)
        other = await examined(peer.endpoint, listen=free_address(), advertise=f"localhost:{free_port()}", **files)
    assert about(fits, "call-back")[0].severity is Severity.OK
    assert "its certificate is for 127.0.0.1" in about(other, "call-back")[0].text


@pytest.mark.asyncio
async def test_a_listener_whose_certificate_does_not_fit(tmp_path: Path) -> None:
    files: Any = write(tmp_path, "localhost")
    context = server_context(PeerConfig(run_id="run", **files))
    assert isinstance(context, ssl.SSLContext)
    async with DialListener("127.0.0.1:0", context) as listener:
        wrong = await dial_back(
            HERE, f"127.0.0.1:{listener.port}", listener.nonce, tls("127.0.0.1"), DialLimits(), loopback=True
        )
    async with DialListener("127.0.0.1:0", None) as listener:
        plain = await dial_back(
            HERE, f"127.0.0.1:{listener.port}", listener.nonce, tls("127.0.0.1"), DialLimits(), loopback=True
        )
    assert wrong.outcome is DialOutcome.CERTIFICATE
    assert plain.outcome is DialOutcome.CERTIFICATE


@pytest.mark.asyncio
async def test_a_listener_on_all_addresses_is_reached_over_both_families() -> None:
    async with DialListener("0.0.0.0:0", None) as listener:
        for host in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(host, listener.port)
            assert await reader.read() == greeting_of(listener.nonce)
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("outcome", "severity", "words"),
    [
        ("reached", Severity.FAILURE, "advertise 203.0.113.9:4222"),
        ("silent", Severity.FAILURE, "forward TCP port 4222"),
        ("", Severity.WARNING, "forward TCP port 4222"),
    ],
)
def test_a_nat_between_two_peers(outcome: str, severity: Severity, words: str) -> None:
    found = judge_nat(outcome, "10.0.0.5:4222", "203.0.113.9:4222", "b.example:4222")
    assert found.severity is severity
    assert "a NAT is between" in found.text
    assert words in found.remedy


@pytest.mark.parametrize("listening", [True, False])
@pytest.mark.parametrize("outcome", [*DialOutcome, "later"])
def test_every_outcome_has_its_finding(outcome: str, listening: bool) -> None:
    found = judge_call_back(outcome, "why", 0.1, "a.example:4222", "b.example:4222", listening=listening)
    fine = outcome == DialOutcome.REACHED or (outcome == DialOutcome.OTHER and not listening)
    assert (found.severity is Severity.OK) == fine
    assert bool(found.remedy) == (not fine)
