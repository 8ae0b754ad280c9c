"""What is remembered of the peers that were asked to lead."""

from __future__ import annotations

from averaging.matchmaking.response_history import (
    FIRST_SECONDS,
    LAST_SECONDS,
    MAX_REMEMBERED,
    ResponseHistory,
    Standing,
)

KNOWN, SILENT, NEW = "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1"


def test_one_that_does_not_answer_is_silent_until_it_does() -> None:
    found = ResponseHistory()
    assert found.standing(SILENT, 0.0) is Standing.SOUND
    for times in range(1, 4):
        found.unanswered_by(SILENT)
        assert found.standing(SILENT, 0.0) is Standing.SILENT
        assert found.unanswered(SILENT) == times
    found.answered(SILENT)
    assert found.standing(SILENT, 0.0) is Standing.SOUND
    assert (found.unanswered(SILENT), found.doubts(SILENT)) == (0, 0)


def test_new_peers_are_doubted_after_one_that_did_not_answer_and_no_longer_after_one_that_did() -> None:
    found = ResponseHistory()
    found.answered(KNOWN)
    found.unanswered_by(SILENT)
    found.unanswered_by(SILENT)
    assert found.standing(NEW, 0.0) is Standing.DOUBTFUL
    assert found.doubts(NEW) == 1  # peers, not requests
    assert found.standing(KNOWN, 0.0) is Standing.SOUND
    found.answered(KNOWN)
    assert found.standing(NEW, 0.0) is Standing.DOUBTFUL, "of one that is known already nothing follows for new ones"
    found.answered("192.0.2.4:1")
    assert found.standing(NEW, 0.0) is Standing.SOUND


def test_silent_peers_are_doubted_together_and_one_that_answered_before_for_itself() -> None:
    found = ResponseHistory()
    found.answered(KNOWN)
    for number in range(20):
        found.unanswered_by(f"192.0.2.9:{number + 1}")
    found.unanswered_by(KNOWN)
    assert (found.doubts("192.0.2.9:1"), found.doubts(KNOWN)) == (21, 1)


def test_a_deserter_is_remembered_for_a_while_longer_each_time_and_until_it_leads() -> None:
    found = ResponseHistory()
    found.deserted_by(SILENT, 0.0)
    assert found.standing(SILENT, FIRST_SECONDS - 1) is Standing.DESERTER
    assert found.standing(SILENT, FIRST_SECONDS) is Standing.SOUND
    found.deserted_by(SILENT, 0.0)
    assert found.standing(SILENT, 2 * FIRST_SECONDS - 1) is Standing.NOTORIOUS
    for _ in range(2000):
        found.deserted_by(SILENT, 0.0)
    assert found.standing(SILENT, LAST_SECONDS) is Standing.SOUND
    found.led(SILENT)
    assert found.standing(SILENT, 0.0) is Standing.SOUND


def test_names_without_end_take_no_more_memory_and_not_the_places_of_those_that_answer() -> None:
    found = ResponseHistory()
    found.answered(KNOWN)
    for number in range(2 * MAX_REMEMBERED):
        found.unanswered_by(f"192.0.2.9:{number + 1}")
        found.deserted_by(f"192.0.2.9:{number + 1}", 0.0)
    assert found.standing(KNOWN, 0.0) is Standing.SOUND
    assert (len(found._answered), len(found._unanswered), len(found._deserted)) == (1, MAX_REMEMBERED, MAX_REMEMBERED)


def test_who_answers_late_and_in_vain_again_and_again_is_taken_for_a_deserter_until_it_leads() -> None:
    found = ResponseHistory()
    for _ in range(100):
        found.in_vain(KNOWN, 0.1, 0.0, disbanded=False)  # refuses at once, as others do
    assert (found.vain(KNOWN), found.standing(KNOWN, 0.0)) == (0, Standing.SOUND)
    for number in range(3):
        assert found.standing(SILENT, 0.0) is Standing.SOUND
        assert found.vain(SILENT) == number
        found.in_vain(SILENT, 0.0, 0.0, disbanded=True)
    assert found.standing(SILENT, 0.0) is Standing.DESERTER
    found.in_vain(SILENT, 5.0, 0.0, disbanded=True)
    assert found.standing(SILENT, 0.0) is Standing.NOTORIOUS
    found.led(SILENT)
    assert (found.vain(SILENT), found.standing(SILENT, 0.0)) == (0, Standing.SOUND)
