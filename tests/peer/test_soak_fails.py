"""The soak fails if a peer holds a wrong value: with real processes, for some seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.long
def test_a_peer_with_a_wrong_value_is_found() -> None:
    command = [sys.executable, "-m", "tests.soak", "--minutes", "1", "--peers", "2", "--spoil"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "holds a wrong value" in ended.stderr
