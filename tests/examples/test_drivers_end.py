"""Nothing is left of what an example has started, whatever signal ends the example itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import DEADLINE

ROOT = Path(__file__).parents[2]
NAME = "TEST_DRIVER"

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: -signal.SIGHUP, signal.SIGKILL: -signal.SIGKILL}


class Driver:
    """A driver, whose processes have its name in their environment."""

    def __init__(self, *arguments: str, background: bool = False) -> None:
        self._name = uuid.uuid4().hex
        command = [sys.executable, *arguments]
        if background:  # as a shell script starts `command &`
            command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ | {NAME: self._name},
        )

    def read_until(self, text: str) -> str:
        assert self.process.stdout is not None
        printed = ""
        for line in self.process.stdout:
            printed += line
            if text in line:
                return printed
        raise AssertionError(f"ended without {text!r}: {printed}")

    def others(self) -> list[psutil.Process]:
        """All processes that it has started and that still run, also those that others of them have started."""
        running = psutil.process_iter(["environ"])
        named = [one for one in running if (one.info["environ"] or {}).get(NAME) == self._name]
        return [one for one in named if one.pid != self.process.pid]

    def end(self) -> None:
        self.process.kill()
        for one in self.others():
            one.kill()
        self.process.communicate()


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    running: list[Driver] = []
    yield running
    for driver in running:
        driver.end()


SYNTHETIC = """
import subprocess, sys, time
from examples.children import ending_children

GRANDCHILD = "import sys, time; print('runs', flush=True); time.sleep(1000)"
CHILD = f'''
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {GRANDCHILD!r}], start_new_session=True)
if sys.argv[1] == "stays":
    time.sleep(1000)
'''

@ending_children()
def main():
    for what in ("stays", "leaves an orphan"):
        child = subprocess.Popen([sys.executable, "-c", CHILD, what], start_new_session=True)
    child.wait()
    try:
        print("started", flush=True)
        if sys.argv[1] == "fails":
            raise ValueError("fails")
        if sys.argv[1] == "waits":
            time.sleep(1000)
    except KeyboardInterrupt:
        sys.exit(130)

main()
"""


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("number", SIGNALS)
def test_children_and_orphans_of_children_end_with_the_driver(
    number: signal.Signals, background: bool, drivers: list[Driver]
) -> None:
    driver = Driver("-c", SYNTHETIC, "waits", background=background)
    drivers.append(driver)
    driver.read_until("started")
    others = driver.others()
    assert len(others) >= 3
    if background and number == signal.SIGINT:
        number = signal.SIGTERM  # it ignores the other
    driver.process.send_signal(number)
    assert driver.process.wait(DEADLINE) == CODES[number]
    _, left = psutil.wait_procs(others, timeout=DEADLINE)
    assert left == []
    assert driver.others() == []


@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("fails", 1)])
def test_nothing_is_left_when_the_driver_has_ended_by_itself(how: str, code: int, drivers: list[Driver]) -> None:
    driver = Driver("-c", SYNTHETIC, how)
    drivers.append(driver)
    assert driver.process.wait(DEADLINE) == code
    assert driver.others() == []


EXAMPLES = {
    "demo": (["examples.demo", "--quick", "--output={}"], "has found"),
    "digits": (["examples.digits", "--peers=2", "--steps=1000000"], "Global step"),
    "explorers": (["examples.explorers", "--steps=100000", "--plot={}/plot.png"], "explorers follow"),
    "posttrain": (["examples.posttrain", "--quick", "--directory={}/story"], "sites start"),
    "sites": (["examples.sites", "--directory={}/sites"], "site 1: 4 processes"),
}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("example", EXAMPLES)
def test_nothing_is_left_of_an_example(
    example: str, number: signal.Signals, drivers: list[Driver], tmp_path: Path
) -> None:
    arguments, text = EXAMPLES[example]
    driver = Driver("-m", *(one.format(tmp_path) for one in arguments))
    drivers.append(driver)
    driver.read_until(text)
    others = driver.others()
    assert len(others) >= 3  # two peers and the guard
    driver.process.send_signal(number)
    printed, _ = driver.process.communicate(timeout=120)
    assert driver.process.returncode == CODES[number], printed
    assert "Traceback" not in printed
    _, left = psutil.wait_procs(others, timeout=DEADLINE)
    assert left == []
    assert driver.others() == []
