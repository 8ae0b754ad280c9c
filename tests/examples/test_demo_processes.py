"""The demo from end to end, with a tiny model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]

DEADLINE = 480.0
"""Seconds for a quick run, which takes about 35 on two idle cores; tests run on slow and shared machines."""

OUTPUT = "TEST_DEMO_OUTPUT"


class Demo:
    """A running demo. Its output's folder, in their environment, tells its processes from those of any other demo."""

    def __init__(self, seed: int, output: Path) -> None:
        self.output = str(output)
        arguments = ["--quick", f"--seed={seed}", f"--output={output}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "examples.demo", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {OUTPUT: self.output},
        )
        self.limit = threading.Timer(DEADLINE, self.process.kill)
        self.limit.start()

    def read_until(self, text: str) -> str:
        """What it prints up to a line with `text`, or to its end."""
        assert self.process.stdout is not None
        printed = ""
        for line in self.process.stdout:
            printed += line
            if text and text in line:
                break
        return printed

    def trainers(self) -> list[psutil.Process]:
        """Its training processes that still run."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            cmdline, environ = process.info["cmdline"] or [], process.info["environ"] or {}
            if "examples.train" in cmdline and environ.get(OUTPUT) == self.output:
                found.append(process)
        return found

    def end(self) -> None:
        self.limit.cancel()
        self.process.kill()
        for trainer in self.trainers():
            trainer.kill()
        self.process.communicate()


@pytest.fixture
def demo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Demo]:
    """A quick demo with the seed that the test asks for."""
    running = Demo(request.param, tmp_path)
    yield running
    running.end()


@pytest.mark.long
@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize("demo", [46021], indirect=True)
def test_the_demo_keeps_its_promises(demo: Demo, tmp_path: Path) -> None:
    printed = demo.read_until("")
    assert demo.process.wait() == 0, printed
    assert "Traceback" not in printed
    for number in range(1, 5):
        assert f"peer {number}: has found 3 other peers" in printed
    assert re.search(r"peer 1: killed without warning \(SIGKILL\) at step \d+", printed)
    newcomer = re.search(
        r"peer 5: listens on \S+; took over the state of peer [234] \(\S+\), version (\d+); begins at step (\d+)",
        printed,
    )
    assert newcomer is not None, printed
    version, step = int(newcomer[1]), int(newcomer[2])
    assert version > 1
    assert step > 0
    rows = re.findall(r"peer (\d) +│ +(\d+) │ +(killed|[\d.]+) │ +([\d.]*) │ +([-+\d.]*) │ (\w*)", printed)
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[0][2] == "killed"
    assert len({row[5] for row in rows[1:]}) == 1
    assert all(float(row[2]) < float(row[3]) for row in rows[1:])
    assert "All 4 peers hold the same bytes after the last average." in printed
    assert "The averaged model is better than the one trained alone" in printed
    picture = (tmp_path / "losses.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    assert demo.trainers() == []


@pytest.mark.long
@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize("demo", [46022], indirect=True)
def test_ctrl_c_ends_all_processes_in_order(demo: Demo) -> None:
    printed = demo.read_until("has found")
    assert len(demo.trainers()) >= 4
    demo.process.send_signal(signal.SIGINT)
    printed += demo.read_until("")
    assert demo.process.wait() == 130, printed
    assert "Stopped; all processes have ended." in printed
    assert "Traceback" not in printed
    assert demo.trainers() == []


@pytest.mark.long
@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize("demo", [46023], indirect=True)
def test_a_killed_demo_leaves_no_process_behind(demo: Demo) -> None:
    demo.read_until("peer 1: listens on")
    trainers = demo.trainers()
    demo.process.kill()
    _, alive = psutil.wait_procs(trainers, timeout=60)
    assert alive == []


@pytest.mark.long
@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize("demo", [46024], indirect=True)
def test_a_process_that_dies_ends_the_demo_with_its_log(demo: Demo) -> None:
    printed = demo.read_until("has found")
    by_part = {process.cmdline()[3]: process for process in demo.trainers() if "--alone" not in process.cmdline()}
    by_part["--part=3"].kill()
    printed += demo.read_until("")
    assert demo.process.wait() == 1, printed
    assert "peer 3 ended with exit code -9; the end of" in printed
    assert "Traceback" not in printed
    assert demo.trainers() == []
