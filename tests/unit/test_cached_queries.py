"""What is kept of the answers that the training thread asks for with every step."""

from __future__ import annotations

from contextlib import closing, nullcontext

from averaging.training.cached_queries import MAX_ANSWERS, CachedQueries
from averaging.training.event_loop_thread import EventLoopThread


def test_so_many_answers_are_kept_and_no_more() -> None:
    answers = CachedQueries()
    with closing(EventLoopThread(nullcontext(), "the thread under test")) as thread:
        for number in range(2 * MAX_ANSWERS):
            assert answers.recent(thread, number, lambda answer=number: answer, wait=True) == number  # type: ignore[misc]
            assert len(answers._answers) <= MAX_ANSWERS
