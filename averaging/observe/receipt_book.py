"""The receipts of one peer: the last ones are kept, all are written down if wanted, and who watches gets each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from averaging.errors import CallRefusedError
from averaging.observe.receipt_log import ReceiptLog
from averaging.observe.receipts import Receipt

HISTORY = 64
"""Receipts that are kept in memory, for those who begin to watch."""

QUEUE = 64
"""Receipts that wait for one watcher; if more come, the oldest of them are skipped."""

MAX_WATCHERS = 64
"""More are refused: each of them costs memory."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A receipt, as a watcher gets it.

    Attributes:
        skipped: how many receipts before this one the watcher has missed, because it was too slow.
    """

    receipt: Receipt
    skipped: int = 0


@dataclass(slots=True, eq=False)
class _Watcher:
    """What waits for one watcher."""

    waiting: deque[Receipt]
    skipped: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, receipt: Receipt) -> None:
        if len(self.waiting) >= QUEUE:
            self.waiting.popleft()
            self.skipped += 1
        self.waiting.append(receipt)
        self.news.set()


class ReceiptBook:
    """Where the receipts of a peer go.

    Args:
        endpoint: the peer.
        journal: where they are written down; None = nowhere.

    Attributes:
        last: the receipt of the last attempt.
    """

    def __init__(self, endpoint: str, journal: ReceiptLog | None = None) -> None:
        self.last: Receipt | None = None
        self._endpoint, self._journal = endpoint, journal
        self._history: deque[Receipt] = deque(maxlen=HISTORY)
        self._watchers: set[_Watcher] = set()
        self._closed = False

    def keep(self, receipt: Receipt) -> None:
        """Takes the receipt of an attempt that has just ended."""
        self.last = receipt
        self._history.append(receipt)
        if self._journal is not None:
            self._journal.append(receipt)
        for watcher in self._watchers:
            watcher.put(receipt)

    async def watch(self, last: int = 0) -> AsyncGenerator[Watched, None]:
        """Yields the last receipts, at most `HISTORY`, and then each one as it comes, until the book is closed.

        Raises:
            CallRefusedError: too many watch already.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise CallRefusedError(self._endpoint, f"{MAX_WATCHERS} watch its rounds already; try again later")
        watcher = _Watcher(deque([*self._history][max(0, len(self._history) - last) :]))
        self._watchers.add(watcher)
        try:
            while True:
                watcher.news.clear()
                while watcher.waiting:
                    receipt, skipped, watcher.skipped = watcher.waiting.popleft(), watcher.skipped, 0
                    yield Watched(receipt, skipped)
                if self._closed:
                    return
                if not watcher.news.is_set():
                    await watcher.news.wait()
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """Closes the file, and ends all watching once what waits has been taken."""
        self._closed = True
        for watcher in self._watchers:
            watcher.news.set()
        if self._journal is not None:
            self._journal.close()
