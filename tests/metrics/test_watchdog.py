"""A loop that does not answer and an interpreter that stands still are noticed, counted and named in the log."""

import asyncio
import ctypes
import logging
import threading
import time

import pytest

from averaging.metrics import watchdog
from averaging.metrics.watchdog import LAG_WINDOW, LOGGED_STALL, LagRecord, WatchedLoop

STILL = 1.2
"""Seconds for which tests stand still."""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stalls are logged sooner."""
    monkeypatch.setattr(watchdog, "PERIOD", 0.05)
    monkeypatch.setattr(watchdog, "STALL", 0.5)
    monkeypatch.setattr(watchdog, "LOGGED_STALL", 0.5)


def test_the_lag_is_remembered_for_two_scrapes() -> None:
    record = LagRecord()
    record.ask(0.0)
    assert record.lag(2.0) == 2.0
    assert record.answer(3.0) is None  # it was not logged
    assert record.longest(3.0 + LAG_WINDOW) == 3.0
    assert record.longest(3.1 + LAG_WINDOW) == 0.0
    assert record.stalled == 3.0


def test_a_stall_is_logged_once_and_its_end() -> None:
    record = LagRecord()
    record.ask(0.0)
    assert not record.begins_to_stall(LOGGED_STALL - 0.1)
    assert record.begins_to_stall(LOGGED_STALL)
    assert not record.begins_to_stall(LOGGED_STALL + 1)
    assert record.answer(LOGGED_STALL + 2) == LOGGED_STALL + 2
    record.ask(20.0)
    assert record.begins_to_stall(20.0 + LOGGED_STALL)


def test_a_loop_is_not_blamed_for_the_interpreter() -> None:
    record = LagRecord()
    record.ask(0.0)
    record.excuse(60.0, 60.0)
    assert not record.begins_to_stall(60.0)
    assert record.longest(60.0) == 60.0  # it was late all the same
    assert record.answer(60.0) is None
    record.excuse(60.0, 130.0)  # also if it was not asked
    assert record.longest(130.0) == 60.0
    assert record.stalled == 120.0


async def answered(watched: WatchedLoop) -> None:
    """Waits until the watchdog has looked at the loop again."""
    async with asyncio.timeout(30):
        while watched.longest_lag < STILL / 2 or watched.lag:  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0.01)


async def test_a_blocked_loop_is_named_with_the_line_that_blocks(
    impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "averaging.metrics")
    with WatchedLoop("the peer of run 'demo'") as watched:
        await asyncio.sleep(0.1)
        time.sleep(STILL)  # noqa: ASYNC251 - that is the fault
        await answered(watched)
        assert watched.stalled >= STILL / 2
    begun = next(text for text in caplog.messages if "has not answered for" in text)
    assert "the event loop of the peer of run 'demo'" in begun
    assert "test_watchdog.py" in begun
    assert "in test_a_blocked_loop_is_named_with_the_line_that_blocks" in begun
    assert any("answers again, after" in text for text in caplog.messages)


def hold_the_gil(over: list[bool]) -> None:
    """Native code that keeps the GIL, until `over` has something."""
    while not over:  # a signal of an earlier test's process may interrupt it
        ctypes.PyDLL(None).sleep(2)


async def test_a_held_gil_is_named_and_counted(impatient: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "averaging.metrics")
    with WatchedLoop("the peer of run 'demo'") as watched:
        await asyncio.sleep(0.2)
        over: list[bool] = []
        holder = threading.Thread(target=hold_the_gil, args=(over,), name="the trainer")
        holder.start()
        async with asyncio.timeout(30):
            while watched.interpreter_stalled < 1:  # noqa: ASYNC110 - a thread changes it
                await asyncio.sleep(0.01)
        over.append(True)
        await asyncio.to_thread(holder.join)
    message = next(text for text in caplog.messages if "stood still" in text)
    assert "a thread kept the GIL" in message
    named = message.partition("dropped this one. ")[2]
    assert named.startswith("thread the trainer is at ")
    assert "test_watchdog.py" in named
    assert "in hold_the_gil" in named
