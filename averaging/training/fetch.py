"""A download of the run's state while a peer trains."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from averaging.peer.peer import FetchedState
from averaging.training.signal_safe_future import SignalSafeFuture


class Fetch:
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
