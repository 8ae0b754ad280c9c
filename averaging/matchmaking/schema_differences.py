"""In what the tensors of another peer differ, once it has answered that they do."""

from __future__ import annotations

import asyncio
import logging

from averaging.deadlines.learned_deadlines import VERDICT_SECONDS
from averaging.discovery.base import Discovery
from averaging.errors import AveragingError, SchemaMismatchError
from averaging.protocol.schema import Schema, first_difference
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)

MAX_WARNED = 256
"""Differences that are remembered as warned of."""


class Warned:
    """The differences that were warned of, in all topics: a peer with other tensors may be met in every search."""

    def __init__(self) -> None:
        self._words: dict[str, None] = {}  # the oldest first

    def add(self, difference: SchemaMismatchError) -> bool:
        """Adds a difference; returns whether it is new."""
        words = str(difference)
        if words in self._words:
            return False
        self._words[words] = None
        if len(self._words) > MAX_WARNED:
            del self._words[next(iter(self._words))]
        return True


class SchemaDifferences:
    """Finds out in what others' schemas differ from `schema`.

    Args:
        warned: of what all searches of this peer have warned.
    """

    def __init__(self, schema: Schema, transport: Transport, discovery: Discovery, warned: Warned) -> None:
        self._schema, self._transport, self._discovery = schema, transport, discovery
        self._warned = warned

    async def warn(self, endpoint: str, known: dict[str, SchemaMismatchError | None]) -> None:
        """Warns of what `of` finds, once."""
        difference = await self.of(endpoint, known)
        logger.log(logging.WARNING if self._warned.add(difference) else logging.DEBUG, "%s", difference)

    async def of(self, endpoint: str, known: dict[str, SchemaMismatchError | None]) -> SchemaMismatchError:
        """Asks `endpoint`, unless that is among `known` already, where it is kept."""
        if found := known.get(endpoint):
            return found
        difference = "its schema hash is another, and it does not tell its schema"
        try:
            if self._discovery.names(endpoint):
                async with asyncio.timeout(VERDICT_SECONDS):
                    theirs = await self._transport.get_schema(endpoint)
                difference = first_difference(self._schema, theirs) or "its schema is the same but its hash is not"
        except (TimeoutError, AveragingError) as error:
            logger.debug("%s does not tell its schema: %s", endpoint, error)
        found = known[endpoint] = SchemaMismatchError(endpoint, difference)
        return found
