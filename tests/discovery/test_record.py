"""Records: what is acceptable, what is signed, and how tables merge."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from averaging.discovery.gossip.record import (
    MAX_VERSION,
    Author,
    Ed25519Identity,
    Reason,
    RecordLimits,
    UnsignedIdentity,
    record_id,
    refusal_reason,
    signed_bytes,
)
from averaging.discovery.gossip.record_table import RecordTable
from averaging.protocol.messages import Record

NOW = 1_700_000_000.0
OWNERS = tuple(bytes([number]) * 32 for number in (1, 2, 3))
LIMITS = RecordLimits()


def record(**fields: Any) -> Record:
    defaults: dict[str, Any] = {
        "key": "run.0b",
        "subkey": "a:1",
        "value": b"v",
        "version": 10,
        "claimed": 10,
        "expiration": NOW + 10,
        "owner": OWNERS[0],
    }
    return Record(**(defaults | fields))


def table(limits: RecordLimits = LIMITS) -> RecordTable:
    return RecordTable(limits, lambda record: True)


def withdrawal(of: Record, version: int) -> Record:
    return replace(of, value=b"", version=version, withdrawn=True, expiration=of.expiration + 3)


def test_a_record_that_was_dropped_is_not_accepted_again_and_a_later_version_is() -> None:
    """Peers that have not dropped it yet hold it still, and would send it."""
    several, other, one = table(), table(), record()
    for each in (several, other):
        assert each.merge(one, NOW).is_new
    change = several.drop(one.key, one.subkey, NOW)
    assert change is not None
    assert change.after is None
    assert several.drop(one.key, one.subkey, NOW) is None
    assert several.state_hash == table().state_hash
    assert several.compare(other.versions().items()) == ([], [])
    for version in (one.version, one.version - 1):
        assert not several.merge(replace(one, version=version, claimed=1), NOW).is_new
    newer = replace(one, version=one.version + 1)
    number = record_id(one.key, one.subkey, one.owner)
    assert several.compare([(number, newer.version)]) == ([], [number])
    assert several.merge(newer, NOW).is_new


# Which records are accepted


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"value": b"x" * 1024, "key": "k" * 256, "subkey": "s" * 256}, None),
        ({"value": b"x" * 1025}, Reason.OVERSIZED),
        ({"key": "k" * 257}, Reason.OVERSIZED),
        ({"subkey": "é" * 129}, Reason.OVERSIZED),
        ({"key": ""}, Reason.MALFORMED),
        ({"subkey": ""}, Reason.MALFORMED),
        ({"key": "\ud800"}, Reason.MALFORMED),
        ({"owner": b"short"}, Reason.MALFORMED),
        ({"version": 0, "claimed": 0}, Reason.MALFORMED),
        ({"claimed": 11}, Reason.MALFORMED),
        ({"version": 2**63 - 1}, None),
        ({"version": 2**63}, Reason.MALFORMED),
        ({"expiration": float("nan")}, Reason.MALFORMED),
        ({"expiration": float("inf")}, Reason.MALFORMED),
        ({"withdrawn": True}, Reason.MALFORMED),
        ({"withdrawn": True, "value": b""}, None),
        ({"expiration": NOW}, Reason.EXPIRED),
        ({"expiration": NOW + 3606}, None),
        ({"expiration": NOW + 3607}, Reason.TOO_FAR),
    ],
)
def test_the_reason_of_a_refusal(fields: dict[str, Any], reason: Reason | None) -> None:
    assert refusal_reason(record(**fields), NOW, LIMITS) is reason
    outcome = table().merge(record(**fields), NOW)
    assert (outcome.is_new, outcome.reason) == (reason is None, reason)


# What is signed


def test_other_peers_can_verify_an_author_s_signature() -> None:
    author = Author("run", Ed25519Identity(bytes(32)), LIMITS)
    written = author.write("run.0b", "a:1", b"value", NOW + 5, NOW, None)
    assert author.verify(written)
    assert Author("run", Ed25519Identity(), LIMITS).verify(written)
    assert not Author("another", Ed25519Identity(), LIMITS).verify(written)


@pytest.mark.parametrize(
    "change",
    [
        {"key": "run.0b1"},
        {"subkey": "a:2"},
        {"value": b"other"},
        {"version": MAX_VERSION},
        {"claimed": 1},
        {"expiration": NOW + 6},
        {"withdrawn": True, "value": b""},
        {"owner": Ed25519Identity(b"\1" * 32).owner},
        {"owner": b"\xff" * 32},
        {"signature": b""},
        {"signature": bytes(64)},
    ],
)
def test_a_changed_record_is_forged(change: dict[str, Any]) -> None:
    author = Author("run", Ed25519Identity(bytes(32)), LIMITS)
    forged = replace(author.write("run.0b", "a:1", b"value", NOW + 5, NOW, None), **change)
    assert RecordTable(LIMITS, author.verify).merge(forged, NOW).reason is Reason.FORGED


names = st.text(st.characters(codec="utf-8"), max_size=4)


@given(st.lists(st.tuples(names, names, names, st.binary(max_size=3)), min_size=2, max_size=2, unique=True))
def test_different_records_are_signed_as_different_bytes(fields: list[tuple[str, str, str, bytes]]) -> None:
    one, other = (signed_bytes(run, record(key=key, subkey=subkey, value=value)) for run, key, subkey, value in fields)
    assert one != other


@given(st.lists(st.tuples(names, names, st.sampled_from(OWNERS)), min_size=2, max_size=2, unique=True))
def test_different_places_have_different_ids(fields: list[tuple[str, str, bytes]]) -> None:
    assert record_id(*fields[0]) != record_id(*fields[1])


def test_versions_grow_although_the_clock_is_set_back() -> None:
    author = Author("run", UnsignedIdentity(random.Random(0)), LIMITS)
    first = author.write("k", "s", b"", NOW + 5, NOW, None)
    second = author.write("k", "s", b"", NOW + 5, NOW - 100, first)
    assert first.version == int(NOW * 1e6)
    assert second.version == first.version + 1
    assert first.claimed == second.claimed == first.version


def test_a_restarted_owner_continues_from_its_former_versions() -> None:
    identity = UnsignedIdentity(random.Random(0))
    before = Author("run", identity, LIMITS).write("k", "s", b"", NOW + 50, NOW + 40, None)
    again = Author("run", identity, LIMITS)
    again.observe(replace(before, owner=OWNERS[0], version=MAX_VERSION))  # of another owner
    again.observe(before)
    assert again.write("k", "other", b"", NOW + 50, NOW, None).version == before.version + 1


def test_a_withdrawal_outlives_the_record_by_all_clocks() -> None:
    author = Author("run", UnsignedIdentity(random.Random(0)), LIMITS)
    taken_back = author.withdraw(author.write("k", "s", b"x", NOW + 50, NOW, None), NOW + 1)
    assert taken_back.expiration == NOW + 53
    assert (taken_back.withdrawn, taken_back.value) == (True, b"")


# How tables merge


def test_a_full_table_refuses_new_records_and_accepts_updates() -> None:
    t = table(RecordLimits(records=2))
    for number in range(2):
        assert t.merge(record(subkey=f"{number}:1"), NOW).is_new
    assert t.merge(record(subkey="3:1", expiration=NOW + 100), NOW).reason is Reason.FULL
    assert t.merge(record(subkey="1:1", version=11), NOW).is_new
    t.expire(NOW + 10)
    assert t.merge(record(subkey="3:1", expiration=NOW + 100), NOW + 10).is_new


def test_comparing_tables_finds_what_each_lacks() -> None:
    here, there = table(), table()
    both, only_here, newer_here, newer_there = (record(subkey=f"{name}:1") for name in "abcd")
    for t in (here, there):
        for one in (both, newer_here, newer_there):
            t.merge(one, NOW)
    here.merge(only_here, NOW)
    here.merge(replace(newer_here, version=11), NOW)
    there.merge(replace(newer_there, version=11), NOW)
    lacking, wanted = here.compare(there.versions().items())
    assert {one.subkey for one in lacking} == {"b:1", "c:1"}
    assert [one.subkey for one in there.select([*wanted, 12345])] == ["d:1"]
    for one in lacking:
        there.merge(one, NOW)
    for one in there.select(wanted):
        here.merge(one, NOW)
    assert here.state_hash == there.state_hash != 0
    assert here.versions() == there.versions()


records = st.builds(
    lambda subkey, owner, version, claimed, life, withdrawn, value: Record(
        key="run.0b",
        subkey=subkey,
        value=b"" if withdrawn else value,
        version=version,
        claimed=min(claimed, version),
        expiration=NOW + life,
        withdrawn=withdrawn,
        owner=owner,
    ),
    st.sampled_from(["a:1", "b:1"]),
    st.sampled_from(OWNERS),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([b"", b"x", b"y"]),
)


def reference(delivered: list[Record], now: float) -> dict[tuple[str, str], Record]:
    """What is read, computed in the simplest way: (key, subkey) → record."""
    newest: dict[tuple[str, str, bytes], Record] = {}
    for one in sorted(delivered, key=lambda r: (r.version, r.withdrawn, r.value, r.expiration, r.claimed)):
        newest[one.key, one.subkey, one.owner] = one
    read: dict[tuple[str, str], Record] = {}
    for one in sorted(newest.values(), key=lambda r: (r.claimed, r.owner), reverse=True):
        if one.expiration > now and not one.withdrawn:
            read[one.key, one.subkey] = one
    return read


@given(st.lists(records, max_size=12), st.randoms(use_true_random=False), st.sampled_from([NOW, NOW + 2, NOW + 3]))
def test_any_order_of_delivery_gives_the_same_table(delivered: list[Record], rng: random.Random, then: float) -> None:
    tables = []
    for _ in range(2):
        t = table()
        again = delivered + rng.sample(delivered, len(delivered) // 2)
        rng.shuffle(again)
        for one in again:
            t.merge(one, NOW)
        t.expire(then)
        tables.append(t)
    assert tables[0].state_hash == tables[1].state_hash
    assert tables[0].versions() == tables[1].versions()
    expected = reference(delivered, then)
    for t in tables:
        assert {(one.key, one.subkey): one for one in t.list_records("")} == expected
        assert t.subkeys() == {subkey for _, subkey in expected}
        assert set(t.read("run.0b")) == t.subkeys()
        assert all(t.has_subkey(subkey) for subkey in t.subkeys())


@given(st.lists(records, max_size=12), st.lists(st.integers(0, 4), min_size=12, max_size=12))
def test_the_changes_add_up_to_what_is_read(delivered: list[Record], steps: list[int]) -> None:
    t, seen, now = table(), dict[tuple[str, str], Record](), NOW
    for one, step in zip(delivered, steps, strict=False):
        now += step / 4
        changes = [*t.expire(now), t.merge(one, now).change]
        for change in changes:
            if change is None:
                continue
            assert seen.get((change.key, change.subkey)) is not change.after
            seen.pop((change.key, change.subkey), None)
            if change.after is not None:
                seen[change.key, change.subkey] = change.after
        assert seen == {(one.key, one.subkey): one for one in t.list_records("")}
