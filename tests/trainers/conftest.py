"""The tests of averaging.integrations with the real libraries, which `make test-integrations` runs."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.training import Run

# Nothing is looked for outside this machine, and nobody is told of these tests.
os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


@pytest.fixture
def run() -> Iterator[Run]:
    """A run with peers that no trainer trains."""
    run = Run()
    yield run
    run.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are small, and peers train at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
