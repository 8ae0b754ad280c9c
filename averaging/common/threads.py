"""What would stop the event loop for long is done in a thread: meanwhile others ask this peer whether it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")

INLINE_BYTES = 128 << 20
"""What goes through no more than this is done on the event loop: it takes a tenth of a second at most. With threads a
round of 64 MiB takes 6 to 16 % longer, one of 256 MiB 7 % less."""


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
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()  # a thread has modes of its own

    def as_here() -> T:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            return action()

    running = asyncio.ensure_future(asyncio.to_thread(as_here))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if give_up():
            running.cancel()
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        raise
