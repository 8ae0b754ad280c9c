"""The thread that owns the ledger: each job is one transaction."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from averaging.errors import FeedBusyError, FeedError
from averaging.feed.book import Book
from averaging.feed.ledger import Ledger

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Store:
    """Runs jobs on a ledger, in the order in which they come. Use it as an async context manager.

    Args:
        open_ledger: called in the thread that will use the ledger.
    """

    def __init__(self, open_ledger: Callable[[], Ledger]) -> None:
        self._open = open_ledger
        self._thread = ThreadPoolExecutor(1, "the feed's store")

    async def __aenter__(self) -> Store:
        try:
            self._ledger = await asyncio.get_running_loop().run_in_executor(self._thread, self._open)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.submit(self._ledger.close)
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def book(self) -> Book:
        """The present state; another thread changes it, so that numbers may be of different moments."""
        return self._ledger.book

    async def run(self, work: Callable[[Ledger], T]) -> T:
        """What `work` returns, once what it did is committed.

        Raises:
            FeedError: `work` did.
            FeedBusyError: it could not be written; nothing was done.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._committed, work)

    def _committed(self, work: Callable[[Ledger], T]) -> T:
        try:
            self._ledger.begin()
            result = work(self._ledger)
            self._ledger.commit()
        except Exception as error:
            with suppress(sqlite3.Error):  # it is read again before the next transaction
                self._ledger.rollback(reload=not isinstance(error, FeedError))
            if isinstance(error, sqlite3.Error):
                logger.warning("the store cannot be written: %s; posts are refused until it can", error)
                told = f"the store cannot be written: {error}; nothing was kept, so send it again"
                raise FeedBusyError(503, told, 5.0) from None
            raise
        return result
