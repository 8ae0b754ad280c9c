"""A caller of a real server that answers with anything: what is sound arrives, the rest is the error it should be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from averaging.errors import (
    AveragingError,
    CallRefusedError,
    PeerUnreachableError,
    ProtocolViolationError,
)
from averaging.protocol.messages import AveragingData, JoinRequest, MessageCode, MessageFromLeader, WireTensor
from averaging.state.manifest import State, pack, seal
from averaging.transport import RpcMethod
from averaging.transport.grpc import GrpcTransport, methods
from tests.fuzz.material import damaged, protobufs
from tests.support.complaints import complaints
from tests.support.selection import examples
from tests.support.spelling import spelled

SOME = settings(
    max_examples=examples(48), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
PATIENCE = 20.0

identity: Callable[[bytes], bytes] = bytes

REQUEST = JoinRequest("peer:1", b"hash", 1e10)
PART = AveragingData(MessageCode.PART_FOR_AVERAGING, b"x" * 20, "peer:1", WireTensor(b"\0" * 4, (1,), "float32"))
STATE = list(pack(seal(State(3, {"w": torch.arange(6.0), "n": torch.tensor(1)}, {"step": 1}))))
SOUND = [
    methods.JOIN_GROUP.reply.SerializeToString(
        MessageFromLeader(MessageCode.BEGIN_ALLREDUCE, b"x" * 20, "peer:2", ("peer:1", "peer:2"), (b"1", b""))
    ),
    methods.AGGREGATE_PART.reply.SerializeToString(PART),
    *map(methods.DOWNLOAD_STATE.reply.SerializeToString, STATE),
]
METHODS: tuple[RpcMethod[Any, Any], ...] = (methods.JOIN_GROUP, methods.AGGREGATE_PART, methods.DOWNLOAD_STATE)
ENDS = {
    None: None,
    grpc.StatusCode.UNAVAILABLE: PeerUnreachableError,
    grpc.StatusCode.CANCELLED: PeerUnreachableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: PeerUnreachableError,
    grpc.StatusCode.UNAUTHENTICATED: CallRefusedError,
    grpc.StatusCode.INVALID_ARGUMENT: CallRefusedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CallRefusedError,
    grpc.StatusCode.INTERNAL: CallRefusedError,
    grpc.StatusCode.DATA_LOSS: CallRefusedError,
}
"""How a call ends, and what its caller is told then."""

answers = st.lists(st.one_of(protobufs(), damaged(SOUND), st.binary(max_size=60)), max_size=4)


class Hostile(grpc.GenericRpcHandler):
    """Answers any call with the bytes it was given last, whatever is asked."""

    def __init__(self) -> None:
        self.answer: list[bytes] = []
        self.end: grpc.StatusCode | None = None

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.stream_stream_rpc_method_handler(self._handle)

    async def _handle(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        for raw in self.answer:
            await context.write(raw)
        if self.end is not None:
            await context.abort(self.end, "so")


@dataclass(frozen=True, slots=True)
class World:
    """Such a server, a peer's transport to call it with, and the loop of both, the same for all examples of a test."""

    service: Hostile
    caller: GrpcTransport
    endpoint: str
    run: Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def world() -> Iterator[World]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        service, caller, endpoint = runner.run(stack.enter_async_context(hostile()))
        yield World(service, caller, endpoint, runner.run)
        runner.run(stack.aclose())


@asynccontextmanager
async def hostile() -> AsyncIterator[tuple[Hostile, GrpcTransport, str]]:
    service, server = Hostile(), grpc.aio.server()
    server.add_generic_rpc_handlers([service])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    caller = GrpcTransport(None, max_message_bytes=1 << 20)
    try:
        yield service, caller, f"127.0.0.1:{port}"
    finally:
        await caller.close()
        await server.stop(None)


async def one_part() -> AsyncGenerator[AveragingData, None]:
    yield PART


def start(caller: GrpcTransport, method: RpcMethod[Any, Any], endpoint: str) -> AsyncGenerator[Any, None]:
    if method is methods.JOIN_GROUP:
        return caller.join_group(endpoint, REQUEST)
    if method is methods.AGGREGATE_PART:
        return caller.aggregate_part(endpoint, one_part())
    return caller.download_state(endpoint)


def expected(
    method: RpcMethod[Any, Any], answer: list[bytes], end: grpc.StatusCode | None
) -> tuple[list[Any], type[AveragingError] | None]:
    """What should arrive, and the error after it."""
    arrive: list[Any] = []
    for raw in answer:
        try:
            arrive.append(method.read_reply(raw))
        except ProtocolViolationError:
            return arrive, ProtocolViolationError
    return arrive, ENDS[end]


@SOME
@given(st.lists(st.tuples(st.sampled_from(METHODS), answers, st.sampled_from(list(ENDS))), min_size=20, max_size=40))
def test_any_bytes_in_the_answer(
    world: World,
    caplog: pytest.LogCaptureFixture,
    calls: list[tuple[RpcMethod[Any, Any], list[bytes], grpc.StatusCode | None]],
) -> None:
    async def main() -> None:
        for method, answer, end in calls:
            world.service.answer, world.service.end = answer, end
            replies: list[Any] = []
            error: type[AveragingError] | None = None
            try:
                async with asyncio.timeout(PATIENCE), aclosing(start(world.caller, method, world.endpoint)) as stream:
                    while (reply := await anext(stream, None)) is not None:
                        replies.append(reply)
            except AveragingError as raised:
                error = type(raised)
            wanted, wanted_error = expected(method, answer, end)
            assert list(map(spelled, replies)) == list(map(spelled, wanted))
            assert error is wanted_error

    with caplog.at_level(logging.ERROR):
        world.run(main())
    assert complaints(caplog.records) == []
