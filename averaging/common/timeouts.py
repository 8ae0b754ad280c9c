"""Ends the body of a timeout before its time."""

from __future__ import annotations

import asyncio


def expire(limit: asyncio.Timeout) -> None:
    """Ends the body of `limit` with a `TimeoutError` now. A body that has ended, or is ending so, is left as it is."""
    try:
        limit.reschedule(asyncio.get_running_loop().time())
    except RuntimeError:  # several observers may find a reason at the same moment
        return
