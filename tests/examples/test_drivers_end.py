"""Nothing is left of what an example has started, whatever signal ends the example itself."""

import signal
from pathlib import Path

import psutil
import pytest

from tests.examples.running import DEADLINE, Example, example

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


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


@pytest.mark.parametrize("number", SIGNALS)
def test_children_and_orphans_of_children_end_with_the_driver(number: signal.Signals) -> None:
    with Example("-c", SYNTHETIC, "waits") as driver:
        driver.read_until("started")
        others = driver.others()
        assert len(others) >= 3
        driver.process.send_signal(number)
        driver.end(CODES[number])
        _, left = psutil.wait_procs(others, timeout=DEADLINE)
        assert left == []
        assert driver.others() == []


@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("fails", 1)])
def test_nothing_is_left_when_the_driver_has_ended_by_itself(how: str, code: int) -> None:
    with Example("-c", SYNTHETIC, how) as driver:
        assert driver.process.wait(DEADLINE) == code
        assert driver.others() == []


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "arguments", "number", "text"),
    [
        ("demo", ["--quick", "--output={}"], signal.SIGINT, "has found"),
        ("demo", ["--quick", "--output={}"], signal.SIGKILL, "peer 1: listens on"),
        ("digits", ["--peers=2", "--steps=1000000"], signal.SIGINT, "Global step"),
        ("explorers", ["--steps=100000", "--plot={}/plot.png"], signal.SIGTERM, "explorers follow"),
        ("sites", ["--directory={}/sites"], signal.SIGTERM, "site 1: 4 processes"),
    ],
)
def test_nothing_is_left_of_an_example(
    name: str, arguments: list[str], number: signal.Signals, text: str, tmp_path: Path
) -> None:
    with example(name, *(each.format(tmp_path) for each in arguments), limit=280) as driver:
        driver.read_until(text)
        others = driver.others()
        assert len(others) >= 3  # two peers and the guard
        driver.process.send_signal(number)
        printed = driver.end(CODES[number])
        assert number != signal.SIGINT or printed.splitlines()[-1].startswith("Stopped")
        _, left = psutil.wait_procs(others, timeout=DEADLINE)
        assert left == []
        assert driver.others() == []
