"""A record of this peer's that is kept up to date in discovery for as long as it lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from averaging.discovery.base import Discovery
from averaging.errors import AveragingError

logger = logging.getLogger(__name__)


class PublishedRecord:
    """What this peer tells the others of its run under one key.

    Args:
        value: asked what to tell whenever it is stored; nothing while it returns None.
        lifetime: seconds for which one record holds, should this peer die.
        refresh: seconds after which it is stored again, changed or not.
        pause: seconds between two stores at least; changes that come faster are merged.
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
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """There is something new to tell."""
        self._changed.set()

    async def keep(self) -> None:
        """Once it is stored, stores it after each change and before it expires, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._refresh):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            await self.store()
            await asyncio.sleep(self._pause)

    async def store(self) -> None:
        """Stores it once."""
        value = self._value()
        if value is None:
            return
        try:
            await self._discovery.store(self._key, self._endpoint, value, self._clock() + self._lifetime)
        except AveragingError as error:
            logger.warning("could not tell the others %s: %s", self._key, error)
