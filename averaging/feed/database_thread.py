"""The thread that uses the database. Each job in it is one transaction."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from averaging.errors import FeedBusyError, FeedError
from averaging.feed.database import Database
from averaging.feed.run_state import RunState

logger = logging.getLogger(__name__)

T = TypeVar("T")

WRITE_RETRY_SECONDS = 5.0
"""`Retry-After` while the file cannot be written."""


class DatabaseThread:
    """Runs jobs on a database one after the other. Use it as an async context manager.

    Args:
        open_database: called in the thread.
    """

    def __init__(self, open_database: Callable[[], Database]) -> None:
        self._open = open_database
        self._thread = ThreadPoolExecutor(1, "feed-database")

    async def __aenter__(self) -> DatabaseThread:
        try:
            self._database = await asyncio.get_running_loop().run_in_executor(self._thread, self._open)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.submit(self._database.close)
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def state(self) -> RunState:
        """The present state. Another thread changes it, so two values read from it can be of different moments."""
        return self._database.state

    async def run(self, job: Callable[[Database], T]) -> T:
        """Runs `job` in a transaction. Returns its result after the commit.

        Raises:
            FeedError: `job` raised it.
            FeedBusyError: the file cannot be written; nothing was changed.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, job)

    def _run(self, job: Callable[[Database], T]) -> T:
        try:
            self._database.begin()
            result = job(self._database)
            self._database.commit()
        except Exception as error:
            with suppress(sqlite3.Error):  # the next transaction loads the state again
                self._database.rollback(reload=not isinstance(error, FeedError))
            if isinstance(error, sqlite3.Error):
                logger.warning("the store cannot be written: %s; the server answers 503 until it can", error)
                message = f"the store cannot be written: {error}; nothing was changed, so send the same again"
                raise FeedBusyError(503, message, WRITE_RETRY_SECONDS) from None
            raise
        return result
