"""What strangers and slow peers can take of a peer: headers, connections, streams, time. All of it is bounded."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import grpc
import pytest
import torch
from hypothesis import given, strategies as st

from averaging import Peer
from averaging.errors import CallRefusedError, PeerUnreachableError
from averaging.protocol.messages import AveragingData, Digest, ExchangeReply, Record
from averaging.security.credentials import Credentials
from averaging.transport.grpc import GrpcTransport, authentication, channel_options, channels, methods, server
from averaging.transport.grpc.authentication import is_token
from tests.support.certificates import TOKEN
from tests.support.grpc_fakes import (
    MAX_MESSAGE_BYTES,
    RECORD,
    REQUEST,
    FakeGossip,
    FakePeer,
    client,
    floods,
    parts,
    serving,
    until,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

PATIENCE = 20.0


async def test_a_connection_carries_so_many_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_options, "MAX_STREAMS", 4)
    peer = FakePeer()
    async with serving(peer) as (_, endpoint), client() as caller, AsyncExitStack() as stack:
        calls = [await stack.enter_async_context(aclosing(caller.join_group(endpoint, REQUEST))) for _ in range(5)]
        for call in calls[:4]:
            await anext(call)
        fifth = asyncio.ensure_future(anext(calls[4]))
        assert not (await asyncio.wait({fifth}, timeout=0.5))[0]
        assert len(peer.requests) == 4
        await calls[0].aclose()
        await asyncio.wait_for(fifth, PATIENCE)


async def test_so_many_connections_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_options, "MAX_CONNECTIONS", 2)
    async with serving(FakePeer()) as (_, endpoint), AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(client()) for _ in range(3)]
        for caller in callers[:2]:
            await caller.get_schema(endpoint)
        with pytest.raises(PeerUnreachableError):
            await callers[2].get_schema(endpoint)
        await callers[0].get_schema(endpoint)


async def test_a_connection_without_calls_is_closed_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_options, "IDLE_SECONDS", 0.3)
    async with serving(FakePeer()) as (_, endpoint), client() as caller, grpc.aio.insecure_channel(endpoint) as channel:
        await caller.get_schema(endpoint)
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(methods.GET_STATUS.path)
        await call(b"")
        async with asyncio.timeout(PATIENCE):
            while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
        await caller.get_schema(endpoint)


async def test_a_connection_that_a_router_may_have_forgotten_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = channels.Channels(MAX_MESSAGE_BYTES)
    async with serving(FakePeer()) as (_, endpoint):
        async with lines.connection(endpoint) as first:
            pass
        async with lines.connection(endpoint) as again:
            assert again is first
            monkeypatch.setattr(channels, "UNUSED_SECONDS", -1.0)
            async with lines.connection(endpoint) as beside:
                assert beside is first
        async with lines.connection(endpoint) as another:
            assert another is not first
        assert first.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        await lines.close()


@asynccontextmanager
async def a_reader_that_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[GrpcTransport, AsyncGenerator[AveragingData, None]]]:
    """A peer that was flooding a reader until it gave it up, and the reader's call."""

    monkeypatch.setattr(server, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(server, "WRITE_BYTES_PER_SECOND", 1 << 30)
    peer = FakePeer(aggregate=floods)
    async with (
        serving(peer) as (listening, endpoint),
        client() as caller,
        aclosing(caller.aggregate_part(endpoint, parts(1))) as replies,
    ):
        await anext(replies)
        await asyncio.wait_for(peer.closed.wait(), PATIENCE)
        yield listening, replies


async def test_a_reader_that_takes_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_reader_that_takes_nothing(monkeypatch) as (_, replies):
        with pytest.raises(CallRefusedError, match="the caller took no answer for too long"):
            async for _ in replies:
                pass
    (record,) = [record for record in caplog.records if record.name == "averaging.transport"]
    assert record.levelno == logging.WARNING
    assert "reads no reply to /DecentralizedAveraging/rpc_aggregate_part and is cut off" in record.getMessage()


NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
"""For a caller that takes no more than 64 KiB of a reply before it is read."""


class Talkative(FakeGossip):
    """Answers with 3 MiB."""

    def list_records(self, key: str) -> tuple[Record, ...]:
        return (replace(RECORD, value=bytes(3 << 20)),)

    async def exchange(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        yield ExchangeReply(records=self.list_records(""))


@pytest.mark.parametrize("path", [methods.LIST_RECORDS.path, methods.EXCHANGE.path], ids=["one reply", "a stream"])
async def test_who_reads_no_reply_keeps_no_call_in_progress(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.2)
    monkeypatch.setattr(server, "WRITE_BYTES_PER_SECOND", 1 << 30)
    monkeypatch.setattr(authentication, "MAX_CALLS_PER_HOST", 1)
    async with (
        serving(FakePeer(), Talkative()) as (transport, endpoint),
        grpc.aio.insecure_channel(endpoint, NARROW) as channel,
        client() as caller,
        asyncio.timeout(PATIENCE),
    ):
        assert transport._server is not None
        in_progress = transport._server._intake._callers._calls._taken
        start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
        for _ in range(2):  # the first one has given its place back
            call = start(b"")
            await until(lambda: in_progress)
            await until(lambda: not in_progress)
            assert not call.done()
        await caller.get_schema(endpoint)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("MAX_DOWNLOADS", "1 downloads of the state of .* are in progress; ask another"),
        ("DOWNLOADS_PER_HOST", "1 downloads of your host of the state of .*; ask another donor"),
    ],
)
async def test_so_many_download_the_state_at_once(limit: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.zeros(64 << 18)  # 64 MiB, more than fits on the way
    monkeypatch.setattr(f"averaging.peer.service.{limit}", 1)
    async with Peer([large], run_id="run", stall_timeout=2.0) as peer, client(limit=32 << 20) as caller:
        async with aclosing(caller.download_state(peer.endpoint)) as first:
            await anext(first)
            with pytest.raises(CallRefusedError, match=words):
                await anext(caller.download_state(peer.endpoint))
            waiting = asyncio.ensure_future(anext(second := caller.download_state(peer.endpoint)))
        assert (await asyncio.wait_for(waiting, PATIENCE)).metadata
        await second.aclose()


# Requests as a peer receives them: refused unread without the token, one where one is due, and complete in time

HEALTH_CHECK, HEALTH_WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
CHANNELZ = "/grpc.channelz.v1.Channelz/GetServers"
UNKNOWN = "/no.such.Service/Method"

Call = grpc.aio.StreamStreamCall[bytes, bytes]


def opened(channel: grpc.aio.Channel, path: str) -> Call:
    """A call whose caller has sent the headers and no message yet."""
    start: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    return start()


async def refusal(call: Call) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    return raised.value.code(), raised.value.details() or ""


async def no_call_is_in_progress(transport: GrpcTransport) -> None:
    assert transport._server is not None
    tasks = transport._server._intake._tasks
    async with asyncio.timeout(PATIENCE):
        await until(lambda: not tasks)


@pytest.mark.parametrize("path", [methods.AGGREGATE_PART.path, methods.GET_STATUS.path, CHANNELZ, UNKNOWN])
async def test_who_has_no_token_is_refused_before_anything_is_read(path: str) -> None:
    credentials = Credentials(tokens=(TOKEN,))
    async with (
        serving(FakePeer(), FakeGossip(), credentials=credentials) as (transport, endpoint),
        grpc.aio.insecure_channel(endpoint) as channel,
    ):
        assert (await refusal(opened(channel, path)))[0] is grpc.StatusCode.UNAUTHENTICATED
        await no_call_is_in_progress(transport)


@pytest.mark.parametrize("path", [methods.PUSH.path, methods.SUBSCRIBE.path, HEALTH_CHECK])
async def test_a_request_that_is_not_complete_in_time_ends(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    async with (
        serving(FakePeer(), FakeGossip()) as (transport, endpoint),
        grpc.aio.insecure_channel(endpoint) as channel,
    ):
        code, told = await refusal(opened(channel, path))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"the request to {path} was not complete within" in told
        await no_call_is_in_progress(transport)


async def test_a_method_with_one_request_takes_one() -> None:
    async with serving(FakePeer()) as (_, endpoint), grpc.aio.insecure_channel(endpoint) as channel:
        call = opened(channel, methods.WATCH_ROUNDS.path)
        await call.done_writing()
        code, told = await refusal(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "no message in a request to /averaging.status.v1.Status/WatchRounds, which takes one" in told


@pytest.mark.parametrize("path", [methods.AGGREGATE_PART.path, methods.GET_SCHEMA.path, HEALTH_WATCH])
async def test_every_service_counts_in_the_calls_of_a_host(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "MAX_CALLS_PER_HOST", 1)
    async with serving(FakePeer(), FakeGossip()) as (transport, endpoint), asyncio.timeout(PATIENCE):
        assert transport._server is not None
        in_progress = transport._server._intake._callers._calls._taken
        for held, tried in ((path, UNKNOWN), (methods.GET_STATUS.path, path)):
            async with grpc.aio.insecure_channel(endpoint) as first, grpc.aio.insecure_channel(endpoint) as second:
                call = opened(first, held)
                await until(lambda: in_progress)
                assert await refusal(opened(second, tried)) == (
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "1 calls of your host are in progress; no more are taken",
                )
                call.cancel()
            await until(lambda: not in_progress)


TOKENS = ("new-token-0123456789", "old-token-0123456789")


@given(st.text() | st.binary())
def test_whatever_else_is_sent_is_no_token(value: str | bytes) -> None:
    assert not is_token(value, TOKENS)
    assert not is_token(value, ())
