"""Why no group was found: four causes, each with the peers concerned and the remedy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from averaging.discovery.base import Diagnosis, KnownPeer
from averaging.matchmaking.rules import pack_looking
from averaging.matchmaking.search_state import explain_absence, explain_faults

KEY = "run.0b"
SINCE = 1_700_000_000.0
IDLE = KnownPeer(SINCE, {"run.peers": b""})
TRAINS = KnownPeer(SINCE + 60, {"run.peers": b"", "run.progress": b"3"})
ENDED = KnownPeer(SINCE, {"run.peers": b"", KEY: pack_looking(False)})
ELSEWHERE = KnownPeer(SINCE, {"run.peers": b"", "run/x.0b": pack_looking(True), "run/y.0b": pack_looking(False)})


def test_no_other_peer_is_in_the_run() -> None:
    assert explain_absence(KEY, Diagnosis({})) == "no other peer is in the run: start more peers of it, or wait longer"
    text = explain_absence(KEY, Diagnosis({}, isolation="this peer was given no join"))
    assert text.endswith("or wait longer (this peer was given no join)")


def test_other_peers_are_not_ready() -> None:
    peers = {"a:1": IDLE, "b:1": TRAINS, "c:1": ENDED, "d:1": ELSEWHERE}
    assert explain_absence(KEY, Diagnosis(peers, isolation="this peer was given no join")) == (
        "4 other peers in the run, none of them ready for a group under run.0b: "
        "a:1 (in the run since 2023-11-14 22:13:20 UTC, does not look for a group), "
        "b:1 (in the run since 2023-11-14 22:14:20 UTC, trains, and does not look for a group), "
        "c:1 (in the run since 2023-11-14 22:13:20 UTC, has ended its search), "
        "d:1 (in the run since 2023-11-14 22:13:20 UTC, looks for a group under run/x.0b); "
        "let all average at about the same time and with the same options, or wait longer"
    )


def test_other_peers_do_not_answer() -> None:
    diagnosis = Diagnosis({"a:1": IDLE}, silent={"a:1": "connection refused", "b:1": "no answer"})
    assert explain_absence(KEY, diagnosis) == (
        "2 peers did not answer: a:1 (connection refused), b:1 (no answer); check that they are up and that this "
        "machine reaches their addresses"
    )
    assert explain_faults(diagnosis, known_silent={"a:1", "b:1"}) == []


def test_clocks_differ_too_much() -> None:
    diagnosis = Diagnosis({"a:1": IDLE}, clock_offsets={"a:1": 40.3, "b:1": -3.46})
    assert explain_absence(KEY, diagnosis) == (
        "clocks are more than 3 s apart: that of a:1 is 40 s ahead of this peer's, that of b:1 is 3.5 s behind this "
        "peer's; set them, for example with NTP"
    )


def test_several_causes_are_listed_in_order() -> None:
    text = explain_absence(
        KEY, Diagnosis({"a:1": IDLE, "b:1": IDLE, "c:1": IDLE}, silent={"b:1": "no answer"}, clock_offsets={"c:1": 9.0})
    )
    clocks, silence, idle = (text.index(name) for name in ("that of c:1", "b:1 (no answer)", "a:1 (in the run"))
    assert clocks < silence < idle
    assert "1 other peer in the run, none" in text


@given(st.dictionaries(st.text(), st.tuples(st.floats(), st.dictionaries(st.text(), st.binary())), max_size=30))
def test_any_stored_values_can_be_explained(stored: dict[str, tuple[float, dict[str, bytes]]]) -> None:
    assert explain_absence(KEY, Diagnosis({name: KnownPeer(*one) for name, one in stored.items()}))
