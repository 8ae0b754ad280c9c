"""What a peer averages that answered that it averages something else."""

from __future__ import annotations

import asyncio
import logging

from averaging.deadlines.learned import VERDICT_SECONDS
from averaging.discovery.base import Discovery
from averaging.errors import AveragingError, SchemaMismatchError
from averaging.schema import Schema, first_difference
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)

MAX_TOLD = 256
"""Differences of which it is remembered that they were told."""


class Told:
    """What was warned of already, in all topics: a peer that stays as it is is met in every search, for weeks maybe."""

    def __init__(self) -> None:
        self._words: dict[str, None] = {}  # the oldest first

    def is_new(self, difference: SchemaMismatchError) -> bool:
        """Whether it has not been told; from now on it has."""
        words = str(difference)
        if words in self._words:
            return False
        self._words[words] = None
        if len(self._words) > MAX_TOLD:
            del self._words[next(iter(self._words))]
        return True


class Differences:
    """Finds out in what others' schemas differ from `schema`.

    Args:
        told: what all searches of this peer have told.
    """

    def __init__(self, schema: Schema, transport: Transport, discovery: Discovery, told: Told) -> None:
        self._schema, self._transport, self._discovery = schema, transport, discovery
        self._told = told

    async def warn(self, endpoint: str, known: dict[str, SchemaMismatchError | None]) -> None:
        """Tells in the log what `of` finds, once."""
        difference = await self.of(endpoint, known)
        logger.log(logging.WARNING if self._told.is_new(difference) else logging.DEBUG, "%s", difference)

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
