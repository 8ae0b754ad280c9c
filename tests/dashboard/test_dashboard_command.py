"""`averaging dashboard` as a process: it starts, says who can read the page, and ends in order."""

import signal

import httpx
import pytest
from click.testing import CliRunner

from averaging.cli import main
from tests.support.processes import averaging_process


def test_it_serves_a_run_that_does_not_answer_until_it_is_ended() -> None:
    with averaging_process("dashboard", "--join", "127.0.0.1:1", "--listen", "127.0.0.1:0") as process:
        ready = process.expect("ready")
        assert ready["readers"] == "for users of this machine, without a password"
        assert process.expect("silent")["reason"] == "no peer answered: 127.0.0.1:1: connection refused"
        state = httpx.get(ready["url"] + "state", trust_env=False, timeout=30).json()
        assert state["peers"][0]["error"].startswith("connection refused")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert process.seen[-1] == {"event": "done"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "Missing option '--join'"),
        (["--join", "nowhere"], "'nowhere' is not an address"),
        (["--join", "127.0.0.1:1", "--listen", "0.0.0.0:0"], "give --https-cert and --https-key and --password-file"),
        (["--join", "127.0.0.1:1", "--https-key", "k"], "--https-cert and --https-key belong together"),
        (["--join", "127.0.0.1:1", "--password-file", "/missing"], "--password-file /missing cannot be read"),
    ],
)
def test_wrong_usage_is_told_with_the_remedy(arguments: list[str], complaint: str) -> None:
    done = CliRunner().invoke(main, ["dashboard", *arguments])
    assert done.exit_code == 2
    assert complaint in done.stderr
