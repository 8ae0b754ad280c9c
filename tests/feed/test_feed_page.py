"""docs/how-to/feed.md: its commands and scripts run as written, except for ports, and print what the page says."""

from __future__ import annotations

import re
import shlex
import ssl
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from averaging.rl.feed import FeedEnvironment, Posted
from averaging.rl.feed.server import Routes
from averaging.weights import WeightFollower
from tests.docs.test_grpcurl_page import agrees
from tests.support.pages import Block, blocks_of
from tests.support.processes import DEADLINE

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "feed.md").read_text()
BLOCKS = blocks_of(PAGE)
SERVERS = [block for block in BLOCKS if block.text.startswith("averaging feed ")]
PYTHON = [block.text for block in BLOCKS if block.language == "python"]

PROGRAMS = {"averaging": [sys.executable, "-m", "averaging"], "python": [sys.executable]}


def expected(block: Block) -> str:
    """Returns the output that the page shows after a command."""
    following = BLOCKS[BLOCKS.index(block) + 1]
    return following.text if following.language == "text" else ""


def run(command: str, folder: Path) -> subprocess.Popen[str]:
    program, *arguments = shlex.split(command)
    out = subprocess.PIPE
    return subprocess.Popen(
        [*PROGRAMS[program], *arguments], cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True
    )


class Serving:
    """A server of the page, at a free port instead."""

    def __init__(self, block: Block, folder: Path) -> None:
        (port,) = re.findall(r"--listen 127\.0\.0\.1:(\d+)", block.text)
        self.process = run(block.text.replace(f":{port}", ":0"), folder)
        assert self.process.stdout is not None
        self.output = self.process.stdout.readline()
        (self.port,) = re.findall(r"://127\.0\.0\.1:(\d+)", self.output)
        self.output = self.output.replace(f":{self.port}", f":{port}")
        self.on_page = port

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate(timeout=DEADLINE)
        assert self.process.returncode == 0


@pytest.mark.long
def test_the_quickstart(tmp_path: Path, stack: ExitStack) -> None:
    server = stack.enter_context(Serving(SERVERS[0], tmp_path))
    assert agrees(expected(SERVERS[0]), server.output)
    for name, script in zip(("environment.py", "trainer.py"), PYTHON, strict=False):
        assert f"`{name}`" in PAGE
        (tmp_path / name).write_text(script.replace(f":{server.on_page}", f":{server.port}"))
    commands = [block for block in BLOCKS if block.language == "sh" and re.fullmatch(r"python \w+\.py\n", block.text)]
    assert [block.text.strip() for block in commands] == ["python environment.py", "python trainer.py"]
    processes = [run(block.text, tmp_path) for block in commands]
    for block, process in zip(commands, processes, strict=True):
        out, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, out
        assert agrees(expected(block), out), out


def test_a_server_in_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    exec(PYTHON[2], {"__name__": "page"})
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("stale", [0, 1])
def test_an_environment_waits_for_newer_weights(stale: int) -> None:
    environment, weights = Mock(FeedEnvironment), Mock(WeightFollower)
    environment.post.return_value = Posted("received", 7, 0, stale)
    exec(PYTHON[3], {"environment": environment, "weights": weights, "group": None})
    assert weights.update.call_count == stale


@pytest.mark.long
def test_tls_and_a_token(tmp_path: Path, stack: ExitStack) -> None:
    start = BLOCKS.index(SERVERS[1])
    for block in BLOCKS[start - 3 : start]:
        command, _, target = block.text.strip().partition(" > ")
        process = run(command, tmp_path)
        out, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, out
        if target:
            (tmp_path / target).write_text(out)
            (tmp_path / target).chmod(0o600)
    server = stack.enter_context(Serving(SERVERS[1], tmp_path))
    assert agrees(expected(SERVERS[1]), server.output), server.output
    context = ssl.create_default_context(cafile=tmp_path / "ca" / "ca.pem")
    url, token = f"https://127.0.0.1:{server.port}/status", (tmp_path / "token").read_text().strip()
    assert httpx.get(url, verify=context).status_code == 401
    assert httpx.get(url, verify=context, headers={"Authorization": f"Bearer {token}"}).status_code == 200


def test_every_route_is_described() -> None:
    rows = set(re.findall(r"^\| `((?:GET|POST) /[\w-]*)`", PAGE, re.MULTILINE))
    assert {f"{method} {path}" for method, path, _ in Routes(Mock(), Mock(), Mock()).table()} == rows
