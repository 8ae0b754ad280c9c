"""A sender that takes no replies delays the round only briefly; a suspended reducer drops no sender."""

from __future__ import annotations

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
