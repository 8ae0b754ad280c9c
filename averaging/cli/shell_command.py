"""Runs a shell command of the user for a limited time, and ends it with all its children."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

END_SECONDS = 5.0
"""Seconds that a command has to end after SIGTERM, before SIGKILL ends what is left of it."""


async def run_command(
    command: str, environment: Mapping[str, str], timeout: float, *, stdout: int | None = None
) -> int | None:
    """Runs a command in a session of its own, so that Ctrl+C on the terminal does not reach it.

    What it leaves in the background when it ends by itself goes on. If its time is over, or this is cancelled, all its
    processes are ended.

    Args:
        command: What the shell runs.
        environment: Added to the environment of this process.
        timeout: Seconds that it may take.
        stdout: Descriptor for its output; None for that of this process.

    Returns:
        Its exit code, which is negative if a signal ended it; None if its time was over.
    """
    process = await asyncio.create_subprocess_shell(
        command,
        env={**os.environ, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    # A cancellation meanwhile ends all of its session at once.
    try:
        _signal(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
    finally:
        _signal(process.pid, signal.SIGKILL)
        await process.wait()


def _signal(group: int, number: int) -> None:
    with suppress(OSError):  # all have ended
        os.killpg(group, number)
