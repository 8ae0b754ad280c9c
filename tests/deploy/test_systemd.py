"""The units of systemd: verified by systemd-analyze, and their commands started as systemd would start them."""

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.pages import ROOT
from tests.support.ports import free_port
from tests.support.processes import DEADLINE

pytestmark = pytest.mark.deploy

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
BIN = Path(sys.executable).parent


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with the programs of this environment, since verify looks whether they exist."""
    here = tmp_path / "units"
    here.mkdir()
    for unit in UNITS:
        (here / unit.name).write_text(unit.read_text().replace("/opt/averaging/bin", str(BIN)))
    return here


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("unit", [unit.name for unit in UNITS])
def test_systemd_analyze_finds_nothing(unit: str, units: Path) -> None:
    instance = units / unit.replace("@.", "@a.")
    verified = analyze("verify", instance)
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


@pytest.mark.parametrize("unit", [unit.name for unit in UNITS])
def test_a_service_is_hardly_exposed(unit: str, units: Path) -> None:
    rated = analyze("security", "--offline=true", "--threshold=20", units / unit)
    assert rated.returncode == 0, rated.stdout


class Service:
    """One start of a unit without systemd: its variables, its credentials, its directory.

    Args:
        unit: The file.
        root: Takes the place of /.
        instance: What follows the @ of its name.
        variables: The lines of its EnvironmentFile.
    """

    def __init__(self, unit: str, root: Path, instance: str = "", **variables: str) -> None:
        text = (ROOT / "deploy" / "systemd" / unit).read_text().replace("\\\n", " ")
        credentials, state = root / "credentials", root / "state"
        text = text.replace("%i", instance).replace("%d", str(credentials)).replace("%S", str(state))
        text = text.replace("/opt/averaging/bin", str(BIN)).replace("/etc/averaging", str(root / "etc"))
        lines = [line.partition("=")[::2] for line in text.splitlines() if "=" in line and not line.startswith("#")]
        environment = dict(os.environ)
        credentials.mkdir(exist_ok=True)
        for name, value in lines:
            if name == "Environment":
                environment |= dict(word.split("=", 1) for word in shlex.split(value))
            if name == "LoadCredential":
                known, _, path = value.partition(":")
                (credentials / known).write_bytes(Path(path).read_bytes())
                (credentials / known).chmod(0o400)
            if name == "WorkingDirectory":
                directory = Path(value)
                directory.mkdir(parents=True)
        environment |= variables
        [command] = [value for name, value in lines if name == "ExecStart"]
        words = [re.sub(r"\$\{(\w+)\}", lambda found: environment[found[1]], word) for word in command.split()]
        self.process = subprocess.Popen(
            words, env=environment, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.printed = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout:
            for line in self.process.stdout:
                self.printed += line

    def until(self, text: str) -> None:
        end = time.monotonic() + DEADLINE
        while not re.search(text, self.printed):
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < end, self.printed
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine after the commands of the page."""
    etc = tmp_path / "etc"
    subprocess.run([str(BIN / "averaging"), "ca", "init", "--directory", str(etc)], check=True, capture_output=True)
    for name in ("a", "b", "register", "feed"):
        issue = [str(BIN / "averaging"), "ca", "issue", name, "--directory", str(etc), "--host", "127.0.0.1"]
        subprocess.run(issue, check=True, capture_output=True)
    (etc / "token").touch(mode=0o600)
    (etc / "token").write_text(secrets.token_hex(32))
    return tmp_path


def test_the_register_starts_and_stops(root: Path) -> None:
    port = free_port()
    at = f"127.0.0.1:{port}"
    service = Service("averaging-register.service", root, LISTEN=at, ADVERTISE=at)
    service.until(f"the register is at torchrun .*{at}")
    assert service.stop() == 0


def test_two_peers_train_together_and_leave_in_order(root: Path) -> None:
    ports = [free_port(), free_port()]
    for name, port, other in zip("ab", ports, reversed(ports), strict=True):
        options = {"run_id": "demo", "listen": f"127.0.0.1:{port}"}
        lines = [f'{key} = "{value}"' for key, value in options.items()] + ["group_size = 2"]
        lines += [f'join = ["127.0.0.1:{other}"]'] if name == "b" else []
        (root / "etc" / f"{name}.toml").write_text("\n".join(lines))
    peers = []
    for name in "ab":
        place = root / name
        place.mkdir()
        (place / "etc").symlink_to(root / "etc")
        program = str(ROOT / "deploy" / "train.py")
        peers.append(Service("averaging-peer@.service", place, name, PROGRAM=program))
        peers[-1].until(r"trains from step")
    for peer in peers:
        peer.until(r"round \d+: averaged with 1 other")
        assert "can be read by other users" not in peer.printed
    assert peers[0].stop() == -signal.SIGTERM
    assert "has left" in peers[0].printed
    page = (ROOT / "docs" / "how-to" / "systemd.md").read_text()
    [command] = re.findall(r"sudo /opt/averaging/bin/(averaging leave .*)", page)
    words = command.replace("a.example.org:4222", f"127.0.0.1:{ports[1]}").replace(" a.", " b.").split()
    left = subprocess.run([str(BIN / words[0]), *words[1:]], cwd=root / "etc", capture_output=True, text=True)
    assert left.returncode == 0, left.stdout + left.stderr
    assert peers[1].process.wait(DEADLINE) == -signal.SIGTERM, "clean for systemd, which does not start it again"
