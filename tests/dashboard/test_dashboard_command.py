"""`averaging dashboard` as a process: it starts, says who can read the page, and ends in order."""

import signal

import httpx

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
