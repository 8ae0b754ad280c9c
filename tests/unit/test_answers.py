"""What is kept of the answers that the training thread asks for with every step."""

from __future__ import annotations

from contextlib import closing, nullcontext

from averaging.training.answers import MAX_ANSWERS, Answers
from averaging.training.background import EventLoopThread


def test_so_many_answers_are_kept_and_no_more() -> None:
    answers = Answers()
    with closing(EventLoopThread(nullcontext(), "the thread under test")) as thread:
        for number in range(2 * MAX_ANSWERS):
            assert answers.recent(thread, number, lambda answer=number: answer, wait=True) == number  # type: ignore[misc]
            assert len(answers._answers) <= MAX_ANSWERS
