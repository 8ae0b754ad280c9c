"""The example of two sites with FSDP2, one of which loses a node and takes it back."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DEADLINE = 600.0
"""Seconds for a run, which takes about two and a half minutes on two idle cores."""


@pytest.mark.long
@pytest.mark.timeout(DEADLINE + 30)
def test_two_sites_learn_together_and_one_loses_a_node_and_takes_it_back(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.sites", "--steps=500", f"--directory={tmp_path / 'sites'}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "BROKEN" not in ended.stdout
    assert "node 2 of site 1 is killed without warning" in ended.stdout
    assert "both sites hold the same model: all 2 peers hold the same weights" in ended.stdout
    assert re.search(r"accuracy 9\d\.\d%, alone [45]\d\.\d%", ended.stdout)
    assert (tmp_path / "sites" / "sites.png").read_bytes().startswith(b"\x89PNG")
