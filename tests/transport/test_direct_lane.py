"""The direct lane: how it is granted, what it does with wrong tickets and frames, and when gRPC carries the parts."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import Outcome, Receipt
from averaging.errors import CallRefusedError, PeerUnreachableError, ProtocolViolationError
from averaging.protocol.messages import AveragingData, MessageCode
from averaging.security.credentials import Credentials
from averaging.transport.direct import opening, transport as lanes
from averaging.transport.direct.frames import (
    FROM_CALLER,
    HELLO_BYTES,
    MAGIC,
    MAX_HEAD_BYTES,
    BufferPool,
    FrameKind,
    pack_header,
)
from averaging.transport.direct.link import Link
from averaging.transport.direct.opening import OPEN, Grant, Request
from averaging.transport.direct.transport import DirectTransport
from averaging.transport.grpc import Dialling, GrpcTransport
from tests.support.certificates import HERE, secure, write
from tests.support.grpc_fakes import (
    LANE,
    MAX_MESSAGE_BYTES,
    MAX_PART_BYTES,
    FakePeer,
    Prepared,
    client,
    endless,
    floods,
    number_of,
    part,
    parts,
    read_all,
    serving,
)
from tests.support.listening import listening
from tests.support.peers import average, swarm

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind", "direct")

PATIENCE = 10.0
MIB = 1 << 20


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LANE, "direct")


@pytest.fixture(params=["plain", "sealed"])
def credentials(request: pytest.FixtureRequest) -> Credentials | None:
    return secure(*HERE) if request.param == "sealed" else None


def transport_of(transport: GrpcTransport) -> Prepared:
    assert isinstance(transport, Prepared)
    return transport


def lane_of(caller: GrpcTransport, endpoint: str) -> tuple[str, str]:
    lane = caller.lane(endpoint)
    assert lane is not None
    return lane.name, lane.reason


async def send_parts(caller: GrpcTransport, endpoint: str, count: int = 3, nbytes: int = 4096) -> list[int]:
    """Sends parts in nobody's name, so that any certificate will do; returns the numbers of the replies."""

    async def nameless() -> AsyncGenerator[AveragingData, None]:
        for number in range(count):
            yield replace(part(number, nbytes), endpoint="")

    async with aclosing(caller.aggregate_part(endpoint, nameless())) as replies, asyncio.timeout(PATIENCE):
        return [number_of(reply) async for reply in replies]


# Streams


async def test_streams_follow_each_other_on_one_connection(credentials: Credentials | None) -> None:
    async with serving(FakePeer(), credentials=credentials) as (callee, endpoint):
        async with client(credentials=credentials) as caller:
            links = set()
            for count in (1, 40, 3):
                assert await send_parts(caller, endpoint, count, MIB) == list(range(count))
                assert lane_of(caller, endpoint) == ("sealed" if credentials else "direct", "")
                links.add(transport_of(caller)._lanes._lanes[endpoint].link)
            assert len(links) == 1
        assert await every_connection_ends(callee)


async def every_connection_ends(callee: GrpcTransport) -> bool:
    listener = transport_of(callee)._listener
    assert listener is not None
    async with asyncio.timeout(PATIENCE):
        while listener._connections:
            await asyncio.wait(listener._connections)
    assert not listener._open._taken
    return True


async def test_messages_of_all_kinds_pass(credentials: Credentials | None) -> None:
    sent = [
        part(1, 8),
        AveragingData(MessageCode.CANCELLED, b"group", "a:1"),
        part(2, 0),
        AveragingData(MessageCode.NO_CODE),
        part(3, MAX_PART_BYTES),
    ]

    async def messages() -> AsyncGenerator[AveragingData, None]:
        for one in sent:
            yield one

    if credentials is not None:  # its certificate is not for a
        sent[:] = [replace(one, endpoint="") for one in sent]
    async with (
        serving(FakePeer(), credentials=credentials) as (_, endpoint),
        client(credentials=credentials) as caller,
        aclosing(caller.aggregate_part(endpoint, messages())) as replies,
        asyncio.timeout(PATIENCE),
    ):
        assert [reply async for reply in replies] == sent


async def test_the_buffers_of_parts_are_used_again_unless_somebody_keeps_them() -> None:
    async with serving(FakePeer()) as (callee, endpoint), client() as caller:
        for kept in (False, True):
            async with aclosing(caller.aggregate_part(endpoint, parts(40, MIB))) as replies, asyncio.timeout(PATIENCE):
                found = [reply if kept else number_of(reply) async for reply in replies]
            assert found == ([part(number, MIB) for number in range(40)] if kept else list(range(40)))
            if not kept:
                for transport in (callee, caller):
                    assert len(transport_of(transport)._buffers._kept) < 10


async def test_an_error_of_the_service_reaches_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[Exception] = [RuntimeError("secret"), ProtocolViolationError("the third part is odd")]

    async def fails(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        yield await anext(messages)
        raise failures.pop()

    async with serving(FakePeer(aggregate=fails)) as (_, endpoint), client() as caller:
        for reason in ("the third part is odd", "internal error; see the log of that peer"):
            with pytest.raises(CallRefusedError, match=reason):
                await send_parts(caller, endpoint, 5)
            assert lane_of(caller, endpoint) == ("direct", "")
    assert [record.levelno for record in caplog.records if "stream of parts" in record.message] == [logging.ERROR]


async def until(condition: Callable[[], bool]) -> None:
    """Lets the event loop run until the condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)


async def test_a_reader_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "WRITE_SECONDS", 0.2)
    monkeypatch.setattr(opening, "WRITE_BYTES_PER_SECOND", 1 << 30)
    service = FakePeer(aggregate=floods)
    async with (
        serving(service) as (_, endpoint),
        client() as caller,
        aclosing(caller.aggregate_part(endpoint, parts(1))) as replies,
    ):
        await anext(replies)
        await asyncio.wait_for(service.closed.wait(), PATIENCE)
        with pytest.raises(PeerUnreachableError, match="connection lost"):
            await asyncio.wait_for(read_all(replies), PATIENCE)


# Tickets


@asynccontextmanager
async def asked(credentials: Credentials | None = None) -> AsyncIterator[tuple[str, Grant, FakePeer]]:
    """A peer that has granted a connection: its host, what it answered, and its service."""
    service = FakePeer()
    async with serving(service, credentials=credentials) as (_, endpoint), client(credentials=credentials) as caller:
        request = Request(b"" if credentials is None else os.urandom(32))
        yield endpoint.partition(":")[0], await caller._channels.call(endpoint, OPEN, request), service


async def greet(host: str, port: int, hello: bytes, more: bytes = b"") -> bytes:
    """Sends the first bytes of a connection; returns what is answered until it says nothing more for a moment."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(hello + more)
        try:
            return await asyncio.wait_for(reader.read(64), 0.5)
        except TimeoutError:
            return b"nothing"
        except ConnectionResetError:
            return b""
    finally:
        writer.close()


READY = pack_header(FrameKind.READY, 0, 0)
WELCOME = pack_header(FrameKind.WELCOME, 0, 0)


async def test_a_ticket_admits_once() -> None:
    async with asked() as (host, grant, _):
        assert await greet(host, grant.port, MAGIC + grant.ticket, READY) == WELCOME
        assert await greet(host, grant.port, MAGIC + grant.ticket, READY) == b""


async def test_a_late_ticket_admits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "VALID_SECONDS", 0.0)
    async with asked() as (host, grant, _):
        assert await greet(host, grant.port, MAGIC + grant.ticket, READY) == b""


@pytest.mark.parametrize(
    "hello",
    [
        MAGIC + os.urandom(32),
        b"GET / HTTP/1.1\r\nHost: a.example.org\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
        bytes(HELLO_BYTES),
    ],
    ids=["another ticket", "a browser", "gRPC", "zeros"],
)
async def test_a_stranger_is_disconnected(hello: bytes) -> None:
    async with asked() as (host, grant, service):
        assert await greet(host, grant.port, hello, READY) == b""
        assert not service.started.is_set()


async def test_a_ticket_without_the_keys_admits_nobody() -> None:
    async with asked(secure(*HERE)) as (host, grant, service):
        assert len(grant.public_key) == 32
        assert await greet(host, grant.port, MAGIC + grant.ticket, READY + bytes(16)) == b""
        assert not service.started.is_set()


async def test_who_connects_and_says_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.transport.direct.opening.HANDSHAKE_SECONDS", 0.2)
    async with asked() as (host, grant, _):
        hello = MAGIC + grant.ticket
        for first in (b"", hello[:20], hello):
            assert await greet(host, grant.port, first) == b""


async def test_other_versions_have_no_lane_and_say_so() -> None:
    async def answers(_: Request) -> Grant:
        return Grant(1, bytes(32), version=2)

    with pytest.raises(CallRefusedError, match="its direct lane has version 2, and this peer's 3"):
        await opening.open_link(
            "127.0.0.1:1", answers, Dialling(), sealed=False, max_body=1 << 20, buffers=BufferPool()
        )
    async with serving(FakePeer()) as (_, endpoint), client() as caller:
        with pytest.raises(CallRefusedError, match="version 2 of the direct lane; this peer has version 3"):
            await caller._channels.call(endpoint, OPEN, Request(version=2))


# Limits per host


async def test_connections_of_a_host_are_bounded_and_grpc_carries_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.transport.direct.opening.MAX_CONNECTIONS_PER_HOST", 1)
    async with serving(FakePeer()) as (_, endpoint), client() as first, client() as second:
        assert await send_parts(first, endpoint) == [0, 1, 2]
        assert await send_parts(second, endpoint) == [0, 1, 2]
        assert lane_of(first, endpoint) == ("direct", "")
        assert lane_of(second, endpoint)[0] == "grpc"
        assert "did not accept the connection" in lane_of(second, endpoint)[1]


# When gRPC carries the parts


async def test_a_peer_without_the_lane_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LANE)
    async with serving(FakePeer()) as (_, endpoint):
        monkeypatch.setenv(LANE, "direct")
        async with client() as caller:
            for _ in range(2):
                assert await send_parts(caller, endpoint) == [0, 1, 2]
                assert lane_of(caller, endpoint) == ("grpc", opening.NOT_SERVED)
            lane = transport_of(caller)._lanes._lanes[endpoint]
            assert lane.retry_at > asyncio.get_running_loop().time() + lanes.MAX_PAUSE_SECONDS


async def test_a_blocked_port_is_named_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FakePeer()) as (callee, endpoint), client() as caller:
        with socket.socket() as blocked:
            blocked.bind(("127.0.0.1", 0))  # and does not listen
            transport_of(callee)._direct_advertise = port = blocked.getsockname()[1]
            assert await send_parts(caller, endpoint) == [0, 1, 2]
            name, reason = lane_of(caller, endpoint)
            assert name == "grpc"
            assert f"its direct port {port} cannot be reached" in reason
            assert await send_parts(caller, endpoint) == [0, 1, 2]
            assert transport_of(caller)._lanes._lanes[endpoint].failures == 1  # not asked again so soon
        transport_of(callee)._direct_advertise = None
        transport_of(caller)._lanes._lanes[endpoint].retry_at = 0.0
        assert await send_parts(caller, endpoint) == [0, 1, 2]
        assert lane_of(caller, endpoint) == ("direct", "")


async def test_a_port_that_swallows_everything_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def swallows(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1024):
            pass

    monkeypatch.setattr(opening, "CONNECT_SECONDS", 0.3)
    async with serving(FakePeer()) as (callee, endpoint), listening(swallows) as silent, client() as caller:
        transport_of(callee)._direct_advertise = int(silent.rpartition(":")[2])
        assert await send_parts(caller, endpoint) == [0, 1, 2]
        assert "no answer at its direct port" in lane_of(caller, endpoint)[1]


async def test_a_connection_that_was_lost_while_idle_is_replaced() -> None:
    async with client() as caller:
        async with serving(FakePeer()) as (_, endpoint):
            assert await send_parts(caller, endpoint) == [0, 1, 2]
        lane = transport_of(caller)._lanes._lanes[endpoint]
        await until(lambda: lane.link is None)
        async with serving(FakePeer(), listen=endpoint):
            assert await send_parts(caller, endpoint) == [0, 1, 2]
            assert lane_of(caller, endpoint) == ("direct", "")


async def test_a_connection_that_was_lost_in_a_stream_is_asked_for_after_a_pause() -> None:
    async def breaks(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        yield await anext(messages)
        raise PeerUnreachableError("a:1", "made up")

    service = FakePeer(aggregate=breaks)
    async with serving(service) as (_, endpoint), client() as caller:
        with pytest.raises(PeerUnreachableError, match="connection lost"):
            await read_all(caller.aggregate_part(endpoint, endless(asyncio.Event())))
        service.aggregate = None
        assert await send_parts(caller, endpoint) == [0, 1, 2]
        assert lane_of(caller, endpoint) == ("grpc", "the direct connection had ended: connection lost")


async def test_two_streams_to_one_peer_do_not_share_a_connection() -> None:
    async with (
        serving(FakePeer()) as (_, endpoint),
        client() as caller,
        aclosing(caller.aggregate_part(endpoint, endless(asyncio.Event()))) as replies,
    ):
        await anext(replies)
        assert await send_parts(caller, endpoint) == [0, 1, 2]
        assert lane_of(caller, endpoint) == ("grpc", lanes.IN_USE)


async def test_an_address_that_is_not_dialled_gets_no_direct_connection_either() -> None:
    caller = DirectTransport(None, max_message_bytes=MAX_MESSAGE_BYTES, max_part_bytes=MAX_PART_BYTES)
    for endpoint in ("169.254.169.254:80", "client::0b7c", "not an address"):
        caller.prepare_lane(endpoint)
        await asyncio.gather(*(lane.opening for lane in caller._lanes._lanes.values() if lane.opening))
        assert not caller._lanes.is_ready(endpoint)
    assert "is not dialled" in caller._lanes.reason("169.254.169.254:80")
    await caller.close()


# Frames


def link_pair(
    *, max_body: int = MIB, accepted: frozenset[FrameKind] = FROM_CALLER, **options: Any
) -> tuple[Link, socket.socket]:
    """A link, and the other end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        end, _ = listener.accept()
    end.setblocking(False)
    return Link(end, "a:1", accepted=accepted, max_body=max_body, buffers=BufferPool(), **options), other


@pytest.mark.parametrize(
    "header",
    [
        pack_header(FrameKind.PART, MAX_HEAD_BYTES + 1, 0),
        pack_header(FrameKind.PART, 0, MIB + 1),
        pack_header(FrameKind.END, 0, 1),
        pack_header(FrameKind.END, 0, 0).replace(b"\x04", b"\x06"),
        pack_header(FrameKind.ERROR, 0, 0),
        pack_header(FrameKind.END, 0, 0).replace(b"\x04\x00", b"\x04\x01"),
        b"\xff" * 8,
    ],
    ids=str,
)
async def test_a_wrong_header_ends_the_connection_before_memory_is_taken(header: bytes) -> None:
    link, other = link_pair()
    with other:
        other.sendall(header)
        with pytest.raises(PeerUnreachableError, match="connection lost: "):
            await asyncio.wait_for(link.read(), PATIENCE)
        assert not link._buffers._kept
        assert link.lost


# Peers


def lanes_in(receipts: list[Receipt]) -> set[tuple[str, str]]:
    return {
        (account.lane, account.lane_reason)
        for receipt in receipts
        for account in receipt.accounts
        if account.endpoint != receipt.endpoint
    }


@pytest.mark.parametrize("lane", ["direct", "sealed"])
async def test_peers_use_the_lane_from_their_first_round_on(lane: str, tmp_path: Path) -> None:
    options: dict[str, Any] = write(tmp_path, *HERE) if lane == "sealed" else {}
    async with AsyncExitStack() as stack:
        peers = await swarm(stack, [{"w": torch.full((1_200_000,), float(n))} for n in range(3)], **options)
        for _ in range(2):
            receipts = await average(*peers)
            assert [receipt.outcome for receipt in receipts] == [Outcome.AVERAGED] * 3
            assert not any(receipt.dropped for receipt in receipts)
        assert lanes_in(receipts) == {(lane, "")}
        for peer in peers:
            with peer.tensors() as (tensor,):
                assert torch.equal(tensor, torch.ones_like(tensor))
