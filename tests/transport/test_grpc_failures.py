"""Calls that are refused, services that fail, messages that are malformed: who sees what of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc
import pytest

from averaging.errors import CallRefusedError, ClosedError, ProtocolViolationError
from averaging.protocol.messages import AveragingData, JoinRequest, MessageFromLeader
from averaging.transport.grpc import methods
from tests.support.grpc_fakes import (
    MAX_MESSAGE_BYTES,
    REQUEST,
    FakeGossip,
    FakePeer,
    client,
    endless,
    number_of,
    part,
    parts,
    read_all,
    serving,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


@pytest.mark.asyncio
async def test_a_failure_of_the_service_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(_: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        raise ZeroDivisionError("a secret")
        yield

    async with serving(FakePeer(join=fails)) as (_, endpoint), client() as caller:
        with pytest.raises(CallRefusedError, match="internal error") as raised:
            await anext(caller.join_group(endpoint, REQUEST))
    assert "secret" not in str(raised.value)
    (record,) = [record for record in caplog.records if record.name == "averaging.transport"]
    assert record.levelno >= logging.WARNING
    assert "/DecentralizedAveraging/rpc_join_group" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [ProtocolViolationError, ClosedError])
async def test_a_refusal_of_the_service_is_reported_with_its_text(error: type[Exception]) -> None:
    async def refuses(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        yield await anext(messages)
        raise error("a:1 is not a member\nof this group" + "!" * 10_000)

    async with (
        serving(FakePeer(aggregate=refuses)) as (_, endpoint),
        client() as caller,
        aclosing(caller.aggregate_part(endpoint, endless())) as replies,
    ):
        await anext(replies)
        with pytest.raises(CallRefusedError, match="a:1 is not a member of this group!") as raised:
            await anext(replies)
    assert len(str(raised.value)) < 400


@pytest.mark.asyncio
async def test_the_last_reply_and_the_end_survive_a_failing_write() -> None:
    """The callee answers and ends while the caller is writing: its answer counts, not the write that fails."""

    async def answers_the_first(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        yield await anext(messages)
        yield part(77)

    async def megabytes() -> AsyncGenerator[AveragingData, None]:
        while True:
            yield part(5, 1 << 20)

    async with serving(FakePeer(aggregate=answers_the_first)) as (_, endpoint), client() as caller:
        for _ in range(30):
            async with aclosing(caller.aggregate_part(endpoint, megabytes())) as replies:
                assert [number_of(reply) async for reply in replies] == [5, 77]


@pytest.mark.asyncio
@pytest.mark.usefixtures("lane")
async def test_what_the_senders_messages_raise_is_raised_at_the_caller() -> None:
    async def breaks() -> AsyncGenerator[AveragingData, None]:
        yield part(0)
        raise KeyError("the sender's own")

    service = FakePeer()
    async with serving(service) as (_, endpoint), client() as caller:
        with pytest.raises(KeyError, match="the sender's own"):
            await read_all(caller.aggregate_part(endpoint, breaks()))
        await asyncio.wait_for(service.closed.wait(), 5)


@pytest.mark.asyncio
async def test_a_malformed_request_is_refused() -> None:
    async with serving(FakePeer(), FakeGossip()) as (_, endpoint), grpc.aio.insecure_channel(endpoint) as channel:
        start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(methods.JOIN_GROUP.path)
        call = start(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.asyncio
async def test_messages_that_are_too_large() -> None:
    async def swells(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        yield part(number_of(await anext(messages)), MAX_MESSAGE_BYTES * 2)

    large = 4 * MAX_MESSAGE_BYTES
    async with serving(FakePeer(aggregate=swells), limit=large) as (_, endpoint), client() as caller:
        with pytest.raises(ProtocolViolationError, match=f"{endpoint} sent a message of 83886.. bytes, limit 4194304"):
            await anext(caller.aggregate_part(endpoint, parts(1)))
    async with serving(FakePeer()) as (_, endpoint), client(large) as caller:
        with pytest.raises(CallRefusedError, match="the message is too large for it: 8"):
            await anext(caller.aggregate_part(endpoint, parts(1, 2 * MAX_MESSAGE_BYTES)))
    async with serving(FakePeer()) as (_, endpoint), client() as caller:
        with pytest.raises(CallRefusedError, match="the message is too large to be sent: 8"):
            await anext(caller.aggregate_part(endpoint, parts(1, 2 * MAX_MESSAGE_BYTES)))
