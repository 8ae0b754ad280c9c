"""Peers that are not there, die or are cut off: what the other end of a call sees, and how soon."""

import asyncio
import contextlib
import gc
import socket
import struct
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from averaging.common.addresses import parse_address
from averaging.errors import PeerUnreachableError, ProtocolViolationError
from averaging.protocol.messages import AveragingData
from averaging.transport.direct import DirectTransport
from averaging.transport.grpc import channel_options, methods
from averaging.transport.grpc.channels import Channels, target
from tests.support.certificates import HERE, secure
from tests.support.grpc_fakes import (
    MAX_MESSAGE_BYTES,
    REQUEST,
    SERVING,
    FakePeer,
    client,
    endless,
    floods,
    number_of,
    parts,
    read_all,
    serving,
)
from tests.support.listening import closed, listening

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

NOTICED = 0.75 * channel_options.KEEPALIVE_SECONDS
"""Seconds in which a loss that the system tells of must be noticed: before a ping without an answer would tell it."""


CHILD = """
import asyncio, sys
from contextlib import aclosing
from tests.support.grpc_fakes import FakePeer, client, part, serving

async def parts():
    yield part(1)
    await asyncio.Event().wait()

async def main():
    async with serving(FakePeer()) as (_, endpoint), client() as caller:
        async with aclosing(caller.aggregate_part(sys.argv[1], parts())) as replies:
            await anext(replies)
            print(endpoint, flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def relayed(
    endpoint: str, ended: asyncio.Semaphore | None = None
) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Another address for `endpoint`, and what resets the connections through it; `ended` is released for each.

    Direct connections go through a relay of their own, and are reset too.
    """
    async with AsyncExitStack() as stack:
        address, cut = await stack.enter_async_context(relayed_port(endpoint, ended))
        transport = SERVING.get(endpoint)
        if not isinstance(transport, DirectTransport):
            yield address, cut
            return
        direct = f"127.0.0.1:{transport.direct_port}"
        beside, cut_beside = await stack.enter_async_context(relayed_port(direct, None))
        transport._direct_advertise = parse_address(beside)[1]

        def cut_both() -> None:
            cut()
            cut_beside()

        yield address, cut_both


@asynccontextmanager
async def relayed_port(endpoint: str, ended: asyncio.Semaphore | None) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """See `relayed`, for one port."""
    host, port = parse_address(endpoint)
    writers: set[asyncio.StreamWriter] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(host, port)
        writers.update((writer, to_writer))
        try:
            await asyncio.gather(copy(reader, to_writer), copy(to_reader, writer))
        finally:
            writers.difference_update((writer, to_writer))
            await closed(to_writer)
            if ended is not None:
                ended.release()

    def cut() -> None:
        while writers:
            writer = writers.pop()
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST instead of FIN
            writer.transport.abort()

    async with listening(relay) as address:
        try:
            yield address, cut
        finally:
            cut()


@pytest.mark.usefixtures("lane")
async def test_a_killed_process_is_lost_for_its_callers_and_for_those_that_it_calls() -> None:
    ended = []

    async def echoes(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        async for message in messages:
            yield message
        ended.append("the end of the messages")

    service = FakePeer(aggregate=echoes)
    async with serving(service) as (_, own), client() as caller, asyncio.timeout(60 + NOTICED):
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CHILD, own), stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        try:
            assert child.stdout is not None
            endpoint = (await child.stdout.readline()).decode().strip()
            async with aclosing(caller.aggregate_part(endpoint, endless(asyncio.Event()))) as replies:
                assert number_of(await anext(replies)) == 0
                child.kill()
                async with asyncio.timeout(NOTICED):
                    with pytest.raises(PeerUnreachableError, match=f"{endpoint}: connection lost"):
                        await anext(replies)
                    await service.closed.wait()
        except BaseException:
            child.kill()  # a second time asyncio would take the child's end for a stranger's
            raise
        finally:
            await child.wait()
    assert not ended, "a lost caller must not look like one that has sent everything"


@pytest.mark.usefixtures("lane")
async def test_a_connection_reset_while_parts_are_written_is_lost() -> None:
    for _ in range(3):
        async with (
            serving(FakePeer()) as (_, endpoint),
            relayed(endpoint) as (relay, cut),
            client() as caller,
            aclosing(caller.aggregate_part(relay, endless())) as replies,
        ):
            await anext(replies)
            cut()
            with pytest.raises(PeerUnreachableError, match=f"^{relay}: connection lost$"):
                await asyncio.wait_for(read_all(replies), NOTICED)


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    """What is part of a circle of references stays."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_garbage_collection")
async def test_a_channel_that_has_reconnected_and_is_given_up_is_disconnected() -> None:
    """Another call had it reconnect before the lost one was read; gRPC keeps the connection while a call exists."""
    channels, ended = Channels(MAX_MESSAGE_BYTES), asyncio.Semaphore(0)
    async with serving(FakePeer()) as (_, endpoint), relayed(endpoint, ended) as (relay, cut):
        messages = endless(asyncio.Event())
        async with aclosing(channels.stream(relay, methods.AGGREGATE_PART, messages)) as replies:
            await anext(replies)
            async with channels.connection(relay) as line:
                cut()
                await line.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
                await asyncio.wait_for(line.channel.channel_ready(), NOTICED)
            with pytest.raises(PeerUnreachableError, match="connection lost"):
                await anext(replies)
        for _ in ("the one that was cut", "the one after it"):
            await asyncio.wait_for(ended.acquire(), NOTICED)
        await channels.close()


@pytest.mark.parametrize("closed_meanwhile", [False, True])
async def test_a_channel_that_one_call_gives_up_carries_the_others_to_their_end(closed_meanwhile: bool) -> None:
    channels = Channels(MAX_MESSAGE_BYTES)
    async with serving(FakePeer()) as (_, endpoint):
        async with channels.connection(endpoint) as line:
            with contextlib.suppress(PeerUnreachableError):
                async with channels.connection(endpoint) as same:
                    assert same is line
                    raise PeerUnreachableError(endpoint, "it ended the call")
            async with channels.connection(endpoint) as other:
                assert other is not line
            assert line.channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = line.channel.unary_unary(methods.GET_SCHEMA.path)
            assert await call(b"")
            if closed_meanwhile:
                await channels.close()
                assert line.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        assert line.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        await channels.close()


@pytest.mark.usefixtures("lane")
async def test_a_caller_lost_while_the_service_writes_closes_it() -> None:
    service = FakePeer(aggregate=floods)
    async with (
        serving(service) as (_, endpoint),
        relayed(endpoint) as (relay, cut),
        client() as caller,
        aclosing(caller.aggregate_part(relay, endless(asyncio.Event()))) as replies,
    ):
        await anext(replies)
        cut()
        await asyncio.wait_for(service.closed.wait(), NOTICED)


async def test_a_quiet_call_outlives_the_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC sends no more than one a second; without the server's consent it would end the call at the third."""
    monkeypatch.setattr(channel_options, "KEEPALIVE_SECONDS", 0.2)
    async with (
        serving(FakePeer()) as (_, endpoint),
        client() as caller,
        aclosing(caller.join_group(endpoint, REQUEST)) as replies,
    ):
        await anext(replies)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(replies), 5)


async def test_a_peer_that_comes_up_is_reached_at_once() -> None:
    async with serving(FakePeer()) as (_, endpoint), client() as caller:
        await caller.get_schema(endpoint)
        for name in (endpoint, endpoint.replace("127.0.0.1", "localhost")):
            await caller.get_schema(name)
    async with client() as caller:
        with pytest.raises(PeerUnreachableError):
            await caller.get_schema(endpoint)
        async with serving(FakePeer(), listen=endpoint):
            await asyncio.wait_for(caller.get_schema(endpoint), channel_options.CONNECT_SECONDS)
        async with serving(FakePeer(), listen=endpoint):
            await asyncio.wait_for(caller.get_schema(endpoint), channel_options.CONNECT_SECONDS)


@pytest.mark.parametrize(
    ("endpoint", "scheme"),
    [
        ("192.0.2.7:80", "ipv4:192.0.2.7:80"),
        ("[2001:db8::7]:80", "ipv6:%5B2001%3Adb8%3A%3A7%5D%3A80"),
        ("peer.example.org:80", "dns:///peer.example.org:80"),
        ("unix:80", "dns:///unix:80"),
        ("a%2fb?c#d:80", "dns:///a%252fb%3Fc%23d:80"),
    ],
)
def test_a_name_is_a_host_and_a_port_and_no_other_kind_of_target(endpoint: str, scheme: str) -> None:
    assert target(endpoint) == scheme


async def test_what_is_no_address_or_hides_one_is_never_dialled() -> None:
    """The system reads the numbers as 169.254.169.254, and gRPC asks the system."""
    async with client() as caller:
        for host in ("2852039166", "0xa9fea9fe", "169.16689662"):
            with pytest.raises(ProtocolViolationError, match=r"169\.254\.169\.254, and that is a link-local address"):
                await caller.get_schema(f"{host}:80")
        for name in (
            *("client::0b7c", "", "unix:/tmp/socket", "127.0.0.1:0", "dns:///a:1", "a:1,b:2", "x"),
            *("[[::1]]:80", "[[169.254.169.254]]:80", "[]127.0.0.1[]:80"),
        ):
            for call in (caller.join_group(name, REQUEST), caller.aggregate_part(name, parts(1))):
                with pytest.raises(ProtocolViolationError):
                    await anext(call)
            with pytest.raises(ProtocolViolationError):
                await caller.get_schema(name)


async def test_something_else_listens_there() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answers.pop())

    answers = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b""]
    async with listening(serve) as address, client() as caller:
        while answers:
            with pytest.raises(PeerUnreachableError) as raised:
                await caller.get_schema(address)
            assert len(str(raised.value)) < 100


async def test_who_accepts_a_connection_and_says_nothing_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1024):
            pass

    monkeypatch.setattr(channel_options, "CONNECT_SECONDS", 0.5)
    async with listening(serve) as address:
        for credentials in (None, secure(*HERE)):
            async with client(credentials=credentials) as caller:
                with pytest.raises(PeerUnreachableError, match="no answer to the connection"):
                    await asyncio.wait_for(caller.get_schema(address), 10)
