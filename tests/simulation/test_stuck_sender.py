"""A sender that takes no replies holds the round up for a moment only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from averaging.allreduce import RoundResult
from averaging.allreduce.partition import partition, shares
from averaging.compression import encode
from averaging.group import Member, Mode
from averaging.messages import AveragingData, CompressionType, MessageCode
from averaging.transport import virtual_time
from tests.simulation.rounds import PART_TIMEOUT, ROUND_SECONDS, OneRound, Simulation

NODES = ["peer:1", "peer:2"]
STUCK = "client::1"


def test_a_sender_that_takes_no_replies_is_given_up() -> None:
    members = [*map(Member, NODES), Member(STUCK, mode=Mode.CLIENT)]
    simulation = Simulation(1, members, [(2000,)])
    parts = dict(zip(simulation.group.endpoints, partition(simulation.schema, shares(members)), strict=True))

    async def messages(reducer: str) -> AsyncGenerator[AveragingData, None]:
        (tensor,) = simulation.before[STUCK]
        for part in parts[reducer]:
            wire = encode(tensor[part.start : part.stop], CompressionType.NONE)
            yield AveragingData(MessageCode.PART_FOR_AVERAGING, simulation.group.group_id, STUCK, wire)

    async def takes_one_reply(reducer: str) -> None:
        replies = simulation.transports[STUCK].aggregate_part(reducer, messages(reducer))
        await anext(replies)
        await asyncio.Event().wait()

    async def main() -> list[RoundResult]:
        for name in NODES:
            await simulation.transports[name].serve(OneRound(simulation.rounds[name]), None)
        stuck = [asyncio.create_task(takes_one_reply(name)) for name in NODES]
        deadline = asyncio.get_running_loop().time() + ROUND_SECONDS
        results = await asyncio.gather(*(simulation.rounds[name].run(deadline) for name in NODES))
        assert asyncio.get_running_loop().time() < deadline - ROUND_SECONDS + 4 * PART_TIMEOUT
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
