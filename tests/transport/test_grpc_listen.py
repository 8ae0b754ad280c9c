"""Taking an address, what everybody can ask a peer, and how a transport is closed."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc
import pytest

from averaging.common.addresses import is_endpoint
from averaging.errors import ClosedError, ConfigError, ListenError, PeerUnreachableError
from averaging.protocol.messages import JoinRequest, MessageFromLeader
from averaging.security.credentials import Credentials
from averaging.transport.base import Transport
from averaging.transport.grpc import GrpcTransport
from averaging.transport.grpc.channels import Channels
from tests.support.grpc_fakes import ACCEPTED, MAX_MESSAGE_BYTES, REQUEST, FakePeer, client, serving

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

GRACE = 30.0
"""Seconds for which calls may go on where a peer closes; no test waits them out."""


def transport(listen: str | None, advertise: str | None = None) -> GrpcTransport:
    return GrpcTransport(listen, advertise, max_message_bytes=MAX_MESSAGE_BYTES, credentials=Credentials(insecure=True))


async def bound(listen: str | None, advertise: str | None = None) -> str:
    one: Transport = transport(listen, advertise)
    try:
        return await one.bind()
    finally:
        await one.close()


@pytest.mark.parametrize(
    ("listen", "advertise", "host"),
    [
        ("127.0.0.1:0", None, "127.0.0.1"),
        ("localhost:0", None, "localhost"),
        ("0.0.0.0:0", "192.0.2.7:0", "192.0.2.7"),
        ("127.0.0.1:0", "peer.example.org:0", "peer.example.org"),
        ("127.0.0.1:0", "[2001:db8::7]:4222", "[2001:db8::7]"),
    ],
)
async def test_the_endpoint_has_the_port_that_was_taken(listen: str, advertise: str | None, host: str) -> None:
    endpoint = await bound(listen, advertise)
    assert endpoint.startswith(f"{host}:")
    assert is_endpoint(endpoint)
    assert advertise is None or advertise in (f"{host}:0", endpoint)


@pytest.mark.parametrize("listen", ["[0::0]:0", "0:0"])
async def test_all_addresses_need_one_that_is_advertised(listen: str) -> None:
    with pytest.raises(ConfigError, match="other peers cannot dial; give advertise"):
        await bound(listen)
    with pytest.raises(ConfigError, match="other peers cannot dial"):
        await bound(listen, "0.0.0.0:4222")


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("no-such-host.invalid:0", "no-such-host.invalid is unknown"),
        ("203.0.113.9:0", "this machine has no such address"),
    ],
)
async def test_an_address_that_cannot_be_had(listen: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ListenError, match=f"cannot listen on {listen}: {words}"):
        await bound(listen)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
async def test_a_port_that_is_taken(host: str, capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(FakePeer()) as (_, endpoint):
        port = endpoint.rpartition(":")[2]
        with pytest.raises(ListenError, match=f"cannot listen on {host}:{port}: the port is taken; .*another port"):
            await bound(f"{host}:{port}", "192.0.2.7:0")
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        with pytest.raises(ListenError, match="the port is taken"):
            await bound(f"{host}:{port}", "192.0.2.7:0")
    assert capfd.readouterr().err == ""


async def takes_no_more_calls(endpoint: str) -> None:
    """Returns when a peer has begun to close."""
    async with client() as caller:
        while True:
            try:
                await caller.get_schema(endpoint)
            except PeerUnreachableError:
                return


async def test_a_call_that_ends_within_the_grace_is_finished() -> None:
    async def join(_: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        yield ACCEPTED
        await closing.wait()
        yield ACCEPTED

    closing = asyncio.Event()
    async with (
        serving(FakePeer(join=join)) as (server, endpoint),
        client() as caller,
        aclosing(caller.join_group(endpoint, REQUEST)) as replies,
    ):
        await anext(replies)
        closed = asyncio.create_task(server.close(GRACE))
        async with asyncio.timeout(GRACE / 2):
            await takes_no_more_calls(endpoint)
            closing.set()
            assert [reply async for reply in replies] == [ACCEPTED]
            await closed


async def test_a_cancelled_close_has_no_more_patience() -> None:
    service = FakePeer()
    async with (
        serving(service) as (server, endpoint),
        client() as caller,
        aclosing(caller.join_group(endpoint, REQUEST)) as replies,
    ):
        await anext(replies)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.close(GRACE), 0.1)
        assert service.closed.is_set()
    assert await bound(endpoint) == endpoint


async def test_closing_ends_the_calls_it_has_made() -> None:
    """They fail; the tasks that wait for them are not cancelled."""

    async def waits() -> None:
        begun.set()
        await anext(replies)

    begun = asyncio.Event()
    async with serving(FakePeer()) as (_, endpoint), client() as caller:
        replies = caller.join_group(endpoint, REQUEST)
        await anext(replies)
        waiting = asyncio.ensure_future(waits())
        await begun.wait()
        await caller.close()
        with pytest.raises(PeerUnreachableError, match="this peer closed the connection"):
            await waiting
        with pytest.raises(ClosedError):
            await caller.get_schema(endpoint)
        await caller.close()


async def test_channels_long_unused_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.transport.grpc.channels.MAX_IDLE", 2)
    channels = Channels(MAX_MESSAGE_BYTES)

    async def channel_to(port: int) -> grpc.aio.Channel:
        async with channels.connection(f"127.0.0.1:{port}") as line:
            return line.channel

    async with channels.connection("127.0.0.1:1") as busy:
        two, three = await channel_to(2), await channel_to(3)
        assert await channel_to(2) is two
        await channel_to(4)
        assert await channel_to(2) is two
        assert three.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        assert busy.channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
    await channels.close()
