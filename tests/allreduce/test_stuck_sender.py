"""Senders that are stuck or lost delay the round only briefly; a suspended reducer drops no sender."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
import torch

from averaging.allreduce import RoundResult
from averaging.allreduce.partition import partition, shares
from averaging.protocol.group import Member, Mode
from averaging.protocol.messages import AveragingData, CompressionType, MessageCode
from averaging.tensors.compression import encode
from averaging.testing import virtual_time
from tests.support.rounds import STALL_TIMEOUT, OneRound, Simulation
from tests.support.swarm import Swarm

NODES = ["peer:1", "peer:2"]
STUCK = "client::1"


def test_a_sender_that_takes_no_replies_is_dropped() -> None:
    members = [*map(Member, NODES), Member(STUCK, mode=Mode.CLIENT)]
    simulation = Simulation(1, members, [(2000,)])
    parts = dict(zip(simulation.group.endpoints, partition(simulation.schema, shares(members)), strict=True))

    async def messages(reducer: str) -> AsyncGenerator[AveragingData, None]:
        (tensor,) = simulation.before[STUCK]
        for part in parts[reducer]:
            wire = encode(tensor[part.slices[0].start : part.slices[0].stop], CompressionType.NONE)
            yield AveragingData(MessageCode.PART_FOR_AVERAGING, simulation.group.group_id, STUCK, wire)

    async def takes_one_reply(reducer: str) -> None:
        replies = simulation.transports[STUCK].aggregate_part(reducer, messages(reducer))
        await anext(replies)
        await asyncio.Event().wait()

    async def main() -> list[RoundResult]:
        for name in NODES:
            await simulation.transports[name].serve(OneRound(simulation.rounds[name], simulation.schema), None)
        stuck = [asyncio.create_task(takes_one_reply(name)) for name in NODES]
        began = asyncio.get_running_loop().time()
        results = await asyncio.gather(*(simulation.one(name) for name in NODES))
        assert asyncio.get_running_loop().time() < began + 4 * STALL_TIMEOUT
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        return results

    for result in virtual_time.run(main()):
        (dropped,) = result.dropped
        assert dropped.endpoint == STUCK
        assert "took no reply" in dropped.reason
        assert result.kept_local == 0
        assert sum(part.numel for part, _ in result.parts) == 2000


@pytest.mark.parametrize("suspended", [0.0, 60.0])
def test_a_reducer_that_was_suspended_still_waits_for_the_first_message(suspended: float) -> None:
    swarm = Swarm(1)

    async def main() -> list[MessageCode]:
        async def messages() -> AsyncGenerator[AveragingData, None]:
            await asyncio.sleep(0.5)
            virtual_time.stand_still(suspended)
            await asyncio.sleep(0.05)
            yield AveragingData(MessageCode.PART_FOR_AVERAGING, bytes(20), "peer:2")

        async with swarm.peer("peer:1", [torch.ones(3)], stall_timeout=1.0) as peer:
            return [reply.code async for reply in peer._entered.service.aggregate_part(messages())]

    assert swarm.simulate(main()) == [MessageCode.BAD_GROUP_ID]


def test_a_sender_that_opens_a_stream_and_sends_nothing_is_not_waited_for_longer() -> None:
    swarm = Swarm(1)

    async def main() -> float:
        async def messages() -> AsyncGenerator[AveragingData, None]:
            await asyncio.Event().wait()
            yield AveragingData()

        async with swarm.peer("peer:1", [torch.ones(3)], stall_timeout=1.0) as peer:
            began = asyncio.get_running_loop().time()
            async with aclosing(peer._entered.service.aggregate_part(messages())) as replies:
                assert (await anext(replies)).code is MessageCode.CANCELLED
            return asyncio.get_running_loop().time() - began

    assert swarm.simulate(main()) == pytest.approx(2.0, abs=0.4)


@pytest.mark.parametrize("seconds_to_close", [0.0, 0.1])
@pytest.mark.parametrize("steps", range(0, 60, 2))
def test_a_lost_call_is_noticed_at_once(steps: int, seconds_to_close: float) -> None:
    """`steps`: iterations of the event loop before the server's task is cancelled, as gRPC does it."""
    simulation = Simulation(1, [Member(NODES[0]), Member(STUCK, mode=Mode.CLIENT)], [(100,)], part_size_bytes=64)
    round_ = simulation.rounds[NODES[0]]
    (tensor,) = simulation.before[STUCK]

    async def messages() -> AsyncGenerator[AveragingData, None]:
        try:
            for start in range(0, 100, 16):
                wire = encode(tensor[start : start + 16], CompressionType.NONE)
                yield AveragingData(MessageCode.PART_FOR_AVERAGING, simulation.group.group_id, STUCK, wire)
                await asyncio.sleep(0)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(seconds_to_close)

    async def serve() -> None:
        incoming = messages()
        async for _ in round_.aggregate_part(await anext(incoming), incoming):
            await asyncio.sleep(0)

    async def main() -> tuple[RoundResult, float]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        running = asyncio.create_task(simulation.one(NODES[0]))
        call = asyncio.create_task(serve())
        for _ in range(steps):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.sleep(0)
        call.cancel()  # gRPC may cancel more than once
        result = await running
        await asyncio.gather(call, return_exceptions=True)
        return result, loop.time() - started

    result, seconds = virtual_time.run(main())
    assert sum(part.numel for part, _ in result.parts) == 100
    if "sent nothing" in (result.dropped[0].reason if result.dropped else ""):
        assert steps < 5, "the call had been opened"
    else:
        assert seconds < STALL_TIMEOUT
