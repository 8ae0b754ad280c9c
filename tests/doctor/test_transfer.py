"""What a peer spends on measurements is bounded, and never takes from a round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from averaging.doctor import TransferService
from averaging.doctor import transfer as transfers
from averaging.doctor.transfer import (
    DOWNLOAD,
    MAX_ECHO_BYTES,
    MAX_TRANSFER_BYTES,
    PERIOD_SECONDS,
    TRANSFERS_PER_HOST,
    CallLimit,
    TransferProgress,
    download,
    echo,
    upload,
)
from averaging.errors import AveragingError, BusyError, CallRefusedError, ProtocolViolationError
from averaging.rpc import RpcChannel, RpcServer
from averaging.transport.grpc import Channels
from averaging.wire import probe_pb2

ALL = probe_pb2.DownloadRequest(bytes=1 << 62, seconds=1e9)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def chunks(*sizes: int) -> AsyncIterator[probe_pb2.Chunk]:
    for size in sizes:
        yield probe_pb2.Chunk(data=bytes(size))


def test_calls_are_limited_for_each_host_and_for_all() -> None:
    limit = CallLimit("transfers", 2, 3)
    for host in ("a", "a", "b"):
        limit.take(host, 0.0)
    with pytest.raises(BusyError, match="your host had 2 transfers within 10 minutes"):
        limit.take("a", 1.0)
    with pytest.raises(BusyError, match="all hosts together had 3 transfers"):
        limit.take("c", 1.0)
    limit.take("a", PERIOD_SECONDS)


def test_the_rate_is_that_of_the_second_half() -> None:
    slow_start = TransferProgress()
    for second in range(9):
        slow_start.add(10 if second < 4 else 100, float(second))
    assert slow_start.seconds() == 8
    assert slow_start.rate() == 100
    fast = TransferProgress()
    for tenth in range(6):
        fast.add(10, tenth / 10)
    assert fast.rate() == pytest.approx(100)
    at_once = TransferProgress()
    at_once.add(10, 1.0)
    assert (at_once.seconds(), at_once.rate()) == (0.0, 0.0)


def test_samples_are_few_although_a_caller_sends_single_bytes() -> None:
    progress = TransferProgress()
    for step in range(100_000):
        progress.add(1, step * 1e-6)
    assert progress.nbytes == 100_000
    assert len(progress._samples) <= 21


@pytest.mark.asyncio
async def test_a_download_ends_at_its_limit_and_when_its_time_is_over() -> None:
    clock = Clock()
    service = TransferService(lambda: False, clock)
    assert sum([len(chunk.data) async for chunk in service.download(ALL)]) == MAX_TRANSFER_BYTES
    count = 0
    async for _ in service.download(ALL):
        count += 1
        clock.now += 4.0
    assert count == 3


@pytest.mark.asyncio
async def test_one_transfer_at_a_time_but_a_caller_that_does_not_read_loses_its_place() -> None:
    clock = Clock()
    service = TransferService(lambda: False, clock)
    first = service.download(ALL)
    assert (await anext(first)).data
    with pytest.raises(BusyError, match="one at a time"):
        await anext(service.download(ALL))
    with pytest.raises(BusyError, match="one at a time"):
        await service.upload(chunks(1))
    clock.now = 16.0
    second = service.download(ALL)
    assert (await anext(second)).data
    with pytest.raises(StopAsyncIteration):
        await anext(first)
    with pytest.raises(BusyError, match="one at a time"):  # the end of the first has not freed the place of the second
        await service.upload(chunks(1))
    await second.aclose()
    assert (await service.upload(chunks(1, 2))).bytes == 3


@pytest.mark.asyncio
async def test_a_round_comes_first() -> None:
    in_round = False
    service = TransferService(lambda: in_round)
    under_way = service.download(ALL)
    assert (await anext(under_way)).data
    in_round = True
    assert [chunk async for chunk in under_way] == [probe_pb2.Chunk(interrupted=True)]
    for refused in (anext(service.download(ALL)), service.upload(chunks(1))):
        with pytest.raises(BusyError, match="between rounds"):
            await refused
    in_round = False

    async def then_a_round() -> AsyncIterator[probe_pb2.Chunk]:
        nonlocal in_round
        yield probe_pb2.Chunk(data=b"1")
        in_round = True
        yield probe_pb2.Chunk(data=b"2")
        raise AssertionError("it reads on")

    reply = await service.upload(then_a_round())
    assert (reply.bytes, reply.interrupted) == (2, True)


@pytest.mark.asyncio
async def test_an_upload_is_not_read_beyond_its_limit_nor_without_bytes() -> None:
    service = TransferService(lambda: False)
    endless = (probe_pb2.Chunk(data=bytes(1 << 20)) for _ in iter(int, 1))

    async def forever() -> AsyncIterator[probe_pb2.Chunk]:
        for chunk in endless:
            yield chunk

    assert (await service.upload(forever())).bytes == MAX_TRANSFER_BYTES
    with pytest.raises(ProtocolViolationError, match="without bytes"):
        await service.upload(chunks(0))


@pytest.mark.asyncio
async def test_a_host_measures_a_limited_number_of_times() -> None:
    service = TransferService(lambda: False)
    for _ in range(TRANSFERS_PER_HOST):
        await service.upload(chunks(1))
    with pytest.raises(BusyError, match="try again later"):
        await service.upload(chunks(1))


@pytest.mark.asyncio
async def test_both_sides_over_grpc() -> None:
    service = TransferService(lambda: False)
    async with RpcServer("127.0.0.1:0", [service]) as server, RpcChannel(server.endpoint) as channel:
        channels = Channels(4 << 20)
        assert await echo(channels, server.endpoint, out=100, back=200) > 0
        with pytest.raises(CallRefusedError, match="at most 65536"):
            await echo(channels, server.endpoint, back=MAX_ECHO_BYTES + 1)
        there, back = await upload(channels, server.endpoint), await download(channels, server.endpoint)
        assert there.nbytes == back.nbytes == MAX_TRANSFER_BYTES
        assert there.rate > 0
        assert back.rate > 0
        async for _ in channel.stream(DOWNLOAD, ALL):
            break  # the caller goes away: the place is free again
        assert (await download(channels, server.endpoint)).nbytes == MAX_TRANSFER_BYTES
        await channels.close()


@pytest.mark.asyncio
async def test_a_caller_is_patient_with_a_busy_peer_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "TRY_AGAIN_SECONDS", 0.01)
    in_round = True
    service = TransferService(lambda: in_round)
    async with RpcServer("127.0.0.1:0", [service]) as server:
        channels = Channels(4 << 20)
        waiting = asyncio.create_task(upload(channels, server.endpoint))
        await echo(channels, server.endpoint)
        assert not waiting.done()
        in_round = False
        assert (await waiting).nbytes == MAX_TRANSFER_BYTES
        in_round = True
        monkeypatch.setattr(transfers, "PATIENCE_SECONDS", 0.0)
        with pytest.raises(AveragingError, match="between rounds"):
            await download(channels, server.endpoint)
        await channels.close()
