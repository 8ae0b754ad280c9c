"""Another peer opens streams in the name of a member, in a run without proof of the sender."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch

from averaging.protocol.messages import AveragingData, CompressionType, MessageCode
from averaging.tensors.compression import encode
from averaging.testing import virtual_time
from tests.support.rounds import STALL_TIMEOUT, Simulation, assert_close, nodes

VICTIM = "peer:2"

Attack: TypeAlias = "Callable[[bytes], AveragingData]"


def part(values: list[float]) -> Attack:
    def made(group_id: bytes) -> AveragingData:
        wire = encode(torch.tensor(values), CompressionType.NONE)
        return AveragingData(MessageCode.PART_FOR_AVERAGING, group_id, VICTIM, wire)

    return made


ATTACKS: dict[str, Attack] = {
    "it leaves": lambda group_id: AveragingData(MessageCode.CANCELLED, group_id, VICTIM),
    "it fails": lambda group_id: AveragingData(MessageCode.INTERNAL_ERROR, group_id, VICTIM),
    "no part": lambda group_id: AveragingData(MessageCode.PART_FOR_AVERAGING, group_id, VICTIM),
    "another shape": part([1.0, 2.0]),
    "NaN": part([float("nan")] * 16),
    "another code": lambda group_id: AveragingData(MessageCode.BEGIN_ALLREDUCE, group_id, VICTIM),
    "another group": lambda group_id: AveragingData(
        MessageCode.CANCELLED, group_id, VICTIM, metadata=b"\x81\xa5group\xc4\x04else"
    ),
}


@pytest.mark.parametrize("preparing", [0.0, STALL_TIMEOUT / 2], ids=["its own is open", "it still prepares"])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_such_streams_do_not_drop_the_member(attack: Attack, preparing: float) -> None:
    simulation = Simulation(1, nodes(4), [(400,)], latency=(0.02, 0.03))
    if preparing:
        simulation.preparing[VICTIM] = partial(asyncio.sleep, preparing)

    async def intrude(tasks: dict[str, asyncio.Task[Any]]) -> None:
        stranger = simulation.network.transport("stranger:1")
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in tasks.values())

        async def only() -> AsyncGenerator[AveragingData, None]:
            yield attack(simulation.group.group_id)

        for member in simulation.group.endpoints:
            async with aclosing(stranger.aggregate_part(member, only())) as replies:
                answers = [reply.code async for reply in replies]
            assert set(answers) <= {MessageCode.PROTOCOL_VIOLATION}

    virtual_time.run(simulation.run(intrude))
    for name, result in simulation.results.items():
        assert result.dropped == ()
        assert result.proven_drops == ()
        assert_close(simulation.tensors[name], simulation.mean(), 1e-5)
