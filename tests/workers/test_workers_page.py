"""docs/how-to/workers.md: its code and commands run as written, except for ports, and print what the page says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.pages import ROOT, Block, blocks_of
from tests.support.ports import free_port
from tests.support.processes import DEADLINE

BLOCKS = blocks_of((ROOT / "docs" / "how-to" / "workers.md").read_text())
PYTHON = [block.text for block in BLOCKS if block.language == "python"]
NAMES = ("worker.py", "master.py", "", "single.py")
"""Files of the page; the third block is a method."""

COMMANDS = [
    (block.text, following.text if following.language == "text" else "")
    for block, following in zip(BLOCKS, [*BLOCKS[1:], Block("", "", "")], strict=True)
    if block.language == "sh"
]
(QUICKSTART, RESULT), SINGLE = COMMANDS
*START, TRAIN = QUICKSTART.splitlines()


class Page:
    """The page's workers, and a shell in the folder of its files."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._ports = {"7001": str(free_port()), "7002": str(free_port())}
        # The page's commands find the token in the home of the user, and the page's programs as they are installed.
        self._environment = os.environ | {"HOME": str(directory)}
        self._environment |= {"PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"}
        self._environment.pop("XDG_STATE_HOME", None)
        for name, text in zip(NAMES, PYTHON, strict=True):
            if name:
                (directory / name).write_text(self._here(text))
        self.workers = [stack.enter_context(self._start(*self._here(line).split()[1:])) for line in START]
        for worker in self.workers:
            stack.callback(worker.kill)

    def _here(self, text: str) -> str:
        for page, port in self._ports.items():
            text = text.replace(page, port)
        return text

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, *arguments], cwd=self._directory, env=self._environment, text=True)

    def run(self, commands: str) -> str:
        """What a shell prints."""
        ended = subprocess.run(
            ["bash", "-c", self._here(commands)],
            cwd=self._directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with ExitStack() as stack:
        yield Page(tmp_path, stack)


@pytest.mark.long
def test_the_page(page: Page) -> None:
    """The quickstart, then single requests, as a reader goes down the page."""
    for command, expected in ((TRAIN, RESULT), SINGLE):
        assert page.run(command) == expected
    for worker in page.workers:
        worker.send_signal(signal.SIGINT)
    assert [worker.wait(DEADLINE) for worker in page.workers] == [0, 0]


def test_the_other_code_is_python() -> None:
    compile(PYTHON[NAMES.index("")], "page", "exec")
