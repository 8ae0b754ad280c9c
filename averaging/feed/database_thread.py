"""The thread that uses the database. Each job in it is one transaction."""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from averaging.errors import FeedBusyError, FeedError
from averaging.feed.database import WRITE_RETRY_SECONDS, Database
from averaging.feed.run_state import RunState

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTACH_SECONDS, COMPLAIN_SECONDS = 1.0, 60.0
"""Least time between two attempts to write a detached state, and between two warnings that this is not possible."""


class DatabaseThread:
    """Runs jobs on a database one after the other. Use it as an async context manager.

    Args:
        open_database: called in the thread.
    """

    def __init__(self, open_database: Callable[[], Database]) -> None:
        self._open = open_database
        self._attempted = self._complained = -math.inf
        self._thread = ThreadPoolExecutor(1, "feed-database")

    async def __aenter__(self) -> DatabaseThread:
        try:
            self._database = await asyncio.get_running_loop().run_in_executor(self._thread, self._open)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.submit(self._close)
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def state(self) -> RunState:
        """The present state. Another thread changes it, so two values read from it can be of different moments."""
        return self._database.state

    async def run(self, job: Callable[[Database], T], *, drains: bool = False) -> T:
        """Runs `job` in a transaction. Returns its result after the commit.

        Args:
            job: changes the database only with its methods.
            drains: whether the result may be returned while the file cannot be written, and is written later. Not for
                jobs that post or reset.

        Raises:
            FeedError: `job` raised it.
            FeedBusyError: the file cannot be written; nothing was changed.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, job, drains)

    def _run(self, job: Callable[[Database], T], drains: bool) -> T:
        database = self._database
        try:
            if database.detached and not self._attach():
                return self._run_detached(job, drains)
            try:
                return self._transact(job)
            except sqlite3.Error as error:
                self._complain(f"the store cannot be written: {error}")
                if not drains:
                    raise
                database.detach()
                return job(database)
        except sqlite3.Error as error:
            message = f"the store cannot be written: {error}; nothing was changed, so send the same again"
            raise FeedBusyError(503, message, WRITE_RETRY_SECONDS) from None

    def _run_detached(self, job: Callable[[Database], T], drains: bool) -> T:
        if not drains:
            raise sqlite3.OperationalError("its disk is full, and batches are delivered from memory")
        return job(self._database)

    def _transact(self, job: Callable[[Database], T]) -> T:
        try:
            self._database.begin()
            result = job(self._database)
            self._database.commit()
        except Exception as error:
            with suppress(sqlite3.Error):  # the next transaction loads the state again
                self._database.rollback(reload=not isinstance(error, FeedError))
            if isinstance(error, FeedBusyError) and error.retry_after == WRITE_RETRY_SECONDS:
                self._complain(str(error))
            raise
        return result

    def _attach(self) -> bool:
        """Tries to write the state of a detached database, but not all the time. Returns whether it succeeded."""
        if time.monotonic() - self._attempted < ATTACH_SECONDS:
            return False
        self._attempted = time.monotonic()
        try:
            self._database.begin()
            self._database.write_state()
            self._database.commit()
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                self._database.rollback(reload=False)
            return False
        self._database.attach()
        logger.warning("the store can be written again, and holds everything")
        return True

    def _complain(self, error: str) -> None:
        """Says once a minute at most what all refused posts have in common."""
        if time.monotonic() - self._complained >= COMPLAIN_SECONDS:
            self._complained = time.monotonic()
            logger.warning("%s. Posts are answered with 503 meanwhile, and batches are delivered", error)

    def _close(self) -> None:
        self._attempted = -math.inf
        if self._database.detached and not self._attach():
            logger.warning("the store does not hold the last changes, because it cannot be written")
        self._database.close()
