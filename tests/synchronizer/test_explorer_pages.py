"""What docs/how-to/follow.md and docs/operate/grpcurl.md say of a synchronizer; test_pages.py runs its scripts."""

import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from averaging.rl.synchronizer import RemoteSynchronizer, Synchronizer
from tests.docs.test_grpcurl_page import ADDRESS, PROGRAMS, SYNCHRONIZER, agrees, cases_of
from tests.support.forking import ForkedProcess
from tests.support.pages import ROOT, blocks_of
from tests.support.ports import free_address
from tests.support.processes import DEADLINE

PAGE = (ROOT / "docs" / "how-to" / "follow.md").read_text()
SERVE, *CASES = cases_of(blocks_of(SYNCHRONIZER))


def test_the_page_names_all_methods_of_both_classes() -> None:
    [table] = re.findall(r"### What the methods do\n(.*?)\n###", PAGE, re.DOTALL)
    named = set(re.findall(r"`(\w+)\(", table))
    assert named <= set(dir(Synchronizer)) & set(dir(RemoteSynchronizer))
    remote = {name for name, value in vars(RemoteSynchronizer).items() if not name.startswith("_") and callable(value)}
    assert remote == named


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page's synchronizer, at a free port."""
    folder = tmp_path_factory.mktemp("page")
    [script] = [block for block in blocks_of(SYNCHRONIZER) if block.language == "python"]
    endpoint = free_address()
    (folder / script.title).write_text(script.text.replace(ADDRESS, endpoint))
    assert SERVE[0] == f"python {script.title}"
    process = ForkedProcess(script.title, env=None, directory=folder)
    try:
        assert "the synchronizer is at" in process.stdout.readline()
        yield endpoint
    finally:
        process.kill()
        process.wait(DEADLINE)
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


@pytest.mark.parametrize(("command", "expected"), CASES, ids=lambda value: value[-70:])
def test_grpcurl_prints_what_the_page_says(command: str, expected: str, endpoint: str) -> None:
    program, *arguments = shlex.split(command.replace(ADDRESS, endpoint))
    result = subprocess.run(
        [*PROGRAMS[program], *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    printed = result.stdout.replace(endpoint, ADDRESS)
    assert agrees(expected, printed), printed
