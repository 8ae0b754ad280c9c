"""Post-training on text from end to end, with a kill of the engine; and what its verdict finds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from examples.posttrain_text.verdict import Step, on_answers, on_reward, on_versions

pytestmark = pytest.mark.posttrain_text

ROOT = Path(__file__).parents[2]

DEADLINE = 900.0
"""Seconds for a quick run, which takes about three minutes on two idle cores."""


def start(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.posttrain_text", "--quick", f"--directory={directory}"]
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
    assert "killed without warning (SIGKILL)" in printed
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


def steps(rewards: Sequence[float], unversioned: int = 0, age: int = 1) -> list[Step]:
    return [Step(number, reward, [number], unversioned, [age]) for number, reward in enumerate(rewards, 1)]


def test_the_verdict_finds_what_is_broken() -> None:
    rising = [0.01 * number for number in range(60)]
    assert on_reward(steps(rising)).kept
    assert not on_reward(steps([0.3] * 60)).kept
    assert on_versions(steps(rising)).kept
    assert not on_versions(steps(rising, unversioned=1)).kept
    assert not on_versions(steps(rising, age=5)).kept
    assert not on_versions(steps(rising)[1:]).kept
    assert on_answers({str(digit): str((digit + 1) % 10) for digit in range(10)}).kept
    assert not on_answers({str(digit): "1" for digit in range(10)}).kept
