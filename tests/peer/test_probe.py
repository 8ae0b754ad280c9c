"""What a peer answers to a doctor: it calls back only the address that calls it, one connection a call."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from averaging import Peer
from averaging.errors import CallRefusedError, ProtocolViolationError
from averaging.probe import (
    DIAL_BACK,
    DIALS_PER_HOST,
    ECHO,
    MAX_ECHO_BYTES,
    NONCE_BYTES,
    DialOutcome,
    dial_back,
    greeting_of,
)
from averaging.rpc import RpcChannel
from averaging.wire import probe_pb2
from tests.support.certificates import tls

HERE, NONCE = "ipv4:127.0.0.1", bytes(range(NONCE_BYTES))


async def dial(endpoint: str, host: str = HERE, *, loopback: bool = True, nonce: bytes = NONCE) -> Any:
    return await dial_back(host, endpoint, nonce, None, loopback=loopback)


@asynccontextmanager
async def greeting(nonce: bytes) -> AsyncIterator[int]:
    """The port of a listener like that of the command."""

    def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_of(nonce))
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_the_listener_of_the_caller_is_recognised() -> None:
    async with greeting(NONCE) as port:
        reached, another = await dial(f"127.0.0.1:{port}"), await dial(f"127.0.0.1:{port}", nonce=bytes(NONCE_BYTES))
    assert reached.outcome == DialOutcome.REACHED
    assert reached.seconds > 0
    assert another.outcome == DialOutcome.OTHER


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
    assert (await dial("both.example:80", "ipv4:203.0.113.7")).outcome == DialOutcome.REFUSED
    assert {*dialled} == {"203.0.113.7"}


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


async def test_a_listener_without_tls_has_no_certificate_for_its_host() -> None:
    async with greeting(NONCE) as port:
        plain = await dial_back(HERE, f"127.0.0.1:{port}", NONCE, tls("127.0.0.1"), loopback=True)
    assert plain.outcome == DialOutcome.CERTIFICATE


async def test_a_real_peer_calls_back_a_few_at_a_time_and_asks_for_the_run() -> None:
    waiting: list[asyncio.StreamWriter] = []
    all_wait = asyncio.Event()

    def keep(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting.append(writer)
        if len(waiting) == DIALS_PER_HOST:
            all_wait.set()

    async with (
        await asyncio.start_server(keep, "127.0.0.1", 0) as server,
        Peer([torch.ones(2)], run_id="run") as peer,
        RpcChannel(peer.endpoint) as to,
    ):
        port = server.sockets[0].getsockname()[1]

        async def ask(run_id: str = "run", host: str = "127.0.0.1") -> probe_pb2.DialBackReply:
            request = probe_pb2.DialBackRequest(run_id=run_id, endpoint=f"{host}:{port}", nonce=NONCE)
            return await to.call(DIAL_BACK, request, timeout=20)

        with pytest.raises(CallRefusedError, match="another run"):
            await ask("other")
        assert (await ask(host="127.0.0.2")).outcome == DialOutcome.REFUSED  # loopback is one machine
        calls = [asyncio.create_task(ask()) for _ in range(DIALS_PER_HOST)]
        await all_wait.wait()
        with pytest.raises(CallRefusedError, match="at this moment"):
            await ask()
        for writer in waiting:
            writer.close()
        assert [(await call).outcome for call in calls] == [DialOutcome.OTHER] * DIALS_PER_HOST
        foreign = asyncio.create_task(ask(host="192.0.2.200"))  # it is dialled at the address of the caller
        assert (await foreign).outcome == DialOutcome.NOT_YOURS
        waiting[-1].close()


async def test_echoes_have_the_bytes_that_were_asked_for() -> None:
    async with Peer([torch.ones(2)], run_id="run") as peer, RpcChannel(peer.endpoint) as to:
        request = probe_pb2.EchoRequest(padding=os.urandom(MAX_ECHO_BYTES), reply_bytes=7)
        assert len((await to.call(ECHO, request, timeout=20)).padding) == 7
        with pytest.raises(CallRefusedError, match="at most 1048576 are sent"):
            await to.call(ECHO, probe_pb2.EchoRequest(reply_bytes=MAX_ECHO_BYTES + 1), timeout=20)
        with pytest.raises(CallRefusedError):
            await to.call(ECHO, probe_pb2.EchoRequest(padding=bytes(MAX_ECHO_BYTES + 2048)), timeout=20)
