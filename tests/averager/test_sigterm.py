"""The cost of a peer's end for the others: by SIGTERM, by SIGKILL, and with its own signal handler."""

import json
import signal
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.processes import JsonProcess, averaging_command
from tests.support.selection import rest_is_long


def start(stack: ExitStack, **options: Any) -> JsonProcess:
    arguments = json.dumps({"way": "until ended", "every": 2, "peers": 3, "patient": True, **options})
    return stack.enter_context(JsonProcess("python", "-m", "tests.support.trainer", arguments))


def three(stack: ExitStack, strategy: str, **of_the_last: Any) -> list[JsonProcess]:
    """Three peers that have averaged once."""
    peers = [start(stack, strategy=strategy)]
    seed = peers[0].expect("ready")["endpoint"]
    peers += [start(stack, strategy=strategy, join=[seed]), start(stack, strategy=strategy, join=[seed], **of_the_last)]
    for peer in peers[1:]:
        peer.expect("ready")
    for peer in peers:
        while len(peer.expect("round")["members"]) < 3:
            continue
    return peers


def go_on(survivors: list[JsonProcess]) -> None:
    """Each survivor averages three times without the third peer, for which a round would wait without end."""
    for peer in survivors:
        done = 0
        while done < 3:
            event = peer.expect("round")
            done += event["outcome"] == "averaged" and len(event["members"]) == 2


@pytest.mark.parametrize("strategy", rest_is_long(("diloco", "gradients", "local")))
@pytest.mark.parametrize("number", rest_is_long((signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)))
def test_nobody_waits_for_a_peer_whose_process_was_ended(strategy: str, number: signal.Signals) -> None:
    with ExitStack() as stack:
        *survivors, ended = three(stack, strategy, options={"leave_on": ["SIGTERM", "SIGHUP", "SIGUSR1"]})
        ended.signal(number)
        assert ended.wait() == -number
        go_on(survivors)
        if number != signal.SIGKILL:
            assert "the averager of run 'run' has left" in ended.stderr


@pytest.mark.parametrize("strategy", rest_is_long(("local", "gradients", "diloco")))
def test_a_script_that_handles_sigterm_goes_on_and_ends_as_it_wants(strategy: str) -> None:
    """After its peer has left, local steps still work."""
    with ExitStack() as stack:
        *survivors, ended = three(stack, strategy, handles=True)
        ended.signal(signal.SIGTERM)
        ended.expect("handled")
        left = ended.expect("left")
        assert left == {
            "event": "left",
            "steps": 1,
            "finish": "left the run before its end, so the weights of the other peers are unknown",
        }
        assert ended.wait() == 0
        go_on(survivors)


@pytest.mark.timeout(300)  # it starts four processes
@pytest.mark.parametrize("strategy", rest_is_long(("local", "gradients", "diloco")))
def test_a_peer_that_is_asked_to_leave_costs_the_others_nothing(strategy: str) -> None:
    """Its last round is whole, the next receipts say that it has left, and its process ends as by SIGTERM."""
    with ExitStack() as stack:
        *survivors, ended = three(stack, strategy)
        endpoint = next(event["endpoint"] for event in ended.seen if event["event"] == "ready")
        told = averaging_command("leave", endpoint)
        assert told.returncode == 0, told.stderr
        assert told.stdout == f"{endpoint} has left run run\n"
        assert ended.wait() == -signal.SIGTERM
        assert f"{endpoint} leaves: asked by ipv4:127.0.0.1:" in ended.stderr
        go_on(survivors)
        for peer in survivors:
            rounds = peer.events("round")
            assert not [event for event in rounds if event["dropped"]]
            assert [event["left"] for event in rounds if event["left"]] == [[endpoint]]
            assert {event["outcome"] for event in rounds} <= {"averaged", "no_group"}
