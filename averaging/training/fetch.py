"""A download of the run's state while a peer trains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from averaging.common import EventLoopThread, SignalSafeFuture, on_loop
from averaging.peer import FetchedState


class BackgroundDownload:
    """A download of the run's state while this peer trains.

    Attributes:
        donors: endpoints that are asked.
        began: when it began, see `Training.monotonic`.
        delivering: whether a donor has started to send a state that was accepted so far.
    """

    def __init__(self, donors: Sequence[str], began: float) -> None:
        self.donors, self.began = tuple(donors), began
        self.delivering = False
        self.result: SignalSafeFuture[FetchedState] = SignalSafeFuture()
        self.task: asyncio.Task[Any] | None = None  # used by the peer's thread only
        self.started = asyncio.Event()  # also used by the peer's thread only; set together with `delivering`

    def done(self) -> bool:
        """Whether it has ended, with or without a state."""
        return self.result.done()


# Caches what the training thread asks the peer's thread in every step, so that it need not wait.


T = TypeVar("T")

MAX_CACHED = 64
"""Cached queries. There are ever new ones, since the phase of a topic changes with every step."""

FRESH_SECONDS = 0.02
"""Age at which a result is queried again. Without a cache each step of a small model would wait for the thread."""


class CachedQueries:
    """The last results of queries in the peer's thread, by key."""

    def __init__(self) -> None:
        self._cached: dict[Hashable, _CachedQuery[Any]] = {}

    def recent(self, thread: EventLoopThread, key: Hashable, query: Callable[[], T], *, wait: bool) -> T:
        """Returns the result of `query` in the peer's thread; waits only if nothing is cached.

        Args:
            thread: the peer's thread.
            key: identifies the query; one key must always come with an equivalent query.
            query: called in `thread`.
            wait: whether to wait for a query in progress; if not, the result before that is returned.

        Raises:
            ClosedError: the thread was closed, or has failed.
        """
        now = time.monotonic()
        kept: _CachedQuery[T] | None = self._cached.get(key)
        if kept is None:
            kept = _CachedQuery(now, thread.start(on_loop(query)))
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            self._cached[key] = kept
        elif kept.pending.done():
            kept.latest = kept.pending
            if now - kept.asked_at >= FRESH_SECONDS:
                kept.asked_at, kept.pending = now, thread.start(on_loop(query))
        if wait or kept.latest is None:
            kept.latest = kept.pending
        return thread.wait(kept.latest)

    def clear(self) -> None:
        """Forgets all results, so that each is queried again."""
        self._cached.clear()


@dataclass(slots=True)
class _CachedQuery(Generic[T]):
    """The last result of a query, and its latest execution."""

    asked_at: float
    pending: SignalSafeFuture[T]
    latest: SignalSafeFuture[T] | None = None
