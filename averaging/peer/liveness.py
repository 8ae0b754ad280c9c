"""Finds expected peers whose process was killed, which leaves their records in discovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection

from averaging.common.addresses import CLIENT_PREFIX
from averaging.errors import AveragingError, PeerUnreachableError
from averaging.transport.base import Transport

FIRST_PAUSE, LAST_PAUSE = 0.2, 2.0
"""Seconds until an expected peer is called for the first time, doubled with each further call; and their maximum.
A peer that arrives in time is not called."""

MAX_CALLS = 16
"""Peers that are called at a time."""

CALL_TIMEOUT = 2.0
"""Seconds for which a call may take; a refused connection takes one round trip."""


async def find_gone(transport: Transport, missing: Callable[[], Collection[str]]) -> AsyncGenerator[str, None]:
    """Yields missing peers whose address refuses connections, until it is closed.

    Args:
        transport: transport of this peer.
        missing: called before each check for the peers that are expected but have not arrived.
    """
    pause = FIRST_PAUSE
    while True:
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)
        names = sorted(name for name in missing() if not name.startswith(CLIENT_PREFIX))[:MAX_CALLS]
        gone = await asyncio.gather(*(_is_refused(transport, name) for name in names))
        for name, refused in zip(names, gone, strict=True):
            if refused:
                yield name


async def _is_refused(transport: Transport, endpoint: str) -> bool:
    try:
        async with asyncio.timeout(CALL_TIMEOUT):
            await transport.get_schema(endpoint)
    except PeerUnreachableError as error:
        return error.refused
    except (TimeoutError, AveragingError):
        return False
    return False
