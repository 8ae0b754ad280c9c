"""The cache of queries that the training thread makes in every step."""

from __future__ import annotations

from contextlib import closing, nullcontext

from averaging.common.event_loop_thread import EventLoopThread
from averaging.training.announcements import MAX_CACHED, CachedQueries


def test_so_many_answers_are_kept_and_no_more() -> None:
    queries = CachedQueries()
    with closing(EventLoopThread(nullcontext(), "the thread under test")) as thread:
        for number in range(2 * MAX_CACHED):
            assert queries.recent(thread, number, lambda answer=number: answer, wait=True) == number  # type: ignore[misc]
            assert len(queries._cached) <= MAX_CACHED
