"""When a peer warns of others whose greater history it refuses."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from averaging.strategies.catch_up import REFUSED_SECONDS, CatchUp
from averaging.training import History, Origin, Others

OWN = History(step=15, lineage="aa", origin=Origin(id="one"))
AHEAD, STRANGE = replace(OWN, step=17), History(step=99, lineage="bb", origin=Origin(id="other"))


def refusing(**histories: History) -> Others:
    return Others((), 0.0, 0.0, {}, histories)


def test_a_step_that_is_refused_for_a_moment_only_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The members of a round announce their step one after another."""
    downloads = CatchUp()
    with caplog.at_level(logging.WARNING):
        for now in range(20):
            downloads.note_refused(OWN, refusing(a=AHEAD) if now % 4 else refusing(), float(now))
    assert caplog.text == ""


def test_a_step_that_stays_refused_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    downloads = CatchUp()
    with caplog.at_level(logging.WARNING):
        for now in range(20):
            downloads.note_refused(OWN, refusing(a=replace(AHEAD, step=17 + now)), float(now))
            assert bool(caplog.records) is (now >= REFUSED_SECONDS)
    assert len(caplog.records) == 1
    assert "the history of a, which is said to be at step 22 of this run: this peer stays at its own" in caplog.text


def test_another_run_is_warned_of_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        CatchUp().note_refused(OWN, refusing(a=STRANGE), 0.0)
    assert "at step 99 of a run with another origin" in caplog.text
