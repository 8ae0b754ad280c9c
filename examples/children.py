"""Ends all processes that an example or a benchmark has started, however it ends itself.

    @ending_children()
    def main():
        …  # starts processes, which may start others

Processes inherit a mark in their environment from the driver, also those that torchrun starts in sessions of their own.
When the driver ends, in whatever way, a guard kills every process that has the mark.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

MARKS = "DRIVERS_OF_THIS_PROCESS"
"""Variable with a mark for each driver above a process; not AVERAGING_…, which would be an option."""

PAUSE = 0.1
"""Seconds between two looks for processes. One that is being started has the mark only after its exec."""


GRACE = 10.0
"""Seconds that a process has to end by itself."""


ORDERLY = b"ended"
"""What a driver tells its guard; one that was killed tells nothing."""


@contextmanager
def ending_children() -> Iterator[None]:
    """Context or decorator of a driver. SIGTERM ends the block as Ctrl+C does, and the process with exit code 143."""
    mark, above = uuid.uuid4().hex, os.environ.get(MARKS, "")
    # -P: the folder of this file must not hide packages.
    guard = subprocess.Popen(
        [sys.executable, "-P", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl+C, or a kill of the driver's group, leaves it
    )
    os.environ[MARKS] = f"{above} {mark}"
    terminated = threading.Event()
    try:
        with _as_ctrl_c(signal.SIGTERM, terminated):
            yield
    finally:
        os.environ[MARKS] = above
        guard.communicate(ORDERLY)  # the guard ends what is left
        if terminated.is_set():
            sys.exit(128 + signal.SIGTERM)


@contextmanager
def _as_ctrl_c(number: signal.Signals, received: threading.Event) -> Iterator[None]:
    """Handles a signal as Ctrl+C, also where a shell has started the driver in the background, which ignores Ctrl+C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_: int, frame: FrameType | None) -> None:
        received.set()
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


def marked(mark: str) -> list[psutil.Process]:
    """The processes that have a mark, in the order in which they were started: a parent before its children."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if mark in process.environ().get(MARKS, "") and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.create_time(), process))
    return [process for _, process in sorted(found, key=lambda one: one[0])]


def guard(mark: str) -> None:
    """Waits for the end of the parent, and kills what has the mark until nothing has it any more."""
    parent = os.getppid()
    while not select.select([sys.stdin], [], [], 1.0)[0] and os.getppid() == parent:
        continue  # a fork of the parent may hold the pipe open
    gone = os.getppid() != parent or sys.stdin.buffer.read() != ORDERLY
    looks = 2 if gone else 1  # a parent that was killed may have been starting a process
    while looks:
        left = marked(mark)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        looks -= not left
        if looks:
            time.sleep(PAUSE)


async def end(process: asyncio.subprocess.Process) -> None:
    """Ends a process that ends when its input does, or kills it."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    guard(sys.argv[1])
