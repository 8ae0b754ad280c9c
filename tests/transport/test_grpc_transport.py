"""Every method over loopback sockets, and how calls end when all goes well."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from averaging.protocol.messages import AveragingData, MessageCode
from tests.support.grpc_fakes import FakePeer, client, number_of, part, parts, serving

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

MIB = 1 << 20

MAX_UNREAD = 16
"""Messages of a mebibyte that may be on their way while nobody reads: a window of 4 MiB, and a few in buffers."""


@pytest.mark.usefixtures("lane")
async def test_fifty_parts_of_a_mebibyte_go_up_and_come_back() -> None:
    async with (
        serving(FakePeer()) as (_, endpoint),
        client() as caller,
        aclosing(caller.aggregate_part(endpoint, parts(50, MIB))) as replies,
    ):
        numbers: list[int] = []
        async for reply in replies:
            assert reply == part(len(numbers), MIB)
            numbers.append(number_of(reply))
    assert numbers == list(range(50))


@pytest.mark.usefixtures("lane")
async def test_a_reply_comes_before_the_last_part_is_sent() -> None:
    async def sends_the_next_after_a_reply() -> AsyncGenerator[AveragingData, None]:
        for number in range(3):
            yield part(number)
            await answered.acquire()

    answered = asyncio.Semaphore(0)
    async with (
        serving(FakePeer()) as (_, endpoint),
        client() as caller,
        aclosing(caller.aggregate_part(endpoint, sends_the_next_after_a_reply())) as replies,
    ):
        async for _ in replies:
            answered.release()


@pytest.mark.usefixtures("lane")
async def test_a_service_that_ends_early_ends_the_upload() -> None:
    async def answers_the_first(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        yield await anext(messages)

    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[AveragingData, None]:
        try:
            while True:
                yield part(1, MIB)
        finally:
            closed.set()

    async with serving(FakePeer(aggregate=answers_the_first)) as (_, endpoint), client() as caller:
        async with aclosing(caller.aggregate_part(endpoint, endless())) as replies:
            assert [number_of(reply) async for reply in replies] == [1]
        assert closed.is_set()


@pytest.mark.usefixtures("lane")
async def test_the_messages_of_a_refused_sender_are_read_to_the_end() -> None:
    """Some clients lose the answer if a write fails."""
    sent = 0

    async def messages() -> AsyncGenerator[AveragingData, None]:
        nonlocal sent
        for _ in range(20):
            sent += 1
            yield part(1, 64)

    async def refuses(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        await anext(messages)
        yield AveragingData(MessageCode.BAD_GROUP_ID)

    async with (
        serving(FakePeer(aggregate=refuses)) as (_, endpoint),
        client() as caller,
        aclosing(caller.aggregate_part(endpoint, messages())) as replies,
    ):
        assert [reply.code async for reply in replies] == [MessageCode.BAD_GROUP_ID]
    assert sent == 20


@pytest.mark.usefixtures("lane")
async def test_a_caller_that_is_cancelled_closes_the_service() -> None:
    async def reads_on() -> None:
        async with aclosing(caller.aggregate_part(endpoint, parts_without_end())) as replies:
            async for _ in replies:
                pass

    async def parts_without_end() -> AsyncGenerator[AveragingData, None]:
        yield part(0)
        await asyncio.Event().wait()

    service = FakePeer()
    async with serving(service) as (_, endpoint), client() as caller:
        reading = asyncio.create_task(reads_on())
        await service.started.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await asyncio.wait_for(service.closed.wait(), 5)


class Flood:
    """64 parts; it tells when the first and when too many of them are asked for."""

    def __init__(self) -> None:
        self.begun, self.too_many = asyncio.Event(), asyncio.Event()

    async def parts(self) -> AsyncGenerator[AveragingData, None]:
        for number in range(64):
            self.begun.set()
            if number == MAX_UNREAD:
                self.too_many.set()
            yield part(number, MIB)

    async def is_held_back(self) -> bool:
        """Whether no more are asked for than may be unread; half a second is enough for all of them."""
        await self.begun.wait()
        try:
            await asyncio.wait_for(self.too_many.wait(), 0.5)
        except TimeoutError:
            return True
        return False


@pytest.mark.usefixtures("lane")
async def test_a_service_that_does_not_read_holds_the_sender_back() -> None:
    async def reads_late(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        await may_read.wait()
        async for message in messages:
            yield message

    may_read, flood = asyncio.Event(), Flood()
    service = FakePeer(aggregate=reads_late)
    async with (
        serving(service) as (_, endpoint),
        client() as caller,
        aclosing(caller.aggregate_part(endpoint, flood.parts())) as replies,
    ):
        first = asyncio.create_task(anext(replies))
        await service.started.wait()
        assert await flood.is_held_back()
        may_read.set()
        assert number_of(await first) == 0
        assert [number_of(reply) async for reply in replies] == list(range(1, 64))


@pytest.mark.usefixtures("lane")
async def test_a_caller_that_does_not_read_holds_the_service_back() -> None:
    flood = Flood()
    async with (
        serving(FakePeer(aggregate=lambda _: flood.parts())) as (_, endpoint),
        client() as caller,
        aclosing(caller.aggregate_part(endpoint, parts(1))) as replies,
    ):
        assert number_of(await anext(replies)) == 0
        assert await flood.is_held_back()
        assert [number_of(reply) async for reply in replies] == list(range(1, 64))
