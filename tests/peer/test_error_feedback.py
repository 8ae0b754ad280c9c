"""Error feedback: all that was sent plus the residual equals all inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from averaging.allreduce import Part
from averaging.peer.topics import ErrorFeedback
from averaging.protocol.messages import COMPRESSIONS, CompressionType
from averaging.tensors.compression import decode, encode
from averaging.tensors.schema import describe

LOSSY = sorted({*COMPRESSIONS.values()} - {CompressionType.NONE})


@given(
    code=st.sampled_from(LOSSY),
    seed=st.integers(0, 10_000),
    rounds=st.lists(st.sampled_from(["encoded", "own", "lost"]), min_size=1, max_size=6),
)
def test_the_sum_of_what_was_sent_plus_the_residual_is_the_sum_of_the_inputs(
    code: CompressionType, seed: int, rounds: list[str]
) -> None:
    """Over rounds in which a part is reduced elsewhere, here, or by a member that dies."""
    generator = torch.Generator().manual_seed(seed)
    feedback = ErrorFeedback(describe(["w"], [torch.empty(40)], compression=code, part_size_bytes=1024))
    put_in, sent = torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)
    for end in rounds:
        middle = int(torch.randint(1, 39, (), generator=generator))
        tensor = torch.randn(40, generator=generator)
        inputs = feedback.inputs([tensor])
        first, second = Part.of(0, 0, middle), Part.of(0, middle, 40)
        encoded = [first] + ([second] if end == "encoded" else [])
        plain = [second] if end == "own" else []
        feedback.sent(inputs, encoded, plain)
        for part in encoded:
            values = decode(encode(inputs[0][part.slices[0].start : part.slices[0].stop], code))
            sent[part.slices[0].start : part.slices[0].stop] += values
        for part in plain:
            sent[part.slices[0].start : part.slices[0].stop] += inputs[0][part.slices[0].start : part.slices[0].stop]
        for part in [*encoded, *plain]:
            put_in[part.slices[0].start : part.slices[0].stop] += tensor[part.slices[0].start : part.slices[0].stop]
    torch.testing.assert_close(sent + feedback.residuals[0], put_in, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("code", LOSSY)
def test_a_constant_input_arrives_in_the_mean(code: CompressionType) -> None:
    """Without feedback the same error would be made again and again."""
    tensor = torch.linspace(-1, 1, 50) ** 3
    feedback = ErrorFeedback(describe(["w"], [tensor], compression=code, part_size_bytes=1024))
    part = Part.of(0, 0, 50)
    total = torch.zeros(50)
    for _ in range(50):
        inputs = feedback.inputs([tensor])
        total += decode(encode(inputs[0], code))
        feedback.sent(inputs, [part], [])
    once = (decode(encode(tensor, code)) - tensor).abs().max().item()
    assert (total / 50 - tensor).abs().max().item() <= max(once / 5, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("code", LOSSY)
def test_residuals_are_not_lost_where_they_are_added_to_half_precision(
    code: CompressionType, dtype: torch.dtype
) -> None:
    """A residual may be smaller than a rounding error of its tensor; that rounding is fed back, too."""
    generator = torch.Generator().manual_seed(0)
    feedback = ErrorFeedback(describe(["w"], [torch.empty(300, dtype=dtype)], compression=code, part_size_bytes=4096))
    put_in, sent = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for round_ in range(100):
        tensor = torch.randn(300, generator=generator).to(dtype)
        inputs = feedback.inputs([tensor])
        assert inputs[0].dtype is dtype
        first, second = Part.of(0, 0, 200), Part.of(0, 200, 300)
        feedback.sent(inputs, [first, second], []) if round_ % 3 else feedback.sent(inputs, [first], [second])
        sent[:200] += decode(encode(inputs[0][:200], code))
        sent[200:] += decode(encode(inputs[0][200:], code)) if round_ % 3 else inputs[0][200:]
        put_in += tensor
    torch.testing.assert_close(sent + feedback.residuals[0], put_in, rtol=0, atol=1e-4)


def test_the_residuals_are_on_the_cpu_whatever_device_torch_uses_by_default() -> None:
    schema = describe(["w"], [torch.empty(4)], part_size_bytes=1024)
    with torch.device("meta"):
        feedback = ErrorFeedback(schema)
    assert feedback.inputs([torch.ones(4)])[0].tolist() == [1.0] * 4
