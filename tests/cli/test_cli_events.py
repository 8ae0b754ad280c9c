"""Events for programs and lines for people, whatever strangers put into them."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.cli import peer as events
from averaging.common import plain, size
from averaging.receipts.receipt import Dropped, Outcome, Receipt
from averaging.tensors.schema import Schema, TensorSpec

SCHEMA = Schema((TensorSpec("w", "float32", (3, 4)), TensorSpec("b", "float64", ())), 1 << 20)
ME, OTHER, LOST = "127.0.0.1:4222", "192.0.2.7:1", "client::x"
RECEIPT = Receipt(
    round=9,
    outcome=Outcome.AVERAGED,
    group_id=b"\x01" * 20,
    members=(ME, OTHER, LOST),
    dropped=(Dropped(LOST, "connection lost"),),
    gathered={ME: None, OTHER: {"loss": math.nan, "raw": b"\xff"}, LOST: [1, "a"]},
    seconds=2.5,
    allreduce_seconds=0.5,
    bytes_sent=3 << 20,
    bytes_received=100,
    part_bytes_sent=1 << 20,
    part_bytes_received=60,
    kept_local=2,
    state_version=4,
)
FAILED = Receipt(
    round=0, outcome=Outcome.FAILED, reason="all other members were lost", members=(ME, OTHER), seconds=1.0
)
ALONE = Receipt(round=0, outcome=Outcome.NO_GROUP, reason="no other peer is in the run", seconds=60.0)
CONTROL = "\x1b[2J\r\n\x00"


def test_a_round() -> None:
    event, _ = events.averaged("round 0", 0, ME, RECEIPT)
    assert event == {
        "event": "round",
        "round": 0,
        "group_id": "01" * 20,
        "members": [ME, OTHER, LOST],
        "dropped": [LOST],
        "dropped_reasons": {LOST: "connection lost"},
        "gathered": {ME: None, OTHER: {"loss": None, "raw": "ff"}, LOST: [1, "a"]},
        "seconds": 2.5,
        "allreduce_seconds": 0.5,
        "bytes_sent": 3 << 20,
        "bytes_received": 100,
        "part_bytes_sent": 1 << 20,
        "part_bytes_received": 60,
        "kept_local": 2,
        "clamped": 0,
        "state_version": 4,
    }


def test_a_retry() -> None:
    told, _ = events.retry("round 1", 1, FAILED)
    assert (told["event"], told["round"], told["outcome"]) == ("retry", 1, "failed")
    assert told["message"] == FAILED.reason
    assert events.retry("round 1", 1, ALONE)[0]["outcome"] == "no_group"


def test_ready_shows_how_to_join() -> None:
    told, _ = events.ready(ME, "demo", "node", SCHEMA, [])
    assert told["join"] == told["endpoint"] == ME
    assert told["schema_hash"] == SCHEMA.hash.hex()
    assert (told["tensors"], told["bytes"]) == (2, 56)
    assert events.ready("client::7", "demo", "client", SCHEMA, [])[0]["join"] is None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.binary() | st.none(), inner),
    max_leaves=20,
)


@given(values)
def test_anything_gathered_is_one_line_of_json(value: Any) -> None:
    line = json.dumps({"gathered": plain(value)}, allow_nan=False)
    assert line.isascii()
    assert line.isprintable()
    json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_what_json_can_represent_is_left_as_it_is() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": []}}
    assert plain(value) == value


def test_the_depth_is_bounded() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert len(json.dumps({"gathered": plain(deep)}, allow_nan=False)) < 100


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_sizes(count: int, told: str) -> None:
    assert size(count) == told


def test_round_names() -> None:
    assert events.round_name(1, 3) == "round 1 of 3"
    assert events.round_name(1, None) == "round 1"
    assert events.round_name(4, 3) == "round 4"


def test_lines_about_a_round() -> None:
    told = events.averaged("round 1 of 3", 1, ME, RECEIPT)[1].splitlines()
    assert told[0] == (
        f"round 1 of 3: averaged with {OTHER}, {LOST} in 2.50 s (all-reduce 0.50 s, 3.0 MiB sent, 100 bytes received)"
    )
    assert f"  {LOST} sent [1, 'a']" in told
    assert f"  lost {LOST}: connection lost" in told
    assert told[-1].startswith("  2 elements kept")


def test_many_members_are_counted() -> None:
    members = (ME, *(f"192.0.2.7:{port}" for port in range(1, 10)))
    told = events.averaged("round 1", 1, ME, Receipt(0, Outcome.AVERAGED, members=members))[1]
    assert "192.0.2.7:4 and 5 more" in told
    assert "192.0.2.7:5" not in told


def test_strangers_cannot_write_to_the_terminal() -> None:
    evil = Receipt(
        round=0,
        outcome=Outcome.AVERAGED,
        members=(ME, f"client::{CONTROL}"),
        dropped=(Dropped(f"client::{CONTROL}", CONTROL),),
        gathered={f"client::{CONTROL}": CONTROL},
    )
    told = events.averaged("round 1", 1, ME, evil)[1]
    assert "\x1b" not in told
    assert len(told.splitlines()) == 3
    assert events.not_averaged("round 1", Receipt(0, Outcome.FAILED, reason=CONTROL)).isprintable()


def ready(endpoint: str, command: list[str], kept: Sequence[str] = ()) -> str:
    return events.ready(endpoint, "demo", "node", SCHEMA, command, kept)[1]


def test_the_command_that_joins_can_be_pasted() -> None:
    command = ["averaging", "peer", "my model.safetensors", "--run-id", "demo", "--join", ME]
    lines = ready(ME, command).splitlines()
    assert shlex.split(lines[-1]) == command
    assert "this machine" in lines[1]
    assert "not averaged, but kept as they are: seen" in ready(ME, command, ["seen"])
    assert "this machine" in ready("127.0.1.1:1", command)
    elsewhere = ready("192.0.2.7:1", command)
    assert "this machine" not in elsewhere
    assert "with --listen on an address that other peers can reach, or with --mode client:" in elsewhere
    assert "--join" not in ready("client::7", command)


def test_why_there_was_no_average() -> None:
    assert events.not_averaged("round 1", ALONE) == ("round 1: no group within 60.0 s: no other peer is in the run")
    assert events.not_averaged("round 1", FAILED).startswith("round 1: failed after 1.0 s: all other")


def test_the_last_line() -> None:
    assert events.done(1, "out.safetensors", "")[1] == "done: 1 round, wrote out.safetensors"
    assert events.done(2, None, "no --output was given")[1] == "done: 2 rounds, nothing written: no --output was given"
