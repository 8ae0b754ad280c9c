"""A record of this peer that is kept up to date in discovery."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from averaging.discovery.base import Discovery
from averaging.errors import AveragingError

logger = logging.getLogger(__name__)


class PublishedRecord:
    """The record of this peer under one key.

    Args:
        value: returns the value to store; None if there is nothing to store now.
        lifetime: seconds until the record expires after this peer has died.
        refresh: seconds after which it is stored again, changed or not.
        pause: minimum seconds between two stores, except after an urgent change; faster changes are merged.
    """

    def __init__(
        self,
        discovery: Discovery,
        key: str,
        endpoint: str,
        value: Callable[[], bytes | None],
        *,
        lifetime: float,
        refresh: float,
        pause: float = 0.0,
        clock: Callable[[], float],
    ) -> None:
        self._discovery, self._key, self._endpoint = discovery, key, endpoint
        self._value, self._clock = value, clock
        self._lifetime, self._refresh, self._pause = lifetime, refresh, pause
        self._changed, self._urgent = asyncio.Event(), asyncio.Event()

    def changed(self, *, urgent: bool = False) -> None:
        """Has `keep` store the record again, because its value has changed; if urgent, without a pause."""
        self._changed.set()
        if urgent:
            self._urgent.set()

    async def keep(self) -> None:
        """Stores the record after each change and before it expires, until cancelled. Call `store` first."""
        while True:
            try:
                async with asyncio.timeout(self._refresh):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            self._urgent.clear()
            await self.store()
            if self._pause:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause):
                        await self._urgent.wait()

    async def store(self) -> None:
        """Stores the record once. A failure is logged only, since `keep` tries again."""
        value = self._value()
        if value is None:
            return
        try:
            await self._discovery.store(self._key, self._endpoint, value, self._clock() + self._lifetime)
        except AveragingError as error:
            logger.warning("could not store this peer's record under %s in discovery: %s", self._key, error)
