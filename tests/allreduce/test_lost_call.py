"""A sender's call may be lost at any point; the round notices at once, not after a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from averaging.allreduce import RoundResult
from averaging.protocol.group import Member, Mode
from averaging.protocol.messages import AveragingData, CompressionType, MessageCode
from averaging.tensors.compression import encode
from averaging.testing import virtual_time
from tests.support.rounds import STALL_TIMEOUT, Simulation

NODE, SENDER = "peer:1", "client::1"


@pytest.mark.parametrize("seconds_to_close", [0.0, 0.1])
@pytest.mark.parametrize("steps", range(0, 60, 2))
def test_a_lost_call_is_noticed_at_once(steps: int, seconds_to_close: float) -> None:
    """`steps`: iterations of the event loop before the server's task is cancelled, as gRPC does it."""
    simulation = Simulation(1, [Member(NODE), Member(SENDER, mode=Mode.CLIENT)], [(100,)], part_size_bytes=64)
    round_ = simulation.rounds[NODE]
    (tensor,) = simulation.before[SENDER]

    async def messages() -> AsyncGenerator[AveragingData, None]:
        try:
            for start in range(0, 100, 16):
                wire = encode(tensor[start : start + 16], CompressionType.NONE)
                yield AveragingData(MessageCode.PART_FOR_AVERAGING, simulation.group.group_id, SENDER, wire)
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
        running = asyncio.create_task(simulation.one(NODE))
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
