"""`averaging register`: wrong usage, and the port."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from averaging.cli import main


def register(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["register", *arguments])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--listen", "nowhere"], "give HOST:PORT"),
        (["--tls-cert", "a.pem"], "give --tls-ca and --tls-key as well"),
        (["--listen", "0.0.0.0:0"], "--advertise"),
        (["--listen", "0.0.0.0:0", "--advertise", "192.0.2.7:0"], "--insecure"),
        (["--token-file", "nowhere"], "--token-file nowhere cannot be read"),
    ],
)
def test_what_cannot_work_names_its_option(arguments: list[str], told: str) -> None:
    result = register(*arguments)
    assert result.exit_code == 2
    assert told in result.output


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = register("--listen", f"127.0.0.1:{taken.getsockname()[1]}", "--json")
    assert result.exit_code == 1
    assert '"event":"error"' in result.output.replace(" ", "")
    assert "the port is taken" in result.output


def test_the_help_teaches_both_sides(tmp_path: Path) -> None:
    told = register("--help").output
    for needed in ("--rdzv-backend=averaging", "--rdzv-endpoint=127.0.0.1:29400", "--max-restarts=10", "Exit codes"):
        assert needed in told
