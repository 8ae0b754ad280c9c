"""A real peer's port with anything in the calls: it answers whose fault it is, and goes on serving."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from averaging import Peer
from averaging.protocol.messages import AveragingData, JoinRequest, MessageCode, WireTensor
from averaging.transport.grpc import methods
from tests.fuzz.material import damaged, protobufs
from tests.support.complaints import complaints
from tests.support.grpc_fakes import METHODS
from tests.support.selection import examples

PATHS = [method.path for method in METHODS]
SOUND = [
    methods.JOIN_GROUP.request.SerializeToString(JoinRequest("peer:1", b"hash", 1e10, b"", False)),
    methods.AGGREGATE_PART.request.SerializeToString(
        AveragingData(MessageCode.PART_FOR_AVERAGING, b"x" * 20, "peer:1", WireTensor(b"\0" * 4, (1,), "float32"))
    ),
]
RIGHT = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,  # another run
    grpc.StatusCode.DEADLINE_EXCEEDED,  # streams that are held open until the caller goes
    grpc.StatusCode.CANCELLED,
}
CODES = {MessageCode.PROTOCOL_VIOLATION, MessageCode.BAD_GROUP_ID, MessageCode.CANCELLED}
HELD, HELD_SECONDS = (methods.SUBSCRIBE.path, methods.WATCH_ROUNDS.path), 0.05

SOME = settings(
    max_examples=examples(48), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)

identity: Callable[[bytes], bytes] = bytes


@dataclass(frozen=True, slots=True)
class World:
    """A peer, a channel to it, and the loop of both, the same for all examples of a test."""

    peer: Peer
    channel: grpc.aio.Channel
    run: Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def world() -> Iterator[World]:
    async def enter(stack: AsyncExitStack) -> tuple[Peer, grpc.aio.Channel]:
        peer = await stack.enter_async_context(Peer([torch.zeros(3)], run_id="fuzz"))
        return peer, await stack.enter_async_context(grpc.aio.insecure_channel(peer.endpoint))

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        yield World(*runner.run(enter(stack)), runner.run)
        runner.run(stack.aclose())


async def call(channel: grpc.aio.Channel, path: str, messages: list[bytes]) -> tuple[grpc.StatusCode, list[bytes]]:
    async def outgoing() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    stub = channel.stream_stream(path, request_serializer=identity, response_deserializer=identity)
    answer = stub(outgoing(), timeout=HELD_SECONDS if path in HELD else 20)
    replies: list[bytes] = []
    try:
        replies.extend([reply async for reply in answer])
    except grpc.aio.AioRpcError as error:
        return error.code(), replies
    return await answer.code(), replies


@SOME
@given(
    st.lists(
        st.tuples(st.sampled_from(PATHS), st.lists(st.one_of(protobufs(), damaged(SOUND)), min_size=1, max_size=3)),
        min_size=20,
        max_size=30,
    )
)
def test_any_bytes_in_any_call(
    world: World, caplog: pytest.LogCaptureFixture, calls: list[tuple[str, list[bytes]]]
) -> None:
    async def main() -> None:
        for path, messages in calls:
            several = path == methods.AGGREGATE_PART.path
            code, replies = await call(world.channel, path, messages if several else messages[:1])
            assert code in RIGHT, path
            if several:
                assert {methods.AGGREGATE_PART.read_reply(reply).code for reply in replies} <= CODES
        code, [status] = await call(world.channel, methods.GET_STATUS.path, [b""])
        assert code is grpc.StatusCode.OK
        assert methods.GET_STATUS.read_reply(status).endpoint == world.peer.endpoint

    with caplog.at_level(logging.ERROR):
        world.run(main())
    assert complaints(caplog.records) == []
