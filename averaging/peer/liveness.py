"""Whether those whom a round waits for are still there: a killed process withdraws nothing that it announced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection

from averaging.common.addresses import CLIENT_PREFIX
from averaging.errors import AveragingError, PeerUnreachableError
from averaging.transport.base import Transport

FIRST_PAUSE, LAST_PAUSE = 0.2, 2.0
"""Seconds until somebody who is waited for is called for the first time, doubled with each further call; and the most.
A peer that comes in time is not called at all."""

MOST_CALLED = 16
"""So many are called at a time."""

PATIENCE = 2.0
"""Seconds after which a call is given up; a connection that is refused takes no longer than the way there and back."""


async def find_gone(transport: Transport, missing: Callable[[], Collection[str]]) -> AsyncGenerator[str, None]:
    """Yields each of those who are missing at whose address nothing listens, for as long as it is read.

    Args:
        transport: this peer's.
        missing: asked before each look who is waited for and has not come.
    """
    pause = FIRST_PAUSE
    while True:
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)
        called = sorted(name for name in missing() if not name.startswith(CLIENT_PREFIX))[:MOST_CALLED]
        gone = await asyncio.gather(*(_is_refused(transport, name) for name in called))
        for name in (name for name, refused in zip(called, gone, strict=True) if refused):
            yield name


async def _is_refused(transport: Transport, endpoint: str) -> bool:
    try:
        async with asyncio.timeout(PATIENCE):
            await transport.get_schema(endpoint)
    except PeerUnreachableError as error:
        return error.refused
    except (TimeoutError, AveragingError):
        return False
    return False
