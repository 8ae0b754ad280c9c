"""torch.distributed.checkpoint saves a site with FSDP2 and loads it in new processes, which go on as if never ended."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.averager.checkpoint_rank import FURTHER, SAVED

ROOT = Path(__file__).parents[2]


def told(directory: Path, action: str) -> dict[str, Any]:
    """What rank 0 of a site of two tells."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launch, "-m", "tests.averager.checkpoint_rank", str(directory), action]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=env)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_training_goes_on_as_if_it_had_never_ended(tmp_path: Path) -> None:
    first, again = (told(tmp_path / "checkpoint", action) for action in ("save", "load"))
    assert first["begun"] == again["begun"] == [SAVED, SAVED // 2]
    assert first["local"] == again["local"] == SAVED + FURTHER
    assert first["global"] == again["global"]
    assert first["values"] == again["values"]
    assert first["unsent"]
    assert first["unsent"] == again["unsent"]
