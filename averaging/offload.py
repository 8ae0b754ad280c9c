"""What would stop the event loop for long is done in a thread: meanwhile others ask this peer whether it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES = 16 << 20
"""What goes through no more than this is done on the event loop: a pass over so much, as for a copy or a digest, takes
some ten milliseconds."""


def takes_long(nbytes: int) -> bool:
    """Whether to go through so many bytes would stop the event loop for long."""
    return nbytes > INLINE_BYTES


async def offload(action: Callable[[], T], nbytes: int) -> T:
    """What `action` returns, which goes through so many bytes; in a thread if they are many."""
    return await in_thread(action) if takes_long(nbytes) else action()


async def in_thread(action: Callable[[], T], give_up: Callable[[], bool] = lambda: False) -> T:
    """What `action` returns, in a thread. A thread cannot be cancelled, so a cancellation waits for its end.

    Args:
        action: what to do.
        give_up: asked by a cancellation whether `action` will do nothing any more, so that it may as well not begin.
    """
    running = asyncio.ensure_future(asyncio.to_thread(action))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if give_up():
            running.cancel()
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        raise
