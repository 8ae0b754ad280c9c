"""Values that overflow the dtype of the tensor: no member adopts them from a hostile sender or reducer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

import pytest
import torch

from averaging.protocol.group import ReplyForm
from averaging.protocol.messages import COMPRESSIONS, AveragingData, CompressionType, WireTensor
from averaging.receipts import DropCode
from averaging.tensors.compression import encode
from averaging.testing import virtual_time
from tests.support.rounds import Simulation, nodes

HOSTILE = "peer:1"

Forge = Callable[[int], WireTensor]
"""Makes a tensor of a given number of elements."""


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
    async def forged(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        async for message in messages:
            if message.tensor_part is not None:
                message = replace(message, tensor_part=forge(message.tensor_part.size[0]), encoded=[])
            yield message

    simulation = Simulation(1, nodes(3), dtype=dtype, reply=reply)
    (simulation.change_sent if where == "parts" else simulation.change_replies)(HOSTILE, forged)
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
