"""Requests as a peer receives them: refused unread without the token, one where one is due, and complete in time."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from averaging.security.credentials import Credentials
from averaging.transport.grpc import GrpcTransport, authentication, methods, server
from tests.support.certificates import TOKEN
from tests.support.grpc_fakes import FakeGossip, FakePeer, serving, until

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

PATIENCE = 20.0

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


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [methods.AGGREGATE_PART.path, methods.GET_STATUS.path, CHANNELZ, UNKNOWN])
async def test_who_has_no_token_is_refused_before_anything_is_read(path: str) -> None:
    credentials = Credentials(tokens=(TOKEN,))
    async with (
        serving(FakePeer(), FakeGossip(), credentials=credentials) as (transport, endpoint),
        grpc.aio.insecure_channel(endpoint) as channel,
    ):
        assert (await refusal(opened(channel, path)))[0] is grpc.StatusCode.UNAUTHENTICATED
        await no_call_is_in_progress(transport)


@pytest.mark.asyncio
async def test_an_unknown_method_reads_nothing() -> None:
    async with serving(FakePeer()) as (transport, endpoint), grpc.aio.insecure_channel(endpoint) as channel:
        assert (await refusal(opened(channel, UNKNOWN)))[0] is grpc.StatusCode.UNIMPLEMENTED
        await no_call_is_in_progress(transport)


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_a_method_with_one_request_takes_one() -> None:
    async with serving(FakePeer()) as (_, endpoint), grpc.aio.insecure_channel(endpoint) as channel:
        call = opened(channel, methods.WATCH_ROUNDS.path)
        await call.done_writing()
        code, told = await refusal(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "no message in a request to /averaging.status.v1.Status/WatchRounds, which takes one" in told


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_channelz_answers_in_its_own_words() -> None:
    async with serving(FakePeer()) as (_, endpoint), grpc.aio.insecure_channel(endpoint) as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        assert (await stub.GetServers(channelz_pb2.GetServersRequest())).server
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetServer(channelz_pb2.GetServerRequest(server_id=1 << 40))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
