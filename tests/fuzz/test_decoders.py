"""Every decoder with arbitrary input returns, or raises only its documented error, and takes little memory."""

import json
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from msgspec import msgpack

from averaging.data.dealing import DataRecord, Dealer, Division
from averaging.errors import ProtocolViolationError, StateError, ViolationKind
from averaging.probe import CLOCK, DESCRIBE, DIAL_BACK, ECHO
from averaging.protocol.group import Mode, pack_gather, unpack_gather
from averaging.receipts import receipt_log
from averaging.state.assembler import StateAssembler
from averaging.state.manifest import State, pack, seal
from averaging.tensors.schema import describe
from averaging.transport import RpcMethod
from tests.fuzz.material import ENDPOINTS, damaged, packed, protobufs, states, values
from tests.receipts.made import receipt
from tests.support.grpc_fakes import METHODS
from tests.support.selection import examples

MANY = settings(max_examples=examples(600), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

ALL: list[RpcMethod[Any, Any]] = [*METHODS, DESCRIBE, CLOCK, DIAL_BACK, ECHO]
DECODERS = {f"{m.name}-{side}": getattr(m, f"read_{side}") for m in ALL for side in ("request", "reply")}

STATE = State(3, {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0), "n": torch.tensor(1)}, {"step": 1})
SOUND_STATE = list(pack(seal(STATE)))
SCHEMA = describe(["w"], [torch.zeros(2, 3)], part_size_bytes=1024)


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024  # KiB


@pytest.mark.parametrize("name", list(DECODERS))
@settings(max_examples=examples(250), suppress_health_check=[HealthCheck.too_slow])
@given(
    raw=st.one_of(st.binary(max_size=60), protobufs(), protobufs().map(lambda raw: raw + b"\x1a\x80\x40" + raw * 50))
)
def test_messages(name: str, raw: bytes) -> None:
    with suppress(ProtocolViolationError):
        DECODERS[name](raw)


@MANY
@given(states(SOUND_STATE), st.sampled_from([None, SCHEMA]))
def test_states(messages: list[Any], schema: Any) -> None:
    reader = StateAssembler(schema)
    try:
        for message in messages:
            reader.feed(message)
        state = reader.finish()
    except StateError:
        return
    assert len(state.tensors) == reader.count


@pytest.mark.parametrize(
    "odd",
    [
        {"digest": [1 << 40, b"", b""]},  # bytes(1 << 40) would be a terabyte
        {"version": float("inf")},
        {"tensors": [["w", "float32", [float("inf")]], ["b", "float32", [0]], ["n", "int64", []]]},
        {"tensors": [["w", "float32", [0, 1 << 63, 1 << 63]], ["b", "float32", [0]], ["n", "int64", []]]},
        {"tensors": [["w", [], [1]], ["b", "float32", [0]], ["n", "int64", []]]},
        {"user": 5},
    ],
)
def test_metadata_that_would_overflow(odd: dict[str, Any]) -> None:
    reader = StateAssembler(None)
    with pytest.raises(StateError, match="unreadable"):
        reader.feed(replace(SOUND_STATE[0], metadata=msgpack.encode(msgpack.decode(SOUND_STATE[0].metadata) | odd)))


@MANY
@given(
    st.one_of(
        packed,
        damaged([pack_gather(1.0, 5.0, Mode.NODE, {"a": 1})]),
        st.lists(values, min_size=3, max_size=5).map(msgpack.encode),
    ),
    st.sampled_from(ENDPOINTS),
)
def test_gathers(gather: bytes, endpoint: str) -> None:
    try:
        member = unpack_gather(endpoint, gather)
    except ProtocolViolationError as error:
        if error.kind is not ViolationKind.UNPROVEN:
            raise
        return
    assert member.weight >= 0


DATA = DataRecord(b"division", 3, 0b10111, {1: True, 7: False}, 99)


@MANY
@given(st.lists(st.one_of(packed, damaged([DATA.pack()])), min_size=1, max_size=3))
def test_records_of_data(raw: list[bytes]) -> None:
    dealer, records = Dealer(Division(32, 2, 0), "peer:1"), {}
    for number, each in enumerate(raw):
        with suppress(ProtocolViolationError):
            records[f"peer:{number + 2}"] = DataRecord.unpack(each)
    for now, seen in enumerate((records, {}, records)):
        dealer.see(seen, float(now))
        dealer.claim(float(now), 2)
        assert all(0 <= block < 16 for block in dealer.claims)
        assert dealer.done >> 16 == 0
        assert len(dealer.record.pack()) <= 1024


ODD_JSON = st.one_of(st.none(), st.integers(), st.text(), st.lists(st.none()), st.just(10**400))
LINE = receipt_log.dumps(receipt()).encode()


@MANY
@given(
    st.one_of(
        st.binary(max_size=60),
        damaged([LINE]),
        st.tuples(st.sampled_from(sorted(json.loads(LINE))), ODD_JSON).map(
            lambda change: json.dumps({**json.loads(LINE), change[0]: change[1]}).encode()
        ),
        st.integers(0, 5000).map(lambda depth: b"[" * depth),
        st.just(LINE.replace(b'"round": ', b'"round": ' + b"9" * 5000)),
    ),
    st.booleans(),
)  # fmt: skip
def test_lines_of_receipts(line: bytes, ended: bool) -> None:
    recorded = receipt_log.read([line + b"\n" if ended else line])
    assert len(recorded.receipts) + len(recorded.bad) + recorded.cut_off <= 1
