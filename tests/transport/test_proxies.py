"""Calls through an HTTP proxy that was asked for, and none through the proxies of other programs."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch

from averaging import Peer
from averaging.common.addresses import chosen_proxy, proxy_for
from averaging.errors import ConfigError, JoinError, PeerUnreachableError
from averaging.transport.grpc import GET_SCHEMA
from averaging.transport.grpc.channels import Channels
from tests.support.certificates import write
from tests.support.listening import listening
from tests.support.peers import average, enter
from tests.support.ports import free_address, free_port

PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "grpc_proxy", "NO_PROXY", "no_proxy")

NAME = "peer.invalid"
"""A name that only the proxy knows."""


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "AVERAGING_PROXY"):
        monkeypatch.delenv(name, raising=False)


@asynccontextmanager
async def connecting(answer: bytes = b"200 OK") -> AsyncIterator[tuple[str, list[str]]]:
    """The address of a proxy that leads all names to this machine, and the requests that it has seen."""
    seen: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        seen.append(request)
        writer.write(b"HTTP/1.1 " + answer + b"\r\n\r\n")
        if answer.startswith(b"200"):
            port = int(request.split()[1].rpartition(":")[2])
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionError):
                await asyncio.gather(copy(reader, other_writer), copy(other_reader, writer))

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while block := await source.read(1 << 16):
                sink.write(block)
                await sink.drain()
        finally:
            sink.close()

    async with listening(serve) as address:
        yield address, seen


async def test_peers_average_through_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TLS from end to end: the proxy sees the name of the peer and nothing else."""
    port, tensors = free_port(), {"w": torch.ones(3)}
    async with AsyncExitStack() as stack:
        address, seen = await stack.enter_async_context(connecting())
        founder = await enter(
            stack,
            tensors,
            listen=f"127.0.0.1:{port}",
            advertise=f"{NAME}:{port}",
            group_size=2,
            **write(tmp_path, NAME, "127.0.0.1"),
        )
        monkeypatch.setenv("AVERAGING_PROXY", f"http://user:secret@{address}")
        client = await enter(
            stack, {"w": torch.zeros(3)}, join=[founder.endpoint], mode="client", group_size=2, **write(tmp_path)
        )
        receipts = await average(founder, client)
    assert all(receipt.averaged for receipt in receipts)
    assert {request.split()[1] for request in seen} == {f"{NAME}:{port}"}
    assert "proxy-authorization: basic dXNlcjpzZWNyZXQ=".lower() in seen[0].lower()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(b"403 Forbidden", "does not allow CONNECT"), (b"407 Proxy Authentication Required", "a user and a password")],
)
async def test_a_proxy_that_refuses_is_named(answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connecting(answer) as (address, _):
        monkeypatch.setenv("AVERAGING_PROXY", f"http://user:secret@{address}")
        channels = Channels(1 << 20)
        with pytest.raises(PeerUnreachableError, match=f"{reason}.*through the proxy {address}") as caught:
            await channels.call(f"{NAME}:4222", GET_SCHEMA, None)
        assert "secret" not in str(caught.value)
        await channels.close()


async def test_a_proxy_that_is_away_does_not_show_that_the_peer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    address = free_address()
    monkeypatch.setenv("AVERAGING_PROXY", f"http://{address}")
    channels = Channels(1 << 20)
    with pytest.raises(PeerUnreachableError, match=f"connection refused, through the proxy {address}") as caught:
        await channels.call("192.0.2.7:4222", GET_SCHEMA, None)
    assert not caught.value.refused
    await channels.close()


async def test_the_proxies_of_other_programs_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("HTTP_PROXY", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    caplog.set_level(logging.INFO, "averaging.peer")
    async with AsyncExitStack() as stack:
        founder = await enter(stack, {"w": torch.ones(3)}, group_size=2)
        other = await enter(stack, {"w": torch.zeros(3)}, join=[founder.endpoint], group_size=2)
        assert all(receipt.averaged for receipt in await average(founder, other))
    assert "HTTP_PROXY, grpc_proxy, https_proxy are set and not used" in caplog.text


async def test_a_peer_that_reaches_nobody_hears_of_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(JoinError, match="HTTPS_PROXY is set and not used; AVERAGING_PROXY=http://HOST:PORT would"):
        async with Peer({"w": torch.ones(3)}, run_id="run", join=[f"{NAME}:4222"], join_timeout=0.3):
            pass


def test_which_hosts_are_called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "internal.example,10.0.0.5")
    proxy = "http://proxy:3128"
    assert [proxy_for(host, proxy) for host in ("a.example", "[2001:db8::7]")] == [proxy, proxy]
    for host in ("127.0.0.1", "[::1]", "localhost", "internal.example", "a.internal.example", "10.0.0.5"):
        assert proxy_for(host, proxy) is None
    assert proxy_for("a.example", None) is None


@pytest.mark.parametrize(
    "url", ["p:1", "http://p", "https://p:1", "socks5://u:secret@p:1", "http://p:x", "http://p:1/a"]
)
def test_what_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"AVERAGING_PROXY: .*is not an HTTP proxy") as caught:
        chosen_proxy({"AVERAGING_PROXY": url})
    assert "secret" not in str(caught.value)
