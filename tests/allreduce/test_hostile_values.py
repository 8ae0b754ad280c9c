"""Values that overflow or are no numbers, and bytes that are no tensor: no member adopts them from a hostile one."""

import re
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from averaging.protocol import AveragingData, CompressionType, TopK, WireTensor
from averaging.protocol.group import ReplyForm
from averaging.protocol.messages import COMPRESSIONS
from averaging.receipts import DropCode
from averaging.tensors.compression import encode
from averaging.testing import virtual_time
from tests.allreduce.sparse_rounds import SparseSimulation
from tests.support.rounds import Simulation, nodes

HOSTILE = "peer:1"

Forge = Callable[[int], WireTensor]
"""Makes a tensor of a given number of elements."""

Rewrite = Callable[[WireTensor], WireTensor]


def of_tensors(rewrite: Rewrite) -> Callable[[AveragingData], AveragingData]:
    """Rewrites the tensor of a message that has one."""

    def change(message: AveragingData) -> AveragingData:
        if message.tensor_part is None:
            return message
        return replace(message, tensor_part=rewrite(message.tensor_part), encoded=[])

    return change


async def changed(
    messages: AsyncIterator[AveragingData], change: Callable[[AveragingData], AveragingData]
) -> AsyncGenerator[AveragingData, None]:
    async for message in messages:
        yield change(message)


def uncompressed(value: float, dtype: torch.dtype) -> Forge:
    return lambda count: encode(torch.full((count,), value, dtype=dtype), CompressionType.NONE)


def packed(value: float, code: CompressionType) -> Forge:
    return lambda count: encode(torch.full((count,), value), code)


FORGED: list[tuple[torch.dtype, Forge]] = [
    (torch.float32, uncompressed(1e300, torch.float64)),
    (torch.float32, uncompressed(1.0, torch.float64)),  # valid values, but not the dtype of the schema
    (torch.float16, uncompressed(1e38, torch.float32)),
    (torch.float16, uncompressed(1e38, torch.bfloat16)),
    (torch.bfloat16, uncompressed(3.4e38, torch.float32)),
    (torch.float16, packed(1e38, CompressionType.BFLOAT16)),
    (torch.float16, packed(1e38, CompressionType.BLOCKWISE_INT8)),
    (torch.float16, packed(1e38, CompressionType.UNIFORM_8BIT)),
    (torch.float32, uncompressed(float("inf"), torch.float32)),
    (torch.float32, packed(float("nan"), CompressionType.FLOAT16)),
]


@pytest.mark.parametrize("where", ["parts", "replies"])
@pytest.mark.parametrize("reply", ReplyForm)
@pytest.mark.parametrize(("dtype", "forge"), FORGED)
def test_what_a_hostile_member_forges_is_neither_averaged_nor_adopted(
    dtype: torch.dtype, forge: Forge, reply: ReplyForm, where: str
) -> None:
    simulation = Simulation(1, nodes(3), dtype=dtype, reply=reply)
    (simulation.change_sent if where == "parts" else simulation.change_replies)(
        HOSTILE, lambda messages: changed(messages, of_tensors(lambda wire: forge(wire.size[0])))
    )
    virtual_time.run(simulation.run())
    for name, tensors in simulation.tensors.items():
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors), name
    others = [simulation.results[name] for name in simulation.tensors if name != HOSTILE]
    for result in others:
        (lost,) = result.dropped
        assert lost.endpoint == HOSTILE
        assert lost.code in (DropCode.NON_FINITE, DropCode.PROTOCOL_VIOLATION)
        assert where == "parts" or result.kept_local > 0
    assert where == "replies" or others[0].digest == others[1].digest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("code", sorted({*COMPRESSIONS.values()}))
@pytest.mark.parametrize("reply", ReplyForm)
def test_averages_that_overflow_the_dtype_are_not_adopted(
    dtype: torch.dtype, code: CompressionType, reply: ReplyForm
) -> None:
    """The largest values of a dtype, of both signs: decoding them, or their average, may give infinity."""
    largest = torch.finfo(dtype).max
    simulation = Simulation(2, nodes(3), dtype=dtype, compression=code, reply=reply)
    for number, tensors in enumerate(simulation.tensors.values()):
        for tensor in tensors:
            tensor.fill_(largest if number != 1 else -largest)
    virtual_time.run(simulation.run())
    for name, tensors in simulation.tensors.items():
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors), name
    for result in simulation.results.values():
        assert all(lost.code is not DropCode.PROTOCOL_VIOLATION for lost in result.dropped)


@pytest.mark.parametrize("reply", ReplyForm)
@pytest.mark.parametrize(("values", "counted"), [((1e5, 1e5, 1e5), [1, 1, 1]), ((9e4, 0.0, 0.0), [1, 0, 0])], ids=str)
def test_what_float16_clamps_is_counted(values: tuple[float, ...], counted: list[int], reply: ReplyForm) -> None:
    """Contributions beyond 65504 at those that send them, averages at all."""
    simulation = Simulation(1, nodes(3), [(90,)], compression=CompressionType.FLOAT16, reply=reply)
    for name, value in zip(simulation.tensors, values, strict=True):
        simulation.tensors[name][0].fill_(value)
    virtual_time.run(simulation.run())
    assert [min(1, result.clamped) for result in simulation.results.values()] == counted


# In TOP_K; tests/fuzz has all the other ways in which a part or a reply can be wrong.


def not_finite(place: int) -> Rewrite:
    """Overwrites a number in the table."""

    def rewrite(wire: WireTensor) -> WireTensor:
        changed = bytearray(wire.buffer)
        changed[place : place + 4] = struct.pack("<f", float("nan"))
        return wire.with_buffer(bytes(changed))

    return rewrite


def as_the_other(wire: WireTensor) -> WireTensor:
    """A part as a reply, and the other way round."""
    code = CompressionType.TOP_K if wire.compression == CompressionType.TOP_K_UNION else CompressionType.TOP_K_UNION
    return replace(wire, compression=code)


PARTS = [(as_the_other, "compression 19"), (not_finite(0), "NaN or infinity")]
REPLIES = [(as_the_other, "compression 18"), (not_finite(3 + 3 * 8), "NaN or infinity")]


def check_survivors(simulated: SparseSimulation) -> list[str]:
    """The others go on, and hold the same."""
    others = [name for name in simulated.tensors if name != HOSTILE]
    first, second = (simulated.averages[name] for name in others)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))
    for name in others:
        assert [lost.endpoint for lost in simulated.results[name].dropped] == [HOSTILE]
    return others


@pytest.mark.parametrize(("forge", "reason"), PARTS)
def test_invalid_parts_are_not_averaged(forge: Rewrite, reason: str) -> None:
    simulated = SparseSimulation(1, nodes(3), [(64, 192)], top_k=TopK(1 / 64, 2))
    simulated.change_sent(HOSTILE, lambda messages: changed(messages, of_tensors(forge)))
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
def test_invalid_replies_are_not_adopted(forge: Rewrite, reason: str) -> None:
    simulated = SparseSimulation(1, nodes(3), [(64, 192)], top_k=TopK(1 / 64, 2))
    simulated.change_replies(HOSTILE, lambda replies: changed(replies, of_tensors(forge)))
    virtual_time.run(simulated.run())
    others = check_survivors(simulated)
    for other in others:
        result = simulated.results[other]
        (lost,) = result.dropped
        assert re.search(reason, lost.reason), lost.reason
        assert result.kept_local == sum(part.numel for part, who in simulated.parts.items() if who == HOSTILE) > 0
