"""Notices an event loop that does not answer, and an interpreter that stands still.

A thread for each loop wakes four times a second, and sends it a callback:

- The callback runs late: the loop is busy, usually in a blocking call. The thread says in which one.
- The thread itself wakes late: no Python thread has run meanwhile, because native code kept the GIL, or because the
  process was stopped or got no processor. Nothing in the process can say so before it is over.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Self

logger = logging.getLogger("averaging.metrics")

PERIOD = 0.25  # seconds between two looks
STALL = 1.0  # seconds from which on a wait counts as a stall; less is a busy machine
LOGGED_STALL = 5.0  # seconds of a stall from which on it is logged
LAG_WINDOW = 30.0  # seconds for which the longest lag is remembered: two intervals of a usual Prometheus
MAX_THREADS = 4  # threads that are named after the interpreter stood still


class LagRecord:
    """How long an event loop took to answer. Pure: the caller passes the time of a monotonic clock.

    Attributes:
        stalled: seconds of all stalls of the loop so far.
    """

    def __init__(self) -> None:
        self.stalled = 0.0
        self._asked: float | None = None  # when it was asked, if it has not answered yet
        self._recent: deque[tuple[float, float]] = deque()  # (time, lag) of the answers in the window
        self._logged = False

    def ask(self, now: float) -> bool:
        """Whether a callback is to be sent to the loop: it has answered the one before."""
        if self._asked is not None:
            return False
        self._asked = now
        return True

    def answer(self, now: float) -> float | None:
        """The callback runs. Returns how long the loop stood still, if that was logged when it began."""
        if self._asked is None:
            return None
        lag, was_logged = self.lag(now), self._logged
        self._late(lag, now)
        self._asked, self._logged = None, False
        return lag if was_logged else None

    def excuse(self, seconds: float, now: float) -> None:
        """The interpreter stood still, which is logged itself: the loop is not blamed, but asked as of now."""
        self._late(seconds, now)
        self._asked = None if self._asked is None else now

    def _late(self, seconds: float, now: float) -> None:
        self._recent.append((now, seconds))
        self.longest(now)  # forgets the old ones
        self.stalled += seconds if seconds >= STALL else 0.0

    def begins_to_stall(self, now: float) -> bool:
        """Whether the loop does not answer for so long that it is to be logged now."""
        begins = not self._logged and self.lag(now) >= LOGGED_STALL
        self._logged |= begins
        return begins

    def lag(self, now: float) -> float:
        """Seconds for which the loop has not answered; 0 if it has."""
        return 0.0 if self._asked is None else now - self._asked

    def longest(self, now: float) -> float:
        """The longest lag in the window, that of an open question included."""
        while self._recent and now - self._recent[0][0] > LAG_WINDOW:
            self._recent.popleft()
        return max([lag for _, lag in tuple(self._recent)] + [self.lag(now)])


class WatchedLoop:
    """Watches the running event loop while it is entered. Any thread may read it.

    Args:
        name: what runs in the loop, for the log, such as `the peer 10.0.0.1:4222`.

    Attributes:
        interpreter_stalled: seconds of all times above 1 s in which no Python thread ran.
    """

    def __init__(self, name: str) -> None:
        self._name, self.interpreter_stalled = name, 0.0
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._record = LagRecord()
        self._lock = threading.Lock()  # held by the loop's thread and the one that watches only, for a moment
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="averaging watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()  # it never waits for the loop

    @property
    def lag(self) -> float:
        return self._record.lag(time.monotonic())

    @property
    def longest_lag(self) -> float:
        with self._lock:
            return self._record.longest(time.monotonic())

    @property
    def stalled(self) -> float:
        """Seconds of all its stalls above 1 s, those of the whole interpreter included."""
        return self._record.stalled

    def _watch(self) -> None:
        slept, busy = time.monotonic(), time.process_time()
        while not self._ended.wait(PERIOD):
            now, used = time.monotonic(), time.process_time()
            late = now - slept - PERIOD
            if late >= STALL:
                self._stood_still(late, used - busy)
            self._look(now, late if late >= STALL else 0.0)
            slept, busy = time.monotonic(), time.process_time()

    def _look(self, now: float, excused: float) -> None:
        """Asks the loop, or logs that it does not answer."""
        with self._lock:
            if excused:
                self._record.excuse(excused, now)
            begins, asks = self._record.begins_to_stall(now), self._record.ask(now)
        if begins:
            where = place_of(sys._current_frames().get(self._loop_thread))
            logger.warning(
                "the event loop of %s has not answered for %.1f s: it is at %s. Other peers may drop this one "
                "meanwhile; call what blocks in a thread",
                *(self._name, self.lag, where),
            )
        if asks:
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        with self._lock:
            stood = self._record.answer(time.monotonic())
        if stood is not None:
            logger.warning("the event loop of %s answers again, after %.1f s", self._name, stood)

    def _stood_still(self, seconds: float, processor: float) -> None:
        if seconds >= LOGGED_STALL:
            logger.warning(
                "this process stood still for %.1f s (%.1f s of processor time): a thread kept the GIL, or the process "
                "was stopped or got no processor. Other peers may have dropped this one. %s. Native code that takes "
                "long must release the GIL",
                *(seconds, processor, _threads()),
            )
        self.interpreter_stalled += seconds


def _threads() -> str:
    """Where the threads are. The one that kept the GIL has just gone on, so it is near the line that is named.

    Threads that wait in Python's own library come last, since those release the GIL, and of them the main thread first,
    which trains mostly.
    """
    frames = sys._current_frames()
    threads = [each for each in threading.enumerate() if each.ident != threading.get_ident() and each.ident in frames]
    threads.sort(key=lambda each: (_is_library(frames[each.ident or 0]), each is not threading.main_thread()))
    places = [f"thread {each.name} is at {place_of(frames[each.ident or 0])}" for each in threads]
    more = [f"{len(places) - MAX_THREADS} more threads"] if len(places) > MAX_THREADS else []
    return "; ".join(places[:MAX_THREADS] + more)


_LIBRARY, _PACKAGES = str(Path(threading.__file__).parent), "site-packages"


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(("<frozen", _LIBRARY)) and _PACKAGES not in file


def place_of(frame: FrameType | None) -> str:
    """The line that a thread executes, and the function, outside of Python's own library: `train.py:31 in forward`."""
    outer = frame
    while outer is not None and _is_library(outer):
        outer = outer.f_back
    frame = outer or frame
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "no known line"
