"""`averaging top` in a real terminal of 80 x 24, and its output elsewhere."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.monitor.terminal import TerminalProcess
from tests.support.certificates import TOKEN, write
from tests.support.ports import free_address
from tests.support.processes import JsonProcess, averaging_command


@pytest.fixture(scope="module")
def many() -> Iterator[str]:
    """The address of one of 64 peers."""
    with JsonProcess("python", "-m", "tests.monitor.monitored", "64") as process:
        yield process.expect("ready")["endpoint"]


def all_answer(lines: list[str]) -> object:
    """Whether all 64 peers are shown, and nearly all have answered in time, however busy this machine is."""
    return re.search(r"64 peers, 6\d answer", lines[0])


def test_64_peers_in_a_small_terminal(many: str) -> None:
    with TerminalProcess("top", many) as terminal:
        terminal.until(all_answer)
        terminal.until_text("64 of 64, sorted by PEER")
        lines = terminal.until(lambda lines: sum(line.startswith(" 127.0.0.1:") for line in lines) >= 8)
        assert lines[0].startswith("run demo")
        assert "global step" in lines[0]
        assert "rounds/min" in lines[1]
        assert lines[2].startswith("a round: looking")
        assert "waited for: " in lines[3]
        assert "1 follower at version" in lines[4]
        assert re.match(r" PEER +STATE +STEP +SAMP/S +LAST ROUND +OUT/S +IN/S", lines[6])
        terminal.press("sss")
        terminal.until_text("sorted by SAMP/S")
        terminal.press("\r")
        terminal.until_text("Receipts of 127.0.0.1:")
        terminal.until(lambda lines: any(re.match(r"round \d+: 8 of 8 in", line) for line in lines))
        terminal.press("\x03")
        assert terminal.wait() == 0
        assert b"\x1b[?1049l" in terminal.written[-200:]  # the screen of before


def test_the_first_answer_does_not_come() -> None:
    address = free_address()
    with TerminalProcess("top", address) as terminal:
        assert terminal.wait() == 1
        assert f"no peer answered: {address}: connection refused" in " ".join(terminal.text.split())


def test_without_a_terminal_one_table_is_printed(many: str) -> None:
    for arguments in ([], ["--once"]):
        done = averaging_command("top", many, *arguments)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0].startswith("run demo  64 peers, ")
        [title] = [line for line in lines if line.startswith("PEER")]
        for name in ("STATE", "STEP", "SAMP/S", "OUT/S", "IN/S", "WAITS FOR", "LANE", "ROLE", "STRATEGY", "VERSION"):
            assert name in title
        assert sum(line.startswith("127.0.0.1:") for line in lines) == 64
        assert any(line.startswith("follower") and "192.0.2.9:4300" in line for line in lines)


def test_json_is_one_snapshot_with_tls_and_a_token(tmp_path: Path) -> None:
    files = {name: str(path) for name, path in write(tmp_path, "127.0.0.1").items()}
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(TOKEN)
    secured = ["--tls-ca", files["tls_ca"], "--tls-cert", files["tls_cert"], "--tls-key", files["tls_key"]]
    with JsonProcess("python", "-m", "tests.monitor.monitored", "3", json.dumps(files), str(tokens)) as process:
        endpoint = process.expect("ready")["endpoint"]
        command = [sys.executable, "-m", "averaging", "top", endpoint, "--json", *secured, "--token-file", str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        refused = averaging_command("top", endpoint, "--json", *secured)
        assert refused.returncode == 1
        assert "token" in refused.stderr
    snapshot = json.loads(done.stdout)
    assert snapshot["run_id"] == "demo"
    assert [peer["answers"] for peer in snapshot["peers"]] == [True] * 3
    assert snapshot["peers"][0]["training"]["strategy"] == "DiLoCo"
    assert snapshot["followers"][0]["newest"] is not None
