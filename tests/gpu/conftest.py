"""Everything with tensors on a GPU, which `make test-gpu` runs."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_arithmetic() -> Iterator[None]:
    """Float32 products are computed in float32."""
    torch.set_float32_matmul_precision("highest")
    yield
    torch.cuda.synchronize()
