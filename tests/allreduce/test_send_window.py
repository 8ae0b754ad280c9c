"""The send window, in virtual time."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given, strategies as st

from averaging.allreduce import stream_limits
from averaging.allreduce.stream_limits import MAX_HOLD_SECONDS, MIN_PARTS, SendWindow, send_limits
from averaging.protocol.group import Member
from averaging.protocol.messages import AveragingData
from averaging.testing import transport as memory, virtual_time
from tests.support.rounds import Simulation, assert_close

NODES = [Member(f"peer:{number}") for number in range(1, 5)]
SLOW = "peer:4"
MIB = 2**20


@pytest.fixture(autouse=True)
def only_the_send_window_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_limits, "WINDOW_BYTES", 0)
    monkeypatch.setattr(memory, "WINDOW", 1000)


def assert_mean(simulation: Simulation) -> None:
    for tensors in simulation.tensors.values():
        assert_close(tensors, simulation.mean(), 1e-6)


class Account:
    """Counts the parts that each sender has sent to each reducer without an answer.

    Attributes:
        most: maximum over time.
    """

    def __init__(self, simulation: Simulation, pause: float) -> None:
        self.most: Counter[tuple[str, str]] = Counter()
        for name in simulation.transports:
            self._watch(simulation, name, pause if name == SLOW else 0.0)

    def _watch(self, simulation: Simulation, name: str, pause: float) -> None:
        transport = simulation.transports[name]
        call = transport.aggregate_part

        async def aggregate_part(
            endpoint: str, messages: AsyncIterator[AveragingData]
        ) -> AsyncGenerator[AveragingData, None]:
            unanswered = 0

            async def sent() -> AsyncGenerator[AveragingData, None]:
                nonlocal unanswered
                async for message in messages:
                    await asyncio.sleep(pause)
                    unanswered += 1
                    self.most[name, endpoint] = max(self.most[name, endpoint], unanswered)
                    yield message

            async with aclosing(call(endpoint, sent())) as replies:
                async for reply in replies:
                    unanswered -= 1
                    yield reply

        transport.aggregate_part = aggregate_part  # type: ignore[method-assign]


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_no_sender_exceeds_its_window(pause: float) -> None:
    simulation = Simulation(1, NODES, [(2000,)])
    account = Account(simulation, pause)
    virtual_time.run(simulation.run())
    assert_mean(simulation)
    assert len(account.most) == 12
    quick = {most for (name, _), most in account.most.items() if name != SLOW}
    assert quick == {MIN_PARTS}
    assert max(account.most.values()) == MIN_PARTS


def test_a_reducer_that_answers_only_at_the_end_gets_all_parts() -> None:
    simulation = Simulation(2, NODES, [(2000,)])
    reduce = simulation.rounds[SLOW].aggregate_part

    async def at_the_end(
        first: AveragingData, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        parts = [message async for message in messages]

        async def kept() -> AsyncGenerator[AveragingData, None]:
            for part in parts:
                yield part

        async with aclosing(reduce(first, kept())) as replies:
            async for reply in replies:
                yield reply

    simulation.rounds[SLOW].aggregate_part = at_the_end  # type: ignore[method-assign]
    virtual_time.run(simulation.run())
    assert MAX_HOLD_SECONDS < simulation.seconds < MAX_HOLD_SECONDS + 1.0
    assert_mean(simulation)
    assert not any(result.dropped for result in simulation.results.values())


@pytest.mark.parametrize("pause", [0.05, 0.4])
def test_no_part_waits_longer_than_the_limit_although_small_parts_are_answered(pause: float) -> None:
    async def held_back() -> float:
        stream = SendWindow(
            send_limits([1] * 20 + [10], 20), MAX_HOLD_SECONDS
        )  # the last part fits when half of the others are answered
        loop = asyncio.get_running_loop()
        for number in range(10):
            loop.call_later(pause * (number + 1), stream.answered)
        began = loop.time()
        await stream.wait(20)
        return loop.time() - began

    assert virtual_time.run(held_back()) == pytest.approx(min(10 * pause, MAX_HOLD_SECONDS))


def test_small_parts_do_not_wait_for_each_other() -> None:
    """For example the many biases of a model on a long link: the window counts bytes."""
    simulation = Simulation(4, NODES, [(16,), *[(1,)] * 400], latency=(0.2, 0.2))
    account = Account(simulation, 0.0)
    virtual_time.run(simulation.run())
    assert simulation.seconds < 2.0  # 100 parts of 4 bytes to each, and a window of 3 · 64 bytes
    assert_mean(simulation)
    assert max(account.most.values()) == MIN_PARTS * 64 // 4


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 100))
def test_send_limits_allow_as_many_parts_as_fit(sizes: list[int], nbytes: int) -> None:
    found = send_limits(sizes, nbytes)
    assert len(found) == len(sizes) + 1
    for done, far in enumerate(found):
        assert sum(sizes[done:far]) <= nbytes
        assert far == len(sizes) or sum(sizes[done : far + 1]) > nbytes
