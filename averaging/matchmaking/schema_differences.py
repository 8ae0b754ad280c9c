"""How the tensors of another peer differ, once it has answered that its schema hash is another."""

from __future__ import annotations

import asyncio
import logging

from averaging.discovery import Discovery
from averaging.errors import AveragingError
from averaging.matchmaking.search_state import NoGroupError
from averaging.tensors import Schema, first_difference
from averaging.timing import VERDICT_SECONDS
from averaging.transport import Transport

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 256
"""Warnings that are remembered, so that they are not repeated."""


class LoggedDifferences:
    """The differences that this peer has logged, in all topics: every search may find the same one again."""

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}  # the oldest first

    def add(self, difference: NoGroupError) -> bool:
        """Adds a difference; returns whether it is new."""
        text = str(difference)
        if text in self._texts:
            return False
        self._texts[text] = None
        if len(self._texts) > MAX_REMEMBERED:
            del self._texts[next(iter(self._texts))]
        return True


class SchemaDifferences:
    """Finds the differences between `schema` and those of other peers.

    Args:
        logged: the differences that have been logged, by all searches of this peer.
    """

    def __init__(self, schema: Schema, transport: Transport, discovery: Discovery, logged: LoggedDifferences) -> None:
        self._schema, self._transport, self._discovery = schema, transport, discovery
        self._logged = logged

    async def warn(self, endpoint: str, known: dict[str, NoGroupError | None]) -> None:
        """Logs what `find` returns, each difference once."""
        difference = await self.find(endpoint, known)
        logger.log(logging.WARNING if self._logged.add(difference) else logging.DEBUG, "%s", difference)

    async def find(self, endpoint: str, known: dict[str, NoGroupError | None]) -> NoGroupError:
        """Asks `endpoint` for its schema and returns the first difference; `known` caches it."""
        if found := known.get(endpoint):
            return found
        difference = "the shapes or names of its tensors differ, and it did not send its schema"
        try:
            if self._discovery.knows(endpoint):
                async with asyncio.timeout(VERDICT_SECONDS):
                    theirs = await self._transport.get_schema(endpoint)
                difference = first_difference(self._schema, theirs) or "a member of its group has other names for them"
        except (TimeoutError, AveragingError) as error:
            logger.debug("%s did not send its schema: %s", endpoint, error)
        found = known[endpoint] = NoGroupError(
            f"{endpoint} averages something else: {difference}; give both the same tensors and options"
        )
        return found
