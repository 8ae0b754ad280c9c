"""docs/how-to/workers.md: its code and commands run as written, except for ports, and print what the page says."""

import os
import re
import shlex
import signal
import subprocess
import sysconfig
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks_of
from tests.support.ports import free_port
from tests.support.processes import DEADLINE

BLOCKS = blocks_of((ROOT / "docs" / "how-to" / "workers.md").read_text())
WORKER, MASTER, METHOD, SINGLE = (block.text for block in BLOCKS if block.language == "python")
QUICKSTART, REQUESTS = (block.text for block in BLOCKS if block.language == "sh")


@pytest.mark.long
def test_the_page(tmp_path: Path) -> None:
    """The quickstart, then single requests, as a reader goes down the page. Ctrl+C ends the workers."""
    ports = {"7001": str(free_port()), "7002": str(free_port())}

    def here(text: str) -> str:
        return re.sub("|".join(ports), lambda page: ports[page[0]], text)

    for name, text in (("worker.py", WORKER), ("master.py", MASTER), ("single.py", SINGLE)):
        (tmp_path / name).write_text(here(text))
    # The page's commands find the token in the home of the user, and the page's programs as they are installed.
    programs = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"HOME": str(tmp_path), "PATH": programs}
    environment.pop("XDG_STATE_HOME", None)
    *workers, train = here(QUICKSTART).splitlines()
    with ExitStack() as stack:
        started = [subprocess.Popen(shlex.split(line), cwd=tmp_path, env=environment) for line in workers]
        for worker in started:
            stack.callback(worker.kill)
        run = partial(
            subprocess.run, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, timeout=DEADLINE
        )
        printed = [run(["bash", "-c", command], check=True).stdout for command in (train, REQUESTS)]
        assert printed == [block.text for block in BLOCKS if block.language == "text"]
        for worker in started:
            worker.send_signal(signal.SIGINT)
        assert [worker.wait(DEADLINE) for worker in started] == [0, 0]


def test_the_other_code_is_python() -> None:
    compile(METHOD, "page", "exec")
