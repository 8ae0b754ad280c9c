"""Requests as a peer receives them: refused unread without the token, one where one is due, and complete in time."""

from __future__ import annotations

import asyncio
from itertools import repeat

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from averaging.security.credentials import Credentials
from averaging.transport.grpc import GrpcTransport, authentication, methods, request_intake
from tests.support.certificates import TOKEN
from tests.support.grpc_fakes import (
    FakeGossip,
    FakePeer,
    part,
    serving,
    until,
)
from tests.transport.raw_http2 import message, stranger

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

PATIENCE = 20.0

HEALTH_CHECK, HEALTH_WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
CHANNELZ = "/grpc.channelz.v1.Channelz/GetServers"

UNKNOWN = "/no.such.Service/Method"


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does not wait for long."""
    monkeypatch.setattr(request_intake, "REQUEST_SECONDS", 0.4)


async def no_call_is_in_progress(transport: GrpcTransport) -> None:
    """Returns when no call is in progress."""
    assert transport._server is not None
    tasks = transport._server._intake._tasks
    await until(lambda: not tasks)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [methods.AGGREGATE_PART.path, methods.GET_STATUS.path, CHANNELZ, UNKNOWN])
async def test_a_peer_that_has_no_token_is_refused_before_anything_is_read(path: str) -> None:
    credentials = Credentials(tokens=(TOKEN,))
    async with (
        serving(FakePeer(), FakeGossip(), credentials=credentials) as (transport, endpoint),
        stranger(endpoint) as caller,
        asyncio.timeout(PATIENCE),
    ):
        call = await caller.open(path)
        assert (await caller.ended(call))["grpc-status"] == str(grpc.StatusCode.UNAUTHENTICATED.value[0])
        await no_call_is_in_progress(transport)


@pytest.mark.asyncio
async def test_an_unknown_method_reads_nothing() -> None:
    async with serving(FakePeer()) as (transport, endpoint), stranger(endpoint) as caller, asyncio.timeout(PATIENCE):
        told = await caller.ended(await caller.open(UNKNOWN))
        assert told["grpc-status"] == str(grpc.StatusCode.UNIMPLEMENTED.value[0])
        await no_call_is_in_progress(transport)


# Time


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "sent"),
    [(methods.PUSH.path, "nothing"), (methods.SUBSCRIBE.path, "a part of it"), (HEALTH_CHECK, "a part of it")],
)
async def test_a_request_that_is_not_complete_in_time_ends(path: str, sent: str, little_time: None) -> None:
    async with serving(FakePeer(), FakeGossip()) as (transport, endpoint), stranger(endpoint) as caller:
        call = await caller.open(path)
        if sent == "a part of it":
            await caller.send(call, message(bytes(10), 100))
        async with asyncio.timeout(PATIENCE):
            told = await caller.ended(call)
            await no_call_is_in_progress(transport)
        assert told["grpc-status"] == str(grpc.StatusCode.INVALID_ARGUMENT.value[0])
        assert f"the request to {path} was not complete within" in told["grpc-message"]
        assert not caller.gone


@pytest.mark.asyncio
async def test_bytes_that_drip_give_no_more_time(little_time: None) -> None:
    async with (
        serving(FakePeer()) as (_, endpoint),
        stranger(endpoint) as caller,
        asyncio.timeout(PATIENCE),
    ):
        call = await caller.open(methods.GET_STATUS.path)
        assert await caller.send(call, message(b"", 1 << 16))
        for pause in repeat(0.05):
            if not await caller.send(call, b"x"):
                break
            await asyncio.sleep(pause)
        assert "was not complete within" in caller.headers[call]["grpc-message"]


@pytest.mark.asyncio
async def test_a_part_may_take_as_long_as_its_round_allows(little_time: None) -> None:
    """As over 256 kbit/s, where 1 MiB takes half a minute."""
    async with serving(FakePeer()) as (_, endpoint), stranger(endpoint) as caller, asyncio.timeout(PATIENCE):
        call = await caller.open(methods.AGGREGATE_PART.path)
        raw = message(methods.AGGREGATE_PART.request.SerializeToString(part(7, 1 << 16)))
        for number in (1, 2):
            for begin in range(0, len(raw), 8192):
                assert await caller.send(call, raw[begin : begin + 8192])
                await asyncio.sleep(0.1)  # 0.8 s in all
            assert await caller.replied(call, number * len(raw)) == number * raw


@pytest.mark.asyncio
async def test_a_method_with_one_request_takes_one() -> None:
    async with serving(FakePeer()) as (_, endpoint), stranger(endpoint) as caller, asyncio.timeout(PATIENCE):
        call = await caller.open(methods.WATCH_ROUNDS.path)
        await caller.send(call, b"", end=True)
        told = await caller.ended(call)
    assert told["grpc-status"] == str(grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert "no message in a request to /averaging.status.v1.Status/WatchRounds, which takes one" in told["grpc-message"]


# Calls of one host


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [methods.AGGREGATE_PART.path, methods.GET_SCHEMA.path, HEALTH_WATCH, UNKNOWN])
async def test_every_service_counts_in_the_calls_of_a_host(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "MAX_CALLS_PER_HOST", 1)
    async with serving(FakePeer(), FakeGossip()) as (transport, endpoint), asyncio.timeout(PATIENCE):
        assert transport._server is not None
        in_progress = transport._server._intake._callers._calls._taken
        for held, tried in ((path, methods.GET_STATUS.path), (methods.GET_STATUS.path, path)):
            if held == UNKNOWN:
                continue  # it ends at once
            async with stranger(endpoint) as first, stranger(endpoint) as second:
                assert await first.send(await first.open(held), message(b"", 100))
                await until(lambda: in_progress)
                told = await second.ended(await second.open(tried))
                assert told["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
                assert told["grpc-message"] == "1 calls of your host are in progress; no more are taken"
            await until(lambda: not in_progress)


@pytest.mark.asyncio
async def test_channelz_answers_in_its_own_words() -> None:
    async with serving(FakePeer()) as (_, endpoint), grpc.aio.insecure_channel(endpoint) as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        assert (await stub.GetServers(channelz_pb2.GetServersRequest())).server
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetServer(channelz_pb2.GetServerRequest(server_id=1 << 40))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
