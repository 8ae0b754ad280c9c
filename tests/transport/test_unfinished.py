"""Requests that are never finished: what a peer holds of them is bounded, and they end."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from itertools import repeat

import grpc
import psutil
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from averaging.security.credentials import Credentials
from averaging.transport.grpc import GrpcTransport, channel_options, methods, request_intake, server
from averaging.transport.grpc.authentication import Callers
from averaging.transport.grpc.unfinished_calls import LOOK_SECONDS, ByteLimits
from tests.support.certificates import TOKEN
from tests.support.grpc_fakes import (
    MAX_MESSAGE_BYTES,
    SCHEMA,
    FakeGossip,
    FakePeer,
    client,
    number_of,
    part,
    parts,
    serving,
)
from tests.support.processes import JsonProcess
from tests.support.raw_http2 import MIB, Stranger, message, stranger

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

PATIENCE = 20.0

HEALTH_CHECK, HEALTH_WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
CHANNELZ = "/grpc.channelz.v1.Channelz/GetServers"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
STANDARD = [HEALTH_CHECK, HEALTH_WATCH, CHANNELZ, REFLECTION]
ONE_REPLY = [
    *(method.path for method in (methods.PUSH, methods.LIST_RECORDS, methods.GET_STATUS, methods.GET_SCHEMA)),
    HEALTH_CHECK,
    CHANNELZ,
]
"""With the reply the call ends, whether or not its caller has said that there are no more requests."""

UNKNOWN = "/no.such.Service/Method"
SERVED = [*methods.REQUEST_BYTES, *STANDARD]

FEW = ByteLimits(per_connection=2 * MIB, per_host=3 * MIB, in_all=8 * MIB)


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that holds little."""
    monkeypatch.setattr(server, "held_limits", lambda _: FEW)


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does not wait for long."""
    monkeypatch.setattr(request_intake, "REQUEST_SECONDS", 0.4)
    monkeypatch.setattr(request_intake, "REQUEST_BYTES_PER_SECOND", 1 << 60)


async def leaves_unfinished(caller: Stranger, path: str, nbytes: int, streams: int = 2) -> None:
    """Sends so many bytes of messages that are announced as longer, until the connection is closed."""
    calls = [await caller.open(path) for _ in range(streams)]
    for call in calls:
        await caller.send(call, message(b"", MAX_MESSAGE_BYTES))
    for _ in range(nbytes // streams >> 16):
        for call in calls:
            await caller.send(call, bytes(1 << 16))


# Bytes


@pytest.mark.asyncio
@pytest.mark.parametrize("path", SERVED)
async def test_a_connection_that_leaves_too_much_unfinished_is_closed(
    path: str, few_bytes: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serving(FakePeer(), FakeGossip()) as (transport, endpoint),
        client() as other,
        stranger(endpoint) as caller,
        asyncio.timeout(PATIENCE),
    ):
        await leaves_unfinished(caller, path, 4 * MIB)
        await caller.wait_until_hung_up()
        assert await other.get_schema(endpoint) == SCHEMA
        await nothing_is_held(transport)
    (told,) = [record for record in caplog.records if record.name == "averaging.transport"]
    assert told.levelno == logging.WARNING
    assert "its unfinished requests hold" in told.getMessage()


async def nothing_is_held(transport: GrpcTransport) -> None:
    """Returns when no call is unfinished."""
    assert transport._server is not None
    connections = transport._server._unfinished._connections
    await until(lambda: not any(one.calls for one in connections.values()))


async def until(true: Callable[[], object]) -> None:
    """Returns when something in this process is so that nobody tells of."""
    for pause in repeat(0.01):
        if true():
            return
        await asyncio.sleep(pause)


@pytest.mark.asyncio
async def test_what_a_few_bytes_of_a_message_keep_in_memory_counts_too(few_bytes: None) -> None:
    """gRPC keeps the whole block of memory in which they came, also what it has passed over."""
    async with serving(FakePeer()) as (_, endpoint), stranger(endpoint) as caller, asyncio.timeout(PATIENCE):
        call = await caller.open(methods.GET_STATUS.path)
        await caller.send(call, message(b"", MAX_MESSAGE_BYTES))
        for _ in range(400):
            await caller.send(call, bytes(32))
            await caller.junk(8192)
        await caller.wait_until_hung_up()


@pytest.mark.asyncio
async def test_all_connections_of_a_host_count_together(few_bytes: None) -> None:
    async with serving(FakePeer()) as (_, endpoint), AsyncExitStack() as stack, asyncio.timeout(PATIENCE):
        callers = [await stack.enter_async_context(stranger(endpoint)) for _ in range(4)]
        for caller in callers:
            await leaves_unfinished(caller, methods.GET_STATUS.path, MIB + MIB // 4)
        await until(lambda: sum(caller.gone for caller in callers) >= 2)
        await asyncio.sleep(10 * LOOK_SECONDS)
        assert sum(caller.gone for caller in callers) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [*SERVED, UNKNOWN])
async def test_a_peer_that_has_no_token_is_refused_before_anything_is_read(path: str, few_bytes: None) -> None:
    credentials = Credentials(tokens=(TOKEN,))
    async with (
        serving(FakePeer(), FakeGossip(), credentials=credentials) as (transport, endpoint),
        stranger(endpoint) as caller,
        asyncio.timeout(PATIENCE),
    ):
        call = await caller.open(path)
        if path == HEALTH_CHECK:  # it needs none
            await leaves_unfinished(caller, path, 4 * MIB)
            await caller.wait_until_hung_up()
            return
        assert (await caller.ended(call))["grpc-status"] == str(grpc.StatusCode.UNAUTHENTICATED.value[0])
        await nothing_is_held(transport)


@pytest.mark.asyncio
async def test_an_unknown_method_reads_nothing() -> None:
    async with serving(FakePeer()) as (transport, endpoint), stranger(endpoint) as caller, asyncio.timeout(PATIENCE):
        told = await caller.ended(await caller.open(UNKNOWN))
        assert told["grpc-status"] == str(grpc.StatusCode.UNIMPLEMENTED.value[0])
        await nothing_is_held(transport)


@pytest.mark.asyncio
async def test_what_is_taken_is_not_held(few_bytes: None) -> None:
    """Beside a call that is never finished, a stream of parts goes on over the same connection."""
    async with (
        serving(FakePeer()) as (_, endpoint),
        stranger(endpoint) as caller,
        asyncio.timeout(PATIENCE),
    ):
        await caller.open(methods.GET_STATUS.path)
        stream = await caller.open(methods.AGGREGATE_PART.path)
        raw = message(methods.AGGREGATE_PART.request.SerializeToString(part(7, MIB // 4)))
        for number in range(24):  # 6 MiB
            assert await caller.send(stream, raw)
            assert await caller.replied(stream, (number + 1) * len(raw))
            await asyncio.sleep(0.01)
        assert not caller.gone


@pytest.mark.asyncio
async def test_a_connection_lasts_however_much_it_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    most = channel_options.WINDOW_BYTES + 4 * MIB  # a sender fills a window before its first part is read
    monkeypatch.setattr(server, "held_limits", lambda _: ByteLimits(most, most, most))
    async with serving(FakePeer(), FakeGossip()) as (_, endpoint), client() as caller, asyncio.timeout(PATIENCE):
        for _ in range(3):
            async with aclosing(caller.aggregate_part(endpoint, parts(16, MIB))) as replies:
                assert [number_of(reply) async for reply in replies] == list(range(16))
            await caller.get_schema(endpoint)
        (connection,) = caller._channels._connections.values()
        assert connection.channel.get_state() is grpc.ChannelConnectivity.READY


@pytest.mark.asyncio
async def test_a_first_part_that_waits_for_its_round_is_held(few_bytes: None) -> None:
    """Strangers' messages lie in this process, not in gRPC, while their group is waited for."""

    async def waits(messages: AsyncIterator[object]) -> AsyncIterator[object]:
        await anext(messages)
        await asyncio.Event().wait()
        yield None

    async with (
        serving(FakePeer(aggregate=waits)) as (_, endpoint),  # type: ignore[arg-type]
        stranger(endpoint) as caller,
        asyncio.timeout(PATIENCE),
    ):
        raw = message(methods.AGGREGATE_PART.request.SerializeToString(part(7, MIB)))
        for _ in range(3):
            await caller.send(await caller.open(methods.AGGREGATE_PART.path), raw)
        await caller.wait_until_hung_up()


# Of a whole process

PEER = """
import asyncio, json, sys, torch
from averaging import Peer

async def main():
    async with Peer([torch.zeros(3)], run_id="run") as peer:
        print(json.dumps({"event": "ready", "endpoint": peer.endpoint}), flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""

FLOOD = 480 * MIB
PACE = 0.005
"""Seconds after each MiB, so that it is no race between two processes for the same processors."""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "connections", "junk"),
    [
        (methods.GET_STATUS.path, 1, False),
        pytest.param(methods.AGGREGATE_PART.path, 1, False, marks=pytest.mark.long),
        pytest.param(HEALTH_CHECK, 8, False, marks=pytest.mark.long),
        pytest.param(methods.GET_STATUS.path, 1, True, marks=pytest.mark.long),
    ],
    ids=["streams of one connection", "parts", "connections of one host", "few bytes of a message"],
)
async def test_a_process_keeps_its_memory(path: str, connections: int, junk: bool) -> None:
    with JsonProcess(sys.executable, "-c", PEER) as process:
        endpoint = str(process.expect("ready")["endpoint"])
        memory = psutil.Process(process.pid).memory_info
        before, most = memory().rss, 0
        limits = channel_options.held_limits(34 * MIB)
        bound = limits.per_connection if connections == 1 else limits.per_host
        async with AsyncExitStack() as stack, asyncio.timeout(3 * PATIENCE):
            callers = [await stack.enter_async_context(stranger(endpoint)) for _ in range(connections)]
            calls = [(caller, await caller.open(path)) for _ in range(16) for caller in callers]
            for caller, call in calls:
                await caller.send(call, message(b"", 32 * MIB))
            sent, number = 0, 0
            while sent < FLOOD and not all(caller.gone for caller in callers):
                caller, call = calls[number % len(calls)]
                number += 1
                before_this = caller.sent
                if junk:
                    for _ in range(128):
                        await caller.send(call, bytes(32))
                        await caller.junk(8192)
                else:
                    await caller.send(call, bytes(MIB))
                sent += caller.sent - before_this
                most = max(most, memory().rss - before)
                if not caller.gone:
                    await asyncio.sleep(PACE)
            gone = sum(caller.gone for caller in callers)
        assert gone == 1 if connections == 1 else gone >= 1
        assert most < bound + 128 * MIB, f"{most / MIB:.0f} MiB after {sent / MIB:.0f}"


# Time


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [path for path in SERVED if path not in (methods.AGGREGATE_PART.path, REFLECTION)])
@pytest.mark.parametrize("sent", ["nothing", "a part of it", "no end"])
async def test_a_request_that_is_not_complete_in_time_ends(path: str, sent: str, little_time: None) -> None:
    async with serving(FakePeer(), FakeGossip()) as (transport, endpoint), stranger(endpoint) as caller:
        call = await caller.open(path)
        if sent == "a part of it":
            await caller.send(call, message(bytes(10), 100))
        elif sent == "no end":
            await caller.send(call, message(b""))
        async with asyncio.timeout(PATIENCE):
            told = await caller.ended(call)
            await nothing_is_held(transport)
        if sent == "no end" and path in ONE_REPLY:
            assert "grpc-message" not in told or "complete" not in told["grpc-message"]
            return
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
async def test_a_reflection_stream_that_asks_no_more_ends(little_time: None) -> None:
    async with serving(FakePeer()) as (transport, endpoint), grpc.aio.insecure_channel(endpoint) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        stream = stub.ServerReflectionInfo()
        await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await stream.read()).list_services_response.service
        async with asyncio.timeout(PATIENCE):
            assert await stream.read() is grpc.aio.EOF
            await nothing_is_held(transport)


def test_a_large_request_has_the_time_that_a_slow_link_needs() -> None:
    link = 256_000 / 8
    for path, nbytes in methods.REQUEST_BYTES.items():
        seconds = request_intake.seconds_for(path)
        assert seconds is None if nbytes is None else (seconds is not None and seconds > 20 + nbytes / link)
    assert (
        request_intake.seconds_for(UNKNOWN)
        == request_intake.seconds_for(HEALTH_CHECK)
        == request_intake.seconds_for(methods.GET_STATUS.path)
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [0, 2])
async def test_a_method_with_one_request_takes_one(count: int) -> None:
    async with serving(FakePeer()) as (_, endpoint), stranger(endpoint) as caller, asyncio.timeout(PATIENCE):
        call = await caller.open(methods.WATCH_ROUNDS.path)
        await caller.send(call, count * message(b""), end=True)
        told = await caller.ended(call)
    assert told["grpc-status"] == str(grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert "in a request to /averaging.status.v1.Status/WatchRounds, which takes one" in told["grpc-message"]


@pytest.mark.asyncio
async def test_a_malformed_request_to_a_standard_service_is_its_caller_s_fault() -> None:
    async with serving(FakePeer()) as (_, endpoint), grpc.aio.insecure_channel(endpoint) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_CHECK)
        with pytest.raises(grpc.aio.AioRpcError, match="a malformed request to /grpc.health") as raised:
            await call(b"\xff")
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# Calls of one host


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [*SERVED, UNKNOWN])
async def test_every_service_counts_in_the_calls_of_a_host(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        server, "Callers", lambda authenticated: Callers(authenticated=authenticated, max_calls_per_host=1)
    )
    async with serving(FakePeer(), FakeGossip()) as (transport, endpoint), asyncio.timeout(PATIENCE):
        assert transport._server is not None
        in_progress = transport._server._callers._calls._taken
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
async def test_a_host_watches_the_health_of_a_peer_so_often() -> None:
    async with serving(FakePeer()) as (_, endpoint), AsyncExitStack() as stack, asyncio.timeout(PATIENCE):
        stubs = [
            health_pb2_grpc.HealthStub(await stack.enter_async_context(grpc.aio.insecure_channel(endpoint)))
            for _ in range(2)
        ]
        request = health_pb2.HealthCheckRequest()
        calls = [stubs[number % 2].Watch(request) for number in range(channel_options.MAX_WATCHES_PER_HOST)]
        for call in calls:
            assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="16 Health/Watch calls of your host are in progress") as raised:
            await stubs[0].Watch(request).read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stubs[1].Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        calls.pop().cancel()
        while True:
            try:
                assert await stubs[0].Watch(request).read()
                break
            except grpc.aio.AioRpcError:  # the one that was cancelled has not ended yet
                await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()


@pytest.mark.asyncio
async def test_channelz_answers_in_its_own_words() -> None:
    async with serving(FakePeer()) as (_, endpoint), grpc.aio.insecure_channel(endpoint) as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        assert (await stub.GetServers(channelz_pb2.GetServersRequest())).server
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetServer(channelz_pb2.GetServerRequest(server_id=1 << 40))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
