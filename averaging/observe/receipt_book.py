"""The receipts of one peer: the last ones are kept, all are written to a file if configured, and watchers get each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from averaging.errors import CallRefusedError
from averaging.observe.receipt_log import ReceiptLog
from averaging.observe.receipts import Receipt

HISTORY = 64
"""Receipts kept in memory for new watchers."""

QUEUE = 64
"""Receipts queued per watcher. The oldest ones of a full queue are skipped."""

MAX_WATCHERS = 64
"""Maximum number of watchers, because each costs memory."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A receipt as a watcher gets it.

    Attributes:
        skipped: number of receipts before this one that were skipped because the watcher was too slow.
    """

    receipt: Receipt
    skipped: int = 0


@dataclass(slots=True, eq=False)
class _Watcher:
    """The queue of one watcher."""

    queue: deque[Receipt]
    skipped: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, receipt: Receipt) -> None:
        if len(self.queue) >= QUEUE:
            self.queue.popleft()
            self.skipped += 1
        self.queue.append(receipt)
        self.changed.set()


class ReceiptBook:
    """Keeps and distributes the receipts of a peer.

    Args:
        endpoint: endpoint of the peer.
        log: file of receipts; None writes none.

    Attributes:
        last: receipt of the last round.
    """

    def __init__(self, endpoint: str, log: ReceiptLog | None = None) -> None:
        self.last: Receipt | None = None
        self._endpoint, self._log = endpoint, log
        self._history: deque[Receipt] = deque(maxlen=HISTORY)
        self._watchers: set[_Watcher] = set()
        self._closed = False

    def keep(self, receipt: Receipt) -> None:
        """Adds the receipt of a round that has just ended."""
        self.last = receipt
        self._history.append(receipt)
        if self._log is not None:
            self._log.append(receipt)
        for watcher in self._watchers:
            watcher.put(receipt)

    async def watch(self, last: int = 0) -> AsyncGenerator[Watched, None]:
        """Yields the `last` receipts, at most `HISTORY`, then each new one until the book is closed.

        Raises:
            CallRefusedError: there are too many watchers.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise CallRefusedError(self._endpoint, f"it has {MAX_WATCHERS} watchers already; try again later")
        watcher = _Watcher(deque([*self._history][max(0, len(self._history) - last) :]))
        self._watchers.add(watcher)
        try:
            while True:
                watcher.changed.clear()
                while watcher.queue:
                    receipt, skipped, watcher.skipped = watcher.queue.popleft(), watcher.skipped, 0
                    yield Watched(receipt, skipped)
                if self._closed:
                    return
                if not watcher.changed.is_set():
                    await watcher.changed.wait()
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """Closes the file. Watchers end when their queues are empty."""
        self._closed = True
        for watcher in self._watchers:
            watcher.changed.set()
        if self._log is not None:
            self._log.close()
