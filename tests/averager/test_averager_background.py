"""The thread in which a peer runs: its results, and that no caller waits forever however it ends."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

import pytest

from averaging.common.event_loop_thread import EventLoopThread
from averaging.errors import ClosedError

NAME = "the thread under test"


class Room:
    """A context that records what happens to it, and whose TaskGroup can be made to fail."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.fail = asyncio.Event()

    @asynccontextmanager
    async def context(self) -> AsyncGenerator[None, None]:
        async with asyncio.TaskGroup() as tasks:
            failing = tasks.create_task(self._fail_when_told())
            self.happened.append("entered")
            try:
                yield
            finally:
                self.happened.append("left")
                failing.cancel()

    async def _fail_when_told(self) -> None:
        await self.fail.wait()
        raise RuntimeError("the ceiling came down")


def living_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == NAME]


async def wait_for_ever(started: threading.Event, happened: list[str]) -> None:
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        happened.append("cancelled")


def when(event: threading.Event, action: Callable[[], object]) -> threading.Thread:
    def wait_and_act() -> None:
        assert event.wait(30)
        action()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def test_closing_ends_the_calls_that_nobody_waits_for() -> None:
    thread, happened, count = EventLoopThread(Room().context(), NAME), list[str](), 8
    events = [threading.Event() for _ in range(count)]
    calls = [thread.start(wait_for_ever(started, happened)) for started in events]
    for started in events:
        assert started.wait(30)
    assert not any(call.done() for call in calls)
    thread.close()
    assert happened == ["cancelled"] * count
    assert all(call.done() for call in calls)
    for call in calls:
        with pytest.raises(ClosedError, match="has been closed"):
            thread.wait(call)


def test_a_failing_context_ends_the_call_in_progress_and_every_later_one(caplog: pytest.LogCaptureFixture) -> None:
    room, started = Room(), threading.Event()
    thread = EventLoopThread(room.context(), NAME)
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.ERROR):
        waiting = pool.submit(thread.run, wait_for_ever(started, room.happened))
        assert started.wait(30)

        async def bring_it_down() -> None:
            room.fail.set()
            await asyncio.Event().wait()

        with pytest.raises(ClosedError, match="ended after RuntimeError.'the ceiling came down'.") as caught:
            thread.run(bring_it_down())
        assert isinstance(caught.value.__cause__, ExceptionGroup)
        with pytest.raises(ClosedError, match="the ceiling came down"):
            waiting.result(30)
    with pytest.raises(ClosedError, match="the ceiling came down"):
        thread.run(asyncio.sleep(0))
    with pytest.raises(ClosedError, match="the ceiling came down"):
        thread.check()
    assert [record.getMessage() for record in caplog.records] == [f"{NAME} has ended after an error"]
    assert "the ceiling came down" in caplog.text  # with the traceback
    assert room.happened == ["entered", "cancelled", "left"]
    thread.close()
    assert not living_threads()


def test_an_interrupt_cancels_the_call_and_waits_for_its_end() -> None:
    room, started = Room(), threading.Event()
    thread = EventLoopThread(room.context(), NAME)
    interrupter = when(started, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        thread.run(wait_for_ever(started, room.happened))
    interrupter.join()
    assert room.happened == ["entered", "cancelled"]
    assert thread.run(asyncio.sleep(0, "still there")) == "still there"
    thread.close()


def test_an_interrupt_between_any_two_instructions_is_raised_and_harms_nothing() -> None:
    """As Ctrl+C may: an exception must neither be lost nor leave a lock held."""
    thread = EventLoopThread(Room().context(), NAME)
    interrupted = instruction = 0
    while interrupted == instruction:
        instruction += 1
        coroutine = asyncio.sleep(0, "done")
        try:
            with raising_at(instruction):
                assert thread.run(coroutine) == "done"
        except KeyboardInterrupt:
            interrupted += 1
        coroutine.close()  # it may not even have got there
        assert thread.run(asyncio.sleep(0, "still there")) == "still there"
    assert interrupted > 100  # then it was through
    thread.close()


@contextmanager
def raising_at(number: int) -> Iterator[None]:
    """Raises a KeyboardInterrupt in this thread before that Python instruction of the calls in the block."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal seen
        frame.f_trace_opcodes = True
        seen += event == "opcode"
        if seen == number:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_calls_from_many_threads_while_it_closes_all_end() -> None:
    thread = EventLoopThread(Room().context(), NAME)
    first = threading.Event()

    def call_until_closed() -> int:
        calls = 0
        while True:
            try:
                thread.run(asyncio.sleep(0))
            except ClosedError:
                return calls
            calls += 1
            first.set()

    with ThreadPoolExecutor(8) as pool:
        callers = [pool.submit(call_until_closed) for _ in range(8)]
        assert first.wait(30)
        thread.close()
        assert sum(caller.result(30) for caller in callers) > 0


@pytest.mark.parametrize(
    "strategy",
    ["DiLoCo(2)", *(pytest.param(name, marks=pytest.mark.long) for name in ("LocalSGD(2)", "GradientAveraging(8)"))],
)
def test_a_daemon_thread_that_trains_ends_quietly_with_the_interpreter(strategy: str) -> None:
    """It would print a traceback, or abort the process if it comes back from torch while the interpreter ends."""
    script = f"""
import logging, threading
import torch
from averaging import DecentralizedAverager, DiLoCo, GradientAveraging, LocalSGD

model = torch.nn.Linear(300, 300)
opt = DecentralizedAverager(torch.optim.SGD(model.parameters()), model=model, strategy={strategy}, run_id="run")
logging.disable()
busy = threading.Event()

def train():
    while True:
        model(torch.ones(64, 300)).sum().backward()
        opt.step(batch_size=8)
        if opt.local_step > 5:
            busy.set()

threading.Thread(target=train, daemon=True).start()
assert busy.wait(30)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


SCRIPT = """
import asyncio, os
from contextlib import asynccontextmanager
from averaging.common.event_loop_thread import EventLoopThread
from averaging.errors import ClosedError

@asynccontextmanager
async def context():
    yield
    print("left", flush=True)

thread = EventLoopThread(context(), "it")
async def use_a_worker_thread():
    return await asyncio.to_thread(os.getpid)
assert thread.run(use_a_worker_thread()) == os.getpid()
started = thread.start(asyncio.sleep(3600))
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert thread.run(asyncio.sleep(0, 7)) == 7
    raise SystemExit(3)
for use in (thread.check, lambda: thread.run(asyncio.sleep(0)), lambda: thread.wait(started)):
    try:
        use()
    except ClosedError as error:
        assert "fork" in str(error), error
    else:
        os._exit(1)
thread.close()
"""


def test_in_a_forked_process_it_refuses_and_an_error_that_ends_the_interpreter_closes_it_in_the_parent() -> None:
    # Python 3.12 and newer warn of a fork in a process with threads.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", SCRIPT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "left\n", "")
