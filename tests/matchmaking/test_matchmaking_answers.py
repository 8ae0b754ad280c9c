"""The history of the peers that were asked to lead."""

from __future__ import annotations

from averaging.matchmaking.conduct import (
    DESERTION_SECONDS,
    MAX_REMEMBERED,
    MAX_SECONDS,
    LeaderStanding,
    ResponseHistory,
)

KNOWN, SILENT, NEW = "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1"


def test_a_peer_that_does_not_answer_is_silent_until_it_does() -> None:
    history = ResponseHistory()
    assert history.standing(SILENT, 0.0) is LeaderStanding.GOOD
    for times in range(1, 4):
        history.note_silence(SILENT)
        assert history.standing(SILENT, 0.0) is LeaderStanding.SILENT
        assert history.unanswered(SILENT) == times
    history.note_answer(SILENT)
    assert history.standing(SILENT, 0.0) is LeaderStanding.GOOD
    assert (history.unanswered(SILENT), history.suspicion(SILENT)) == (0, 0)


def test_new_peers_are_uncertain_after_a_silent_one_until_another_new_one_answers() -> None:
    history = ResponseHistory()
    history.note_answer(KNOWN)
    history.note_silence(SILENT)
    history.note_silence(SILENT)
    assert history.standing(NEW, 0.0) is LeaderStanding.UNCERTAIN
    assert history.suspicion(NEW) == 1  # peers, not requests
    assert history.standing(KNOWN, 0.0) is LeaderStanding.GOOD
    history.note_answer(KNOWN)
    assert history.standing(NEW, 0.0) is LeaderStanding.UNCERTAIN, "a known peer says nothing about new ones"
    history.note_answer("192.0.2.4:1")
    assert history.standing(NEW, 0.0) is LeaderStanding.GOOD


def test_doubts_count_all_silent_peers_or_only_the_own_requests_of_one_that_answered_before() -> None:
    history = ResponseHistory()
    history.note_answer(KNOWN)
    for number in range(20):
        history.note_silence(f"192.0.2.9:{number + 1}")
    history.note_silence(KNOWN)
    assert (history.suspicion("192.0.2.9:1"), history.suspicion(KNOWN)) == (21, 1)


def test_a_deserter_is_remembered_longer_each_time_until_it_decides() -> None:
    history = ResponseHistory()
    history.note_desertion(SILENT, 0.0)
    assert history.standing(SILENT, DESERTION_SECONDS - 1) is LeaderStanding.DESERTER
    assert history.standing(SILENT, DESERTION_SECONDS) is LeaderStanding.GOOD
    history.note_desertion(SILENT, 0.0)
    assert history.standing(SILENT, 2 * DESERTION_SECONDS - 1) is LeaderStanding.REPEAT_DESERTER
    for _ in range(2000):
        history.note_desertion(SILENT, 0.0)
    assert history.standing(SILENT, MAX_SECONDS) is LeaderStanding.GOOD
    history.note_group(SILENT)
    assert history.standing(SILENT, 0.0) is LeaderStanding.GOOD


def test_many_new_names_neither_grow_the_tables_nor_flush_peers_that_answer() -> None:
    history = ResponseHistory()
    history.note_answer(KNOWN)
    for number in range(2 * MAX_REMEMBERED):
        history.note_silence(f"192.0.2.9:{number + 1}")
        history.note_desertion(f"192.0.2.9:{number + 1}", 0.0)
    assert history.standing(KNOWN, 0.0) is LeaderStanding.GOOD
    assert (len(history._answered), len(history._unanswered), len(history._deserted)) == (
        1,
        MAX_REMEMBERED,
        MAX_REMEMBERED,
    )


def test_a_peer_with_late_fruitless_answers_counts_as_a_deserter_until_it_begins_a_group() -> None:
    found = ResponseHistory()
    for _ in range(100):
        found.note_fruitless(KNOWN, 0.1, 0.0, disbanded=False)  # it refuses at once, as ordinary peers do
    assert (found.fruitless(KNOWN), found.standing(KNOWN, 0.0)) == (0, LeaderStanding.GOOD)
    for number in range(3):
        assert found.standing(SILENT, 0.0) is LeaderStanding.GOOD
        assert found.fruitless(SILENT) == number
        found.note_fruitless(SILENT, 0.0, 0.0, disbanded=True)
    assert found.standing(SILENT, 0.0) is LeaderStanding.DESERTER
    found.note_fruitless(SILENT, 5.0, 0.0, disbanded=True)
    assert found.standing(SILENT, 0.0) is LeaderStanding.REPEAT_DESERTER
    found.note_group(SILENT)
    assert (found.fruitless(SILENT), found.standing(SILENT, 0.0)) == (0, LeaderStanding.GOOD)
