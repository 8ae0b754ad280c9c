"""What the training thread asks of a peer with every step: the last answer is kept, so that it need not wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from averaging.training.event_loop_thread import EventLoopThread, on_loop
from averaging.training.signal_safe_future import SignalSafeFuture

T = TypeVar("T")

MAX_ANSWERS = 64
"""Questions whose last answer is kept; topics have a new phase with every step."""

FRESH_SECONDS = 0.02
"""What discovery says is asked for again after so long; else each step of a small model would wait for that thread."""


class CachedQueries:
    """The last answers to what was asked of the peer's thread, by question."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, _Answer[Any]] = {}

    def recent(self, thread: EventLoopThread, what: Hashable, ask: Callable[[], T], *, wait: bool) -> T:
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
        kept: _Answer[T] | None = self._answers.get(what)
        if kept is None:
            kept = _Answer(now, thread.start(on_loop(ask)))
            if len(self._answers) >= MAX_ANSWERS:
                self._answers.clear()
            self._answers[what] = kept
        elif kept.coming.done():
            kept.latest = kept.coming
            if now - kept.asked_at >= FRESH_SECONDS:
                kept.asked_at, kept.coming = now, thread.start(on_loop(ask))
        if wait or kept.latest is None:
            kept.latest = kept.coming
        return thread.wait(kept.latest)

    def forget(self) -> None:
        """Everything is asked for anew."""
        self._answers.clear()


@dataclass(slots=True)
class _Answer(Generic[T]):
    """What the peer's thread has said last, and what it was asked since."""

    asked_at: float
    coming: SignalSafeFuture[T]
    latest: SignalSafeFuture[T] | None = None
