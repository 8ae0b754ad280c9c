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


class Differences:
    """Finds out in what others' schemas differ from `schema`."""

    def __init__(self, schema: Schema, transport: Transport, discovery: Discovery) -> None:
        self._schema, self._transport, self._discovery = schema, transport, discovery

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
