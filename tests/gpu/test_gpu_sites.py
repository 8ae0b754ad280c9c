"""Several ranks that are one peer, with their model on a GPU: FSDP2 and DDP over NCCL and gloo, and torchrun."""

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.support.sites import Site, alike, single_processes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

STEPS = 6


def two_sites(stack: ExitStack, ranks: int, strategy: str, **options: Any) -> list[list[float]]:
    """The weights of two sites at the end, which are those of two processes on the CPU up to rounding."""
    given: dict[str, Any] = {"strategy": strategy, "steps": STEPS, "device": "cuda", **options}
    first = Site(stack, ranks, number=0, **given)
    second = Site(stack, ranks, number=1, join=[first.endpoint], **given)
    assert second.endpoint
    told = [*first.expect("done"), *second.expect("done")]
    assert first.end() + second.end() == [0] * (2 * ranks)
    alike(told, "weights")
    weights: list[list[float]] = told[0]["weights"]
    return weights


def close(weights: list[list[float]], expected: list[list[float]]) -> bool:
    pairs = zip(weights, expected, strict=True)
    return all(torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-9, atol=1e-9) for a, b in pairs)


@pytest.mark.parametrize("strategy", ["diloco", "gradients", "overlap"])
def test_one_rank_over_nccl(stack: ExitStack, strategy: str) -> None:
    weights = two_sites(stack, 1, strategy, inside="fsdp", backend="nccl")
    if strategy != "overlap":
        assert close(weights, single_processes(strategy, STEPS, 1))


def apart(rank: int) -> dict[str, str]:
    """NCCL refuses two ranks on one GPU of one host, so each rank says that it is a host of its own."""
    return {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks_share_the_gpu(stack: ExitStack, inside: str, backend: str) -> None:
    weights = two_sites(stack, 2, "diloco", inside=inside, backend=backend, environment=apart)
    assert close(weights, single_processes("diloco", STEPS, 2))


def test_torchrun_starts_a_process_for_each_gpu() -> None:
    options = {"strategy": "diloco", "steps": 4, "device": "cuda", "inside": "fsdp", "backend": "nccl", "sites": 1}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=gpu", "-m", "tests.support.site_worker"]
    done = subprocess.run(
        [sys.executable, *command, json.dumps(options | {"number": 0, "finish": False})],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len([event for event in events if event["event"] == "done"]) == torch.cuda.device_count()
