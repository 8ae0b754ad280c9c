"""Clipping of gradients to a norm, against torch's own and against float64."""

import pytest
import torch
from hypothesis import given, strategies as st

from averaging.training.layout import clip

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
    max_norm=st.floats(0.01, 100.0),
)
def test_tensors_are_scaled_to_the_norm_in_their_own_precision(
    dtypes: list[torch.dtype], seed: int, max_norm: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(3, 5, generator=generator, dtype=torch.float64).to(dtype) for dtype in dtypes]
    before = [tensor.double().clone() for tensor in tensors]
    norm = torch.cat([tensor.flatten() for tensor in before]).norm().item()
    expected = min(1.0, max_norm / (norm + 1e-6))
    scale = clip(tensors, max_norm)
    rounding = 1e-12 if torch.float64 in dtypes else 1e-5
    assert scale.item() == pytest.approx(expected, rel=rounding)
    for tensor, was in zip(tensors, before, strict=True):
        step = torch.finfo(tensor.dtype).eps + rounding
        torch.testing.assert_close(tensor.double(), was * expected, rtol=2 * step, atol=1e-7)


def test_a_norm_beyond_float16_does_not_wipe_the_gradient_out() -> None:
    tensor = torch.full((10_000,), 1000.0, dtype=torch.float16)
    clip([tensor], 1.0)
    torch.testing.assert_close(tensor, torch.full_like(tensor, 0.01))
