"""Post-training from end to end, with all its kills."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.posttrain

ROOT = Path(__file__).parents[2]

DEADLINE = 900.0
"""Seconds for a quick run, which takes about three minutes on two idle cores."""


def start(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.posttrain", "--quick", f"--directory={directory}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def left_behind(directory: Path) -> list[psutil.Process]:
    """Processes of the story that still run."""
    processes = psutil.process_iter(["cmdline"])
    return [each for each in processes if any(str(directory) in word for word in each.info["cmdline"] or [])]


@pytest.mark.timeout(DEADLINE + 30)
def test_the_story_keeps_its_promises(tmp_path: Path) -> None:
    story = start(tmp_path / "story")
    printed, _ = story.communicate(timeout=DEADLINE)
    assert story.returncode == 0, printed
    assert "BROKEN" not in printed
    assert printed.count("killed without warning (SIGKILL)") == 3
    assert re.search(r"the reward rose from 0\.\d\d in the first steps to 0\.\d\d of 1", printed)
    assert left_behind(tmp_path) == []


@pytest.mark.timeout(300)
def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    story = start(tmp_path / "story")
    assert story.stdout is not None
    for line in story.stdout:
        if "rollouts start" in line:
            break
    assert left_behind(tmp_path)
    os.kill(story.pid, signal.SIGINT)
    printed, _ = story.communicate(timeout=120)
    assert story.returncode == 130
    assert "Stopped; all processes have ended." in printed
    assert left_behind(tmp_path) == []
