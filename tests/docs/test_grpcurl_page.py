"""Every command about a peer in docs/operate/grpcurl.md is run as it stands there, and prints what the page says."""

import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import Block, blocks_of
from tests.support.processes import DEADLINE, averaging_process

PAGE, _, SYNCHRONIZER = (
    (Path(__file__).parents[2] / "docs" / "operate" / "grpcurl.md").read_text().partition("\n## A synchronizer\n")
)
ADDRESS = "127.0.0.1:4222"
"""Of the peer on the page; the tests' own takes a free port."""

PROGRAMS = {
    "averaging": [sys.executable, "-m", "averaging"],
    "grpcurl": [str(Path(sysconfig.get_path("scripts")) / "grpcurl")],
}


def cases_of(blocks: list[Block]) -> list[tuple[str, str]]:
    """Each command, and the output that follows it."""
    return [
        (block.text.strip(), following.text if following.language in ("json", "text") else "")
        for block, following in zip(blocks, [*blocks[1:], Block("", "", "")], strict=True)
        if block.language == "sh"
    ]


def agrees(expected: str, printed: str) -> bool:
    """Whether both have the same lines; `...` stands for anything in a line of `expected`, and alone for any lines."""
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == "..." else re.escape(line.strip()).replace(re.escape("..."), ".*") + r"\n"
        for line in expected.splitlines()
    )
    return re.fullmatch(pattern, "".join(f"{line.strip()}\n" for line in printed.splitlines())) is not None


# One declaration that outlasts all tests: between two of them a peer looks for nobody, for an instant.
PATIENCE = ["--round-timeout", "600", "--group-wait", "600"]

BLOCKS = blocks_of(PAGE)
SERVE, *CASES = cases_of(BLOCKS)


def run(command: str, address: str, directory: Path) -> str:
    program, *arguments = shlex.split(command.replace(ADDRESS, address))
    result = subprocess.run(
        [*PROGRAMS[program], *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return result.stdout.replace(address, ADDRESS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's file is."""
    path = tmp_path_factory.mktemp("page")
    for block in BLOCKS:
        if block.language == "python":
            subprocess.run([sys.executable, "-c", block.text], cwd=path, check=True, timeout=DEADLINE)
    return path


@pytest.fixture(scope="module")
def address(directory: Path) -> Iterator[str]:
    """The page's peer, looking for a group."""
    program, *arguments = shlex.split(SERVE[0].replace(ADDRESS, "127.0.0.1:0"))
    assert program == "averaging"
    arguments = [str(directory / word) if word.endswith(".safetensors") else word for word in arguments]
    with averaging_process(*arguments, *PATIENCE) as peer:
        address = peer.expect("ready")["endpoint"]
        deadline = time.monotonic() + DEADLINE
        while '"looking": true' not in run(
            f"grpcurl -plaintext {ADDRESS} averaging.status.v1.Status/GetStatus", address, directory
        ):
            assert time.monotonic() < deadline, peer.stderr
        yield address


@pytest.fixture(scope="module")
def address_after_a_round(directory: Path) -> Iterator[str]:
    """Another peer like the page's, with which a second one has averaged."""
    arguments = shlex.split(SERVE[0].replace(ADDRESS, "127.0.0.1:0"))[1:]
    arguments = [str(directory / word) if word.endswith(".safetensors") else word for word in arguments]
    with averaging_process(*arguments, *PATIENCE) as peer:
        address = peer.expect("ready")["endpoint"]
        model = str(directory / "model.safetensors")
        second = ["peer", model, "--run-id", "demo", "--join", address, "--group-wait", "2"]
        with averaging_process(*second) as other:
            other.expect("done")
        peer.expect("round")
        yield address


@pytest.mark.parametrize(("command", "expected"), CASES, ids=lambda value: value[:70])
def test_the_page_is_right(command: str, expected: str, request: pytest.FixtureRequest, directory: Path) -> None:
    # Its rounds would change what the other commands print.
    address = request.getfixturevalue("address_after_a_round" if "WatchRounds" in command else "address")
    printed = run(command, address, directory)
    assert expected, "every command on the page shows what it prints"
    assert agrees(expected, printed), printed
