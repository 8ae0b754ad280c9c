"""What the training thread asks of a peer with every step: the last answer is kept, so that it need not wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from averaging.training.event_loop_thread import EventLoopThread, on_loop
from averaging.training.signal_safe_future import SignalSafeFuture

T = TypeVar("T")

MAX_CACHED = 64
"""Questions whose last answer is kept; topics have a new phase with every step."""

FRESH_SECONDS = 0.02
"""What discovery says is asked for again after so long; else each step of a small model would wait for that thread."""


class CachedQueries:
    """The last answers to what was asked of the peer's thread, by question."""

    def __init__(self) -> None:
        self._cached: dict[Hashable, _CachedQuery[Any]] = {}

    def recent(self, thread: EventLoopThread, key: Hashable, query: Callable[[], T], *, wait: bool) -> T:
        """What `ask` returns in the peer's thread; asked again after a while, waited for at the first time.

        Args:
            thread: the peer's.
            what: the question: what is asked under the same name has the same answer.
            ask: called in `thread`.
            wait: for the answer to what was asked last; if not, the one before may be returned.

        Raises:
            ClosedError: the thread has been closed, or has failed.
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
        """Everything is asked for anew."""
        self._cached.clear()


@dataclass(slots=True)
class _CachedQuery(Generic[T]):
    """What the peer's thread has said last, and what it was asked since."""

    asked_at: float
    pending: SignalSafeFuture[T]
    latest: SignalSafeFuture[T] | None = None
