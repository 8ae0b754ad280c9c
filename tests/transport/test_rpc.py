"""Methods of rooms above the core, on real sockets: all shapes of a call, errors, tokens, TLS, a peer's own port."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import grpc
import pytest
import torch
from google.protobuf.wrappers_pb2 import Int64Value, StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from averaging import ConfigError, DecentralizedAverager, LocalSGD, Peer
from averaging.errors import BusyError, CallRefusedError, ListenError, PeerUnreachableError
from averaging.peer import PeerContext
from averaging.rpc import EventLoopThread, RpcChannel, RpcHandler, RpcMethod, RpcServer, read_credentials
from averaging.testing.transport import MemoryNetwork
from tests.support.certificates import TOKEN

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

SAY = RpcMethod("/averaging.v1.Echo/Say", StringValue, StringValue, max_request_bytes=100)
COUNT = RpcMethod("/averaging.v1.Echo/Count", Int64Value, Int64Value, replies_stream=True)
SUM = RpcMethod("/averaging.v1.Echo/Sum", Int64Value, Int64Value, requests_stream=True)
DOUBLE = RpcMethod("/averaging.v1.Echo/Double", Int64Value, Int64Value, requests_stream=True, replies_stream=True)

LIMIT = 10.0


class Echo:
    """Every shape of a call; `closed` is set when a stream of `count` has ended."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        return [SAY.answers(self.say), COUNT.streams(self.count), SUM.collects(self.sum), DOUBLE.exchanges(self.double)]

    async def say(self, request: StringValue) -> StringValue:
        if request.value == "busy":
            raise BusyError("come back later")
        if request.value == "bug":
            raise ZeroDivisionError("secret")
        if request.value == "wait":
            await asyncio.Event().wait()
        return StringValue(value=request.value.upper())

    async def count(self, request: Int64Value) -> AsyncGenerator[Int64Value, None]:
        try:
            number = 0
            while request.value < 0 or number < request.value:
                yield Int64Value(value=number)
                number += 1
        finally:
            self.closed.set()

    async def sum(self, requests: AsyncIterator[Int64Value]) -> Int64Value:
        return Int64Value(value=sum([request.value async for request in requests]))

    async def double(self, requests: AsyncIterator[Int64Value]) -> AsyncGenerator[Int64Value, None]:
        async for request in requests:
            yield Int64Value(value=2 * request.value)


async def numbers(*values: int) -> AsyncGenerator[Int64Value, None]:
    for value in values:
        yield Int64Value(value=value)


async def endless() -> AsyncGenerator[Int64Value, None]:
    while True:
        yield Int64Value(value=1)


async def say(channel: RpcChannel, text: str, timeout: float = LIMIT) -> str:
    return (await channel.call(SAY, StringValue(value=text), timeout)).value


async def test_the_four_shapes_of_a_call() -> None:
    async with RpcServer("127.0.0.1:0", [Echo()]) as server, RpcChannel(server.endpoint) as channel:
        assert await say(channel, "hello") == "HELLO"
        assert [reply.value async for reply in channel.stream(COUNT, Int64Value(value=3))] == [0, 1, 2]
        assert (await channel.call(SUM, numbers(1, 2, 3), LIMIT)).value == 6
        assert [reply.value async for reply in channel.stream(DOUBLE, numbers(1, 2))] == [2, 4]


async def test_a_stream_that_its_caller_closes_is_closed_at_the_server() -> None:
    echo = Echo()
    async with RpcServer("127.0.0.1:0", [echo]) as server, RpcChannel(server.endpoint) as channel:
        async with aclosing(channel.stream(COUNT, Int64Value(value=-1))) as replies:
            assert (await anext(replies)).value == 0
        async with asyncio.timeout(LIMIT):
            await echo.closed.wait()


async def test_grpc_has_left_the_event_loop_when_the_last_channel_is_closed() -> None:
    """It would report to a closed loop else, and the error of that ends the reports to another loop of the process."""
    servers = [RpcServer("127.0.0.1:0", [Echo()]) for _ in range(2)]
    threads = [EventLoopThread(server, "a server") for server in servers]
    endpoints = [server.endpoint for server in servers]

    async def use() -> None:
        async with RpcChannel(endpoints[0]) as first, RpcChannel(endpoints[1]) as second, AsyncExitStack() as stack:
            for channel in (first, second) * 20:
                for shape in (channel.stream(COUNT, Int64Value(value=-1)), channel.stream(DOUBLE, endless())):
                    replies = await stack.enter_async_context(aclosing(shape))
                    await anext(replies)
            with pytest.raises(PeerUnreachableError):
                await say(first, "wait", 0.01)

    before = asyncio.all_tasks()
    await use()
    assert asyncio.all_tasks() == before
    for thread in threads:
        await asyncio.to_thread(thread.close)


async def test_errors_are_those_of_the_library() -> None:
    async with RpcServer("127.0.0.1:0", [Echo()]) as server, RpcChannel(server.endpoint) as channel:
        with pytest.raises(CallRefusedError, match="come back later"):
            await say(channel, "busy")
        with pytest.raises(CallRefusedError, match="internal error") as refused:
            await say(channel, "bug")
        assert "secret" not in str(refused.value)
        with pytest.raises(CallRefusedError, match="at most 100 are accepted"):
            await say(channel, "x" * 200)
        with pytest.raises(PeerUnreachableError, match=r"no answer within 0\.05 s"):
            await say(channel, "wait", 0.05)
        with pytest.raises(CallRefusedError, match="does not serve this"):
            await channel.call(RpcMethod("/averaging.v1.Echo/Other", StringValue, StringValue), StringValue(), LIMIT)
        assert await say(channel, "still there") == "STILL THERE"
        endpoint = server.endpoint
    async with RpcChannel(endpoint) as channel:
        with pytest.raises(PeerUnreachableError, match="connection refused"):
            await say(channel, "gone")


async def test_tokens_and_refused_callers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(TOKEN)
    known = read_credentials(token_file=tokens)
    async with RpcServer("127.0.0.1:0", [Echo()], credentials=known) as server:
        async with RpcChannel(server.endpoint, credentials=known) as channel:
            assert await say(channel, "a") == "A"
        async with RpcChannel(server.endpoint) as channel:
            with pytest.raises(CallRefusedError, match="token"):
                await say(channel, "a")
    assert "refused a call from 127.0.0.1" in caplog.text


async def test_health_and_reflection_know_the_service() -> None:
    async with RpcServer("127.0.0.1:0", [Echo()]) as server, grpc.aio.insecure_channel(server.endpoint) as foreign:
        health = health_pb2_grpc.HealthStub(foreign)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="averaging.v1.Echo"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(foreign)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        told = [service.name async for reply in call for service in reply.list_services_response.service]
        assert "averaging.v1.Echo" in told
        assert "averaging.gossip.v1.Gossip" not in told


def test_an_averager_serves_it_and_a_thread_calls_it() -> None:
    """`EventLoopThread` is for rooms whose callers are no coroutines."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DecentralizedAverager(
        optimizer, run_id="demo", strategy=LocalSGD(sync_every=9), services=[Echo()]
    ) as averager:
        channel = RpcChannel(averager.endpoint)
        thread = EventLoopThread(channel, "a channel")
        try:
            assert thread.run(say(channel, "a")) == "A"
        finally:
            thread.close()


async def test_what_cannot_work_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="path of a method"):
        RpcMethod("averaging.v1.Echo.Say", StringValue, StringValue)
    with pytest.raises(ConfigError, match="change one of them"):
        SAY.streams(Echo().count)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="served twice"):
        RpcServer("127.0.0.1:0", [Echo(), Echo()])
    with pytest.raises(ConfigError, match="use mode 'node'"):
        Peer([torch.zeros(1)], run_id="demo", mode="client", services=[Echo()])
    transport = MemoryNetwork(random.Random(0)).transport("a:1")
    with pytest.raises(ConfigError, match="give no transport"):
        Peer([torch.zeros(1)], run_id="demo", context=PeerContext(transport=transport), services=[Echo()])
    with pytest.raises(ConfigError, match="port 0"):
        RpcChannel("127.0.0.1:0")
    with pytest.raises(ConfigError, match="other machines can connect"):
        async with RpcServer("0.0.0.0:0", [Echo()], advertise="192.0.2.1:0"):
            pass
    async with RpcServer("127.0.0.1:0", [Echo()]) as server, RpcChannel(server.endpoint) as channel:
        with pytest.raises(ListenError):
            async with RpcServer(server.endpoint, [Echo()]):
                pass
        with pytest.raises(ConfigError, match=r"use stream\(\)"):
            await channel.call(COUNT, Int64Value(), LIMIT)
        with pytest.raises(ConfigError, match=r"use call\(\)"):
            channel.stream(SAY, StringValue())
