"""Sites of several ranks: they equal peers of one process, and all their ranks go the same way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.integration.sites import Site, alike, single_processes

STEPS = 20
"""Ten rounds of two steps each."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def two_sites(stack: ExitStack, ranks: int, **options: Any) -> list[dict[str, Any]]:
    """What all ranks of two sites tell at the end of the training."""
    first = Site(stack, ranks, number=0, seed=0, **options)
    second = Site(stack, ranks, number=1, seed=1, join=[first.endpoint], **options)
    told = first.expect("done") + second.expect("done")
    assert first.end() == second.end() == [0] * ranks
    return told


def check_equals_single_processes(stack: ExitStack, strategy: str, inside: str, ranks: int, steps: int = STEPS) -> None:
    told = two_sites(stack, ranks, strategy=strategy, inside=inside, steps=steps)
    expected = single_processes(strategy, steps, ranks)
    for one in told:
        for ours, theirs in zip(one["weights"], expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-6, atol=1e-12)
    for site in (told[:ranks], told[ranks:]):
        alike(site, "rounds", "status", "text")
    assert all(one["alike"] for one in told)
    assert all(text.startswith("averaged") for one in told for text in one["rounds"])
    assert len(told[0]["rounds"]) >= (10 if steps == STEPS else 2)


@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
def test_two_sites_equal_two_processes_after_a_few_steps(stack: ExitStack, inside: str) -> None:
    check_equals_single_processes(stack, "diloco", inside, ranks=2, steps=6)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["diloco", "local", "gradients", "streaming", "clipped", "statistics"])
@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
def test_two_sites_equal_two_processes(stack: ExitStack, strategy: str, inside: str) -> None:
    check_equals_single_processes(stack, strategy, inside, ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["diloco", "gradients"])
def test_replicas_of_shards_equal_two_processes(stack: ExitStack, strategy: str) -> None:
    """HSDP: two replicas of two shards in each site."""
    check_equals_single_processes(stack, strategy, "hsdp", ranks=4)
