"""Runs long computations in a thread, so that this peer still answers pings while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")

INLINE_BYTES = 128 << 20
"""Work on at most this many bytes runs on the event loop and blocks it for up to 0.1 s. With threads a round of 64 MiB
takes 6 to 16 % longer, one of 256 MiB 7 % less."""


def takes_long(nbytes: int) -> bool:
    """Whether work on `nbytes` bytes should run in a thread."""
    return nbytes > INLINE_BYTES


async def offload(action: Callable[[], T], nbytes: int) -> T:
    """Runs `action`, which processes `nbytes` bytes, in a thread if they are many."""
    return await in_thread(action) if takes_long(nbytes) else action()


async def in_thread(action: Callable[[], T], give_up: Callable[[], bool] = lambda: False) -> T:
    """Runs `action` in a thread. A thread cannot be cancelled, so a cancellation waits until `action` has returned.

    Args:
        action: the function to run, with the caller's gradient and inference modes.
        give_up: called on cancellation. If it returns True, `action` has no effect any more and need not start.
    """
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()  # these are per thread

    def with_modes() -> T:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            return action()

    running = asyncio.ensure_future(asyncio.to_thread(with_modes))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if give_up():
            running.cancel()
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        raise
