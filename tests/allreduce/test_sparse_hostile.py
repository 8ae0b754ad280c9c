"""Members that send invalid parts or replies in TOP_K: they are dropped with a reason, and the others agree."""

from __future__ import annotations

import logging
import random
import re
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from averaging.protocol import AveragingData, CompressionType, MeanOver, TopK, WireTensor
from averaging.receipts import DropCode
from averaging.testing import virtual_time
from tests.allreduce.sparse_rounds import SparseSimulation
from tests.support.rounds import nodes

HOSTILE = "peer:1"

Forge = Callable[[WireTensor], WireTensor]


def not_finite(place: int) -> Forge:
    """Overwrites a number in the table."""

    def forge(wire: WireTensor) -> WireTensor:
        changed = bytearray(wire.buffer)
        changed[place : place + 4] = struct.pack("<f", float("nan"))
        return wire.with_buffer(bytes(changed))

    return forge


def as_the_other(wire: WireTensor) -> WireTensor:
    """A part as a reply, and the other way round."""
    code = CompressionType.TOP_K if wire.compression == CompressionType.TOP_K_UNION else CompressionType.TOP_K_UNION
    return replace(wire, compression=code)


PARTS = [(as_the_other, "compression 19"), (not_finite(0), "NaN or infinity")]
REPLIES = [(as_the_other, "compression 18"), (not_finite(3 + 3 * 8), "NaN or infinity")]


def forged(message: AveragingData, forge: Forge) -> AveragingData:
    if message.tensor_part is None:
        return message
    return replace(message, tensor_part=forge(message.tensor_part), encoded=[])


async def changed(
    messages: AsyncIterator[AveragingData], change: Callable[[AveragingData], AveragingData]
) -> AsyncGenerator[AveragingData, None]:
    async for message in messages:
        yield change(message)


def simulation() -> SparseSimulation:
    return SparseSimulation(1, nodes(3), [(64, 192)], top_k=TopK(1 / 64, 2))


def check_survivors(simulated: SparseSimulation) -> list[str]:
    """The others go on, and hold the same."""
    others = [name for name in simulated.tensors if name != HOSTILE]
    first, second = (simulated.averages[name] for name in others)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))
    for name in others:
        assert [lost.endpoint for lost in simulated.results[name].dropped] == [HOSTILE]
    return others


@pytest.mark.parametrize(("forge", "reason"), PARTS)
def test_invalid_parts_are_not_averaged(forge: Forge, reason: str) -> None:
    simulated = simulation()
    simulated.change_sent(HOSTILE, lambda messages: changed(messages, lambda message: forged(message, forge)))
    virtual_time.run(simulated.run())
    others = check_survivors(simulated)
    for other in others:
        (lost,) = simulated.results[other].dropped
        assert lost.code is DropCode.PROTOCOL_VIOLATION
    pattern = "|".join(lost.reason for other in others for lost in simulated.results[other].dropped)
    assert re.search(reason, pattern), pattern
    for part, reducer in simulated.parts.items():
        if reducer != HOSTILE:
            found = simulated.averages[others[0]][part.tensor][part.slices[0].start : part.slices[0].stop]
            expected = np.nan_to_num(simulated.expected(part, others))
            np.testing.assert_allclose(found.double() + simulated.residual(part), expected, atol=1e-5)


@pytest.mark.parametrize(("forge", "reason"), REPLIES)
def test_invalid_replies_are_not_adopted(forge: Forge, reason: str) -> None:
    simulated = simulation()
    simulated.change_replies(HOSTILE, lambda replies: changed(replies, lambda message: forged(message, forge)))
    virtual_time.run(simulated.run())
    others = check_survivors(simulated)
    for other in others:
        result = simulated.results[other]
        (lost,) = result.dropped
        assert re.search(reason, lost.reason), lost.reason
        assert result.kept_local == sum(part.numel for part, who in simulated.parts.items() if who == HOSTILE) > 0


def spoilt(rng: random.Random, message: AveragingData) -> AveragingData:
    """The message with some random bytes, of another length, or of another code."""
    wire = message.tensor_part
    if wire is None or rng.random() < 0.5:
        return message
    held = bytearray(wire.buffer)
    match rng.randrange(4):
        case 0:
            held = held[: rng.randrange(len(held) + 1)]
        case 1:
            held[0] = rng.randrange(6)  # the form of a reply
        case 2:
            wire = replace(wire, compression=rng.choice([0, 17, 18, 19, 99]))
        case _:
            for _ in range(rng.choice([1, 3, 20])):
                held[rng.randrange(len(held))] = rng.randrange(256)
    return replace(message, tensor_part=wire.with_buffer(bytes(held)), encoded=[])


@pytest.mark.parametrize("seed", range(24))
def test_random_bytes_end_no_round_and_leave_no_infinity(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    top_k = TopK(rng.choice([1 / 64, 1 / 4]), rng.choice([2, 4, 8]), rng.choice(list(MeanOver)))
    simulated = SparseSimulation(seed, nodes(rng.choice([2, 3, 5])), [(64, 128), (30,)], top_k=top_k)
    change = simulated.change_sent if seed % 2 else simulated.change_replies
    change(HOSTILE, lambda messages: changed(messages, lambda message: spoilt(rng, message)))
    virtual_time.run(simulated.run())
    assert simulated.failures == {}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    for name, result in simulated.results.items():
        if name != HOSTILE:
            assert {lost.endpoint for lost in result.dropped} <= {HOSTILE}
            assert not any(bool(tensor.isinf().any()) for tensor in simulated.averages[name])
