"""`averaging leave`, and the signals on which `averaging peer` leaves, with real processes."""

import signal
from contextlib import ExitStack
from itertools import dropwhile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from averaging import Receipt
from averaging.receipts.receipt_log import read
from tests.support.certificates import TOKEN
from tests.support.ports import free_address
from tests.support.processes import JsonProcess, averaging_command, averaging_process
from tests.support.selection import rest_is_long

RUN = ("--run-id", "demo", "--group-size", "3", "--group-wait", "2", "--serve", "--interval", "0.05")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(300_000)}, path)
    return str(path)


def test_a_peer_leaves_between_its_rounds_and_the_others_go_on(file: str, tmp_path: Path) -> None:
    logs = [tmp_path / f"other{number}.jsonl" for number in range(2)]

    def receipts(log: Path) -> list[Receipt]:
        with log.open("rb") as lines:
            return read(lines).receipts

    with ExitStack() as stack:
        leaver = stack.enter_context(averaging_process("peer", file, *RUN))
        seed = leaver.expect("ready")["endpoint"]
        options = ("--join", seed, "--receipts")
        others = [stack.enter_context(averaging_process("peer", file, *RUN, *options, str(log))) for log in logs]
        for peer in (leaver, *others):
            while len(peer.expect("round")["members"]) < 3:  # the first rounds may lack the other one
                continue
        leaving = stack.enter_context(averaging_process("leave", seed))
        assert leaving.wait() == 0, leaving.stderr
        assert leaving.seen[-1] == {"event": "left", "endpoint": seed, "run_id": "demo"}
        steps = [event["step"] for event in leaving.events("leaving")]
        assert set(steps) <= {"round", "downloads", "closing"}
        assert leaver.wait() == 0
        assert leaver.seen[-1]["event"] == "done"
        for other, log in zip(others, logs, strict=True):
            # A round of two alone proves nothing: in an earlier one another peer may have been late.
            while not any(receipt.averaged for receipt in dropwhile(lambda one: not one.left, receipts(log))):
                other.expect("round")
        for other, log in zip(others, logs, strict=True):
            other.signal(signal.SIGTERM)
            assert other.wait() == 0
            written = receipts(log)
            assert not [receipt for receipt in written if any(drop.endpoint == seed for drop in receipt.dropped)]
            assert sum(seed in receipt.left for receipt in written) == 1


def test_what_the_command_says_if_it_cannot(file: str, tmp_path: Path) -> None:
    nobody = averaging_command("leave", free_address())
    assert nobody.returncode == 1
    assert "check the address" in nobody.stderr
    assert averaging_command("leave", "nowhere").returncode == 2
    (tmp_path / "token").write_text(TOKEN)
    options = ("--token-file", str(tmp_path / "token"))
    with averaging_process("peer", file, *RUN, *options) as peer:
        endpoint = peer.expect("ready")["endpoint"]
        refused = averaging_command("leave", endpoint)
        assert refused.returncode == 1
        assert "requires a token" in refused.stderr
        assert averaging_command("leave", endpoint, *options).returncode == 0
        assert peer.wait() == 0


def ended_by(name: str, *arguments: str) -> JsonProcess:
    with averaging_process("peer", *arguments, "--leave-on", "SIGTERM,SIGUSR1") as peer:
        peer.expect("ready")
        peer.signal(signal.Signals[name])
        peer.wait()
        return peer


@pytest.mark.parametrize("name", rest_is_long(("SIGUSR1", "SIGHUP", "SIGTERM")))
def test_a_peer_leaves_on_the_signals_that_its_user_chose(file: str, name: str) -> None:
    assert ended_by(name, file, *RUN).seen[-1]["event"] == "done"
