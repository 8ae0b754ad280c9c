"""How far senders run ahead of the averages, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.allreduce import send_window
from averaging.allreduce.send_window import AHEAD_BYTES, LEAST_PARTS, PATIENCE_SECONDS, SendWindow, bytes_ahead, reach
from averaging.protocol.group import Member
from averaging.protocol.messages import AveragingData
from averaging.transport import memory, virtual_time
from tests.simulation.rounds import ROUND_SECONDS, Simulation, assert_close

NODES = [Member(f"peer:{number}") for number in range(1, 5)]
SLOW = "peer:4"
MIB = 2**20


@pytest.fixture(autouse=True)
def only_senders_hold_themselves_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_window, "AHEAD_BYTES", 0)
    monkeypatch.setattr(memory, "WINDOW", 1000)


def assert_mean(simulation: Simulation) -> None:
    for tensors in simulation.tensors.values():
        assert_close(tensors, simulation.mean(), 1e-6)


class Account:
    """What each sender has sent to each reducer without an answer.

    Attributes:
        most: at any time.
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
            under_way = 0

            async def sent() -> AsyncGenerator[AveragingData, None]:
                nonlocal under_way
                async for message in messages:
                    await asyncio.sleep(pause)
                    under_way += 1
                    self.most[name, endpoint] = max(self.most[name, endpoint], under_way)
                    yield message

            async with aclosing(call(endpoint, sent())) as replies:
                async for reply in replies:
                    under_way -= 1
                    yield reply

        transport.aggregate_part = aggregate_part  # type: ignore[method-assign]


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_nobody_sends_more_than_is_allowed_before_it_is_answered(pause: float) -> None:
    simulation = Simulation(1, NODES, [(2000,)])
    account = Account(simulation, pause)
    virtual_time.run(simulation.run())
    assert_mean(simulation)
    assert len(account.most) == 12
    quick = {most for (name, _), most in account.most.items() if name != SLOW}
    assert quick == {LEAST_PARTS}
    assert max(account.most.values()) == LEAST_PARTS


def test_a_reducer_that_answers_only_when_it_has_all_gets_all() -> None:
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
    assert PATIENCE_SECONDS < simulation.seconds < PATIENCE_SECONDS + 1.0
    assert_mean(simulation)
    assert not any(result.dropped for result in simulation.results.values())


@pytest.mark.parametrize("pause", [0.05, 0.4])
def test_no_part_is_held_back_for_longer_than_patience_though_small_ones_are_answered(pause: float) -> None:
    async def held_back() -> float:
        stream = SendWindow(
            reach([1] * 20 + [10], 20), PATIENCE_SECONDS
        )  # the last one fits when half of them are answered
        loop = asyncio.get_running_loop()
        for number in range(10):
            loop.call_later(pause * (number + 1), stream.answered)
        began = loop.time()
        await stream.wait(20)
        return loop.time() - began

    assert virtual_time.run(held_back()) == pytest.approx(min(10 * pause, PATIENCE_SECONDS))


@pytest.mark.parametrize(("pause", "named"), [(0.012, False), (0.1, True)])
def test_who_sets_the_pace_by_a_little_did_not_hold_the_round_back(pause: float, named: bool) -> None:
    """The others take 10 ms for each part, and are held back to the slow one's pace after a few."""
    simulation = Simulation(3, NODES, [(4000,)], latency=(0.001, 0.001))
    for name in simulation.transports:
        simulation.slow_down(name, pause if name == SLOW else 0.010)
    virtual_time.run(simulation.run())
    for name, result in simulation.results.items():
        if name != SLOW:
            assert (result.straggler is not None) == named, result.straggler


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_every_round_ends(seed: int) -> None:
    simulation = Simulation(seed, NODES, [(2000,)], loss=0.003)
    virtual_time.run(simulation.run())
    assert simulation.seconds < ROUND_SECONDS
    assert not simulation.failures


def test_small_parts_do_not_wait_for_each_other() -> None:
    """As those of a model's many biases on a long link: what counts is bytes."""
    simulation = Simulation(4, NODES, [(16,), *[(1,)] * 400], latency=(0.2, 0.2))
    account = Account(simulation, 0.0)
    virtual_time.run(simulation.run())
    assert simulation.seconds < 2.0  # 100 parts of 4 bytes to each, and 3 · 64 bytes under way
    assert_mean(simulation)
    assert max(account.most.values()) == LEAST_PARTS * 64 // 4


@pytest.mark.parametrize(
    ("part_bytes", "reducers", "expected"),
    [
        (MIB, 1, 8 * MIB),
        (MIB, 2, 4 * MIB),
        (MIB, 3, 3 * MIB),
        (MIB, 7, 3 * MIB),
        (64 * MIB, 1, 192 * MIB),
        (1024, 0, 8 * MIB),
    ],
)
def test_bytes_ahead(monkeypatch: pytest.MonkeyPatch, part_bytes: int, reducers: int, expected: int) -> None:
    monkeypatch.setattr(send_window, "AHEAD_BYTES", AHEAD_BYTES)  # as it was before the fixture
    assert bytes_ahead(part_bytes, reducers) == expected


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 100))
def test_the_reach_is_as_far_as_what_is_not_answered_fits(sizes: list[int], nbytes: int) -> None:
    found = reach(sizes, nbytes)
    assert len(found) == len(sizes) + 1
    for done, far in enumerate(found):
        assert sum(sizes[done:far]) <= nbytes
        assert far == len(sizes) or sum(sizes[done : far + 1]) > nbytes
