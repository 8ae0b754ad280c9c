"""Everything with tensors on a GPU, which `make test-gpu` runs."""

from collections.abc import Iterator

import pytest
import torch


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Looks at these files only with `-m gpu`: other machines have no GPU."""
    return None if config.option.markexpr == "gpu" else True


@pytest.fixture(autouse=True)
def exact_arithmetic() -> Iterator[None]:
    """Float32 products are computed in float32."""
    torch.set_float32_matmul_precision("highest")
    yield
    torch.cuda.synchronize()
