"""Runs the tests of `on_a_device`."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("on_a_device.py")


@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_in_a_process_of_its_own(which: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", which, str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
