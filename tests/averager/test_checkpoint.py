"""torch.distributed.checkpoint saves a site with FSDP2, and sites of any number of ranks go on as if never ended."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.averager.checkpoint_rank import BATCH, FURTHER, SAVED

ROOT = Path(__file__).parents[2]


def told(strategy: str, mesh: str, action: str, source: Path, target: Path) -> dict[str, Any]:
    """What rank 0 of a site tells."""
    ranks = math.prod(map(int, mesh.split("x")))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    worker = ["-m", "tests.averager.checkpoint_rank", strategy, mesh, action, str(source), str(target)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(
        [sys.executable, *launch, *worker], capture_output=True, text=True, timeout=240, check=False, cwd=ROOT, env=env
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found | {"errors": ended.stderr}


def check_went_on(again: dict[str, Any], first: dict[str, Any]) -> None:
    """Whether a site that has loaded the checkpoint ends like the one that has saved it."""
    assert again["begun"] == first["begun"]
    assert again["begun"][0] == SAVED
    assert again["local"] == first["local"] == SAVED + FURTHER
    assert again["global"] == first["global"]
    assert again["waiting"] == first["waiting"] == BATCH * SAVED
    assert again["unsent"].keys() == first["unsent"].keys()
    for name in again["unsent"]:
        torch.testing.assert_close(torch.tensor(again["unsent"][name]), torch.tensor(first["unsent"][name]))
    for ours, theirs in zip(again["values"], first["values"], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-6, atol=1e-6)
    trained = [index for step in [*first["samples"][:SAVED], *again["samples"]] for index in step]
    assert sorted(trained) == list(range(BATCH * (SAVED + FURTHER)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "counts"), [("top_k", ["1", "2", "8"]), ("diloco", ["1", "8"]), ("local", ["8"]), ("adam", ["1"])]
)
def test_any_number_of_ranks_goes_on_as_if_it_had_never_ended(tmp_path: Path, strategy: str, counts: list[str]) -> None:
    """Also one that was given 2 ranks and 4 again."""
    saved, copied = tmp_path / "of 4", tmp_path / "of 2"
    first = told(strategy, "4", "save", saved, saved)
    assert bool(first["unsent"]) is (strategy == "top_k")
    told(strategy, "2", "copy", saved, copied)
    check_went_on(told(strategy, "4", "load", copied, copied), first)
    for ranks in counts:
        check_went_on(told(strategy, ranks, "load", saved, saved), first)


@pytest.mark.long
def test_replicas_of_shards_go_on_as_one(tmp_path: Path) -> None:
    first = told("top_k", "2x2", "save", tmp_path, tmp_path)
    check_went_on(told("top_k", "1x2", "load", tmp_path, tmp_path), first)


@pytest.mark.long
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    told("diloco", "2", "save", tmp_path, tmp_path)
    for strategy, message in (("local", "Missing key.*averaging.LocalSGD"), ("adam", "Missing key.*outer0/0/exp_avg")):
        refused = told(strategy, "1", "load", tmp_path, tmp_path)
        assert refused["local"] == 0
        torch.manual_seed(1)
        untouched = torch.nn.Linear(4, 9).double().weight.flatten().tolist()
        assert refused["values"][0] == untouched
        assert re.search(message, refused["errors"]), refused["errors"]
