"""What a peer remembers of others: who was at fault again and again, and who answers when asked to lead."""

from __future__ import annotations

from averaging.matchmaking.memory import (
    DESERTION_SECONDS,
    EXCLUSION_SECONDS,
    MAX_EXCLUSION_SECONDS,
    MAX_REMEMBERED,
    Conduct,
)
from averaging.matchmaking.rules import LeaderStanding

PEER, OTHER = "192.0.2.1:1", "192.0.2.2:1"


def test_a_peer_is_excluded_after_two_faults_in_a_row_and_longer_each_further_time() -> None:
    conduct, now = Conduct(), 1e6
    conduct.note_fault(PEER, now)
    assert conduct.excluded(now) == {}
    for seconds in (EXCLUSION_SECONDS, 2 * EXCLUSION_SECONDS, 4 * EXCLUSION_SECONDS):
        conduct.note_fault(PEER, now)
        assert conduct.excluded(now) == {PEER: now + seconds}
        assert conduct.excluded(now + seconds) == {}
    for _ in range(2000):
        conduct.note_fault(PEER, now)
    assert conduct.excluded(now) == {PEER: now + MAX_EXCLUSION_SECONDS}
    conduct.note_well(PEER)
    conduct.note_fault(PEER, now)
    assert conduct.excluded(now) == {}


def test_a_peer_that_does_not_answer_is_silent_until_it_does() -> None:
    conduct = Conduct()
    for times in range(1, 4):
        conduct.note_silence(PEER)
        assert (conduct.standing(PEER, 0.0), conduct.unanswered(PEER)) == (LeaderStanding.SILENT, times)
    assert conduct.standing(OTHER, 0.0) is LeaderStanding.GOOD
    conduct.note_answer(PEER)
    assert (conduct.standing(PEER, 0.0), conduct.unanswered(PEER)) == (LeaderStanding.GOOD, 0)


def test_a_deserter_is_remembered_until_it_begins_a_group() -> None:
    conduct = Conduct()
    conduct.note_desertion(PEER, 5.0)
    assert conduct.standing(PEER, 5.0 + DESERTION_SECONDS - 1) is LeaderStanding.DESERTER
    assert conduct.standing(PEER, 5.0 + DESERTION_SECONDS) is LeaderStanding.GOOD
    conduct.note_group(PEER)
    assert conduct.standing(PEER, 5.0) is LeaderStanding.GOOD


def test_of_many_names_the_latest_are_remembered() -> None:
    conduct = Conduct()
    for number in range(2 * MAX_REMEMBERED):
        for _ in range(2):
            conduct.note_fault(f"client::{number}", 0.0)
        conduct.note_silence(f"client::{number}")
    assert set(conduct.excluded(0.0)) == {f"client::{number}" for number in range(MAX_REMEMBERED, 2 * MAX_REMEMBERED)}
    assert conduct.unanswered("client::0") == 0
