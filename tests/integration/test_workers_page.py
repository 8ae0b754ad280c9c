"""docs/how-to/workers.md: its processes run as written, except for ports, and print what the page says."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.pages import ROOT, blocks_of
from tests.integration.ports import free_port
from tests.integration.processes import DEADLINE

BLOCKS = blocks_of((ROOT / "docs" / "how-to" / "workers.md").read_text())
PYTHON = [block.text for block in BLOCKS if block.language == "python"]


@pytest.mark.long
def test_the_quickstart(tmp_path: Path) -> None:
    ports = {"7001": str(free_port()), "7002": str(free_port())}

    def here(text: str) -> str:
        for page, port in ports.items():
            text = text.replace(page, port)
        return text

    for name, text in zip(("worker.py", "master.py"), PYTHON, strict=False):
        (tmp_path / name).write_text(here(text))
    [commands] = [block.text for block in BLOCKS if block.language == "sh"]
    [expected] = [block.text for block in BLOCKS if block.language == "text"]
    with ExitStack() as stack:
        *workers, master = [
            subprocess.Popen([sys.executable, *here(line).split()[1:]], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
            for line in commands.splitlines()
        ]
        for process in workers:
            stack.callback(process.wait, DEADLINE)
            stack.callback(process.kill)
        for process in (*workers, master):
            stack.enter_context(process)
            stack.callback(process.kill)
        printed, _ = master.communicate(timeout=DEADLINE)
        for process in workers:
            process.send_signal(signal.SIGINT)
        assert [process.wait(DEADLINE) for process in workers] == [0, 0]
    assert (master.returncode, printed) == (0, expected)


def test_the_other_code_is_python() -> None:
    assert len(PYTHON) == 3
    compile(PYTHON[2], "page", "exec")
