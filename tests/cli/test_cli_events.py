"""Events for programs and lines for people, whatever strangers put into them."""

import json
import math
import shlex
from typing import Any

import pytest
from hypothesis import given, strategies as st

from averaging.cli import peer as events
from averaging.common import plain
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
CONTROL = "\x1b[2J\r\n\x00"


def test_a_round() -> None:
    event, text = events.averaged("round 1 of 3", 1, ME, RECEIPT)
    assert event == {
        "event": "round",
        "round": 1,
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
    lines = text.splitlines()
    assert lines[0] == (
        f"round 1 of 3: averaged with {OTHER}, {LOST} in 2.50 s (all-reduce 0.50 s, 3.0 MiB sent, 100 bytes received)"
    )
    assert f"  {LOST} sent [1, 'a']" in lines
    assert f"  lost {LOST}: connection lost" in lines
    assert lines[-1].startswith("  2 elements kept")
    many = Receipt(0, Outcome.AVERAGED, members=(ME, *(f"192.0.2.7:{port}" for port in range(1, 10))))
    assert "192.0.2.7:4 and 5 more" in events.averaged("round 1", 1, ME, many)[1]


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


def test_the_depth_is_bounded_and_what_json_can_represent_is_left_as_it_is() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": []}}
    assert plain(value) == value
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert len(json.dumps({"gathered": plain(deep)}, allow_nan=False)) < 100


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


def test_the_command_that_joins_can_be_pasted() -> None:
    command = ["averaging", "peer", "my model.safetensors", "--run-id", "demo", "--join", ME]
    event, text = events.ready(ME, "demo", "node", SCHEMA, command, ["seen"])
    assert (event["join"], event["endpoint"], event["schema_hash"]) == (ME, ME, SCHEMA.hash.hex())
    assert (event["tensors"], event["bytes"]) == (2, 56)
    assert shlex.split(text.splitlines()[-1]) == command
    assert "this machine" in text
    assert "not averaged, but kept as they are: seen" in text
    elsewhere = events.ready("192.0.2.7:1", "demo", "node", SCHEMA, command)[1]
    assert "this machine" not in elsewhere
    assert "instead of --mode client with --listen on an address that other peers can reach" in elsewhere
    assert shlex.split(elsewhere.splitlines()[-1]) == [*command, "--mode", "client"]
    event, text = events.ready("client::7", "demo", "client", SCHEMA, command)
    assert (event["join"], "--join" in text) == (None, False)
