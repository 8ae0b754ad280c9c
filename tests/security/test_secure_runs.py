"""Whole runs between processes with certificates and tokens, set up by the commands of SECURITY.md."""

import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.processes import DEADLINE, JsonProcess, averaging_command, averaging_process

ROOT = Path(__file__).parents[2]
GRPCURL = str(Path(sysconfig.get_path("scripts")) / "grpcurl")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "SECURITY.md").read_text(), re.DOTALL | re.MULTILINE)
REACHED = "--listen 0.0.0.0:4222 --advertise a.example.org:4222"
HERE = "--listen 127.0.0.1:0"
SECRETS = ("--token-file", "token", "--tls-ca", "ca/ca.pem")

Start = Callable[..., JsonProcess]


def commands(block: str) -> list[list[str]]:
    """Its lines as words, with this machine in the place of the example's."""
    lines = block.replace("\\\n", " ").replace(REACHED, HERE).replace("a.example.org", "127.0.0.1").splitlines()
    return [shlex.split(line) for line in lines]


def shell(block: str, directory: Path) -> None:
    """Runs a block as it stands, but for the host and the program's place."""
    program = shlex.join([sys.executable, "-m", "averaging"])
    script = block.replace("a.example.org", "127.0.0.1").replace("averaging ", f"{program} ")
    subprocess.run(["bash", "-euc", script], cwd=directory, check=True, timeout=DEADLINE, stdout=subprocess.DEVNULL)


def files_of(name: str) -> tuple[str, ...]:
    return (*SECRETS, "--tls-cert", f"ca/{name}.pem", "--tls-key", f"ca/{name}.key")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With three files to average, and what the page's first block makes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for number, name in enumerate("abc", 1):
        save_file({"w": torch.full((1000,), float(number))}, tmp_path / f"{name}.safetensors")
    shell(BLOCKS[0], tmp_path)
    return tmp_path


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(averaging_process(*arguments))


def joining(endpoint: str, words: list[str]) -> list[str]:
    """A command with the endpoint of a running peer in the place of the example's."""
    return [word.replace("127.0.0.1:4222", endpoint) for word in words]


def test_the_commands_of_the_security_page_work(directory: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, serve, state, grpcurl = BLOCKS
    page = directory / "page"
    page.mkdir()
    monkeypatch.chdir(page)
    shell(setup, page)
    assert (page / "token").stat().st_mode & 0o777 == 0o600
    (_, *peer), (_, *download) = (commands(block)[0] for block in (serve, state))
    serving = start("peer", "../a.safetensors", *peer[2:])
    endpoint = serving.expect("ready")["endpoint"]
    result = averaging_command(*joining(endpoint, download))
    assert result.returncode == 0, result.stderr
    assert load_file(page / "now.safetensors")["w"].tolist() == [1.0] * 1000
    script = grpcurl.replace("a.example.org:4222", endpoint).replace("grpcurl ", f"{shlex.quote(GRPCURL)} ")
    for method, told in (
        ("averaging.status.v1.Status/GetStatus", f'"endpoint": "{endpoint}"'),
        ("list", "averaging.gossip.v1.Gossip"),
    ):
        line = script.replace("averaging.status.v1.Status/GetStatus", method)
        looked = subprocess.run(["bash", "-euc", line], capture_output=True, text=True, timeout=DEADLINE, check=True)
        assert told in looked.stdout


def test_three_processes_average_and_strangers_get_nothing(directory: Path, start: Start) -> None:
    assert averaging_command("ca", "issue", "c", "--host", "127.0.0.1").returncode == 0
    assert averaging_command("ca", "issue", "elsewhere", "--host", "198.51.100.7").returncode == 0
    for arguments in (["init"], ["issue", "a", "--host", "127.0.0.1"]):
        assert averaging_command("ca", *arguments, "--directory", "foreign").returncode == 0
    (directory / "wrong").write_text("0123456789abcdef0123456789abcdef\n")
    (directory / "wrong").chmod(0o600)
    common = ("--run-id", "demo", "--group-size", "3", "--min-group-size", "3", "--group-wait", "20")
    # It serves: it is there for as long as the strangers take, and looks on until the others come.
    serving = (*common, "--serve", "--rounds", "1")
    first = start("peer", "a.safetensors", *serving, *files_of("a"), "--output", "a-mean.safetensors")
    endpoint = first.expect("ready")["endpoint"]

    foreign = [word.replace("ca/", "foreign/") for word in files_of("a")]
    wrong = [word.replace("token", "wrong") if word == "token" else word for word in files_of("c")]
    no_token = [word for word in files_of("c") if word not in ("--token-file", "token")]
    hung_up = "it closed the connection at once; do both use TLS"
    definite = [
        (foreign, "its certificate was not issued by this peer's certificate authority"),
        (wrong, "its run does not accept this peer's token: make one of the run's tokens the first"),
        (no_token, "its run requires a token, and this peer has none: give --token-file"),
    ]
    state = ("state", endpoint, "--output", "stolen.safetensors")
    peer = ("peer", "b.safetensors", *common, "--join", endpoint, "--join-timeout")
    # Who is refused for good does not wait for --join-timeout: with an hour it would not end before the test does.
    strangers = [
        *((start(*state, *options), 1, told) for options, told in [((), hung_up), *definite]),
        (start(*peer, "3600", *wrong), 2, definite[1][1]),
    ]
    for process, code, told in strangers:
        assert process.wait() == code, process.stderr
        assert told in process.stderr
        (error,) = process.events("error")
        assert told in error["message"]
    other = start(*peer, "3600", *files_of("c"), "--run-id", "elsewhere")
    assert other.wait() == 2
    assert "belongs to run 'demo', not to 'elsewhere'; give both peers the same run id" in other.stderr
    result = averaging_command("peer", "b.safetensors", *common, "--join", endpoint, *files_of("elsewhere"))
    assert result.returncode == 2
    assert "is for 198.51.100.7, but other peers reach this one at 127.0.0.1" in result.stderr
    assert not (directory / "stolen.safetensors").exists()

    others = [
        start("peer", "c.safetensors", *common, "--join", endpoint, *files_of("c"), "--output", "c-mean.safetensors"),
        start("peer", "b.safetensors", *common, "--join", endpoint, *files_of("b"), "--mode", "client"),
    ]
    first.expect("serving")
    first.signal(signal.SIGTERM)
    for process in (first, *others):
        assert process.wait() == 0, process.stderr
        (averaged,) = process.events("round")
        assert len(averaged["members"]) == 3
        assert averaged["dropped"] == []
    assert "refused a call from 127.0.0.1: this run requires a token, and " in first.stderr
    assert [process.stderr for process in others] == ["", ""]
    for name in "ac":
        assert load_file(directory / f"{name}-mean.safetensors")["w"].tolist() == [2.0] * 1000
