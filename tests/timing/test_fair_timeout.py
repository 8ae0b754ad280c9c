"""Timeouts in fair seconds, in virtual time: when they expire, their messages, and what is learned from them."""

import asyncio

import pytest

from averaging.testing import virtual_time
from averaging.timing.deadlines import MIN_WAITS, Deadline, Deadlines, FairTimeout, Phase, learned_timeout
from tests.support.simulated import in_virtual_time

LOWER, UPPER = 1.0, 10.0


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_it_expires_in_time_with_an_explanation() -> None:
    with pytest.raises(TimeoutError, match=r"^silent for 2 s, deadline 2 s = a test$"):
        async with FairTimeout(Deadline(2.0, "a test"), LOWER):
            await asyncio.sleep(60)
    assert now() == pytest.approx(2.0, abs=0.01)


@in_virtual_time
async def test_each_restart_begins_a_new_wait() -> None:
    async def wait() -> None:
        async with FairTimeout(Deadline(2.0, "the first"), LOWER) as limit:
            for _ in range(5):
                await asyncio.sleep(1.9)
                assert limit.waited == pytest.approx(1.9)
                limit.restart(Deadline(2.0, "the next"))
            limit.restart(Deadline(3.0, "the last"))
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError, match=r"deadline 3 s = the last$"):
        await wait()
    assert now() == pytest.approx(5 * 1.9 + 3.0, abs=0.2)


@in_virtual_time
async def test_seconds_in_which_this_peer_was_stopped_do_not_count() -> None:
    async with FairTimeout(Deadline(2.0, "a test"), LOWER) as limit:
        await asyncio.sleep(1.0)
        virtual_time.stand_still(60.0)
        await asyncio.sleep(0.7)
        assert limit.waited < 2.0
    assert not limit.expired


@in_virtual_time
async def test_other_errors_pass_through() -> None:
    deadlines = Deadlines(LOWER, UPPER)
    for error in (TimeoutError("another"), StopAsyncIteration(), asyncio.CancelledError()):
        with pytest.raises(type(error)) as raised:
            async with learned_timeout(deadlines, "a:1", Phase.VERDICT):
                raise error
        assert raised.value is error
    assert not len(deadlines)


@in_virtual_time
async def test_answer_times_are_learned_and_a_silent_peer_costs_little() -> None:
    deadlines = Deadlines(LOWER, UPPER)

    async def ask(endpoint: str, seconds: float) -> float:
        began = now()
        try:
            async with learned_timeout(deadlines, endpoint, Phase.VERDICT):
                await asyncio.sleep(seconds)
        except TimeoutError:
            pass
        return now() - began

    assert await ask("frozen:1", 60) == pytest.approx(3.0, abs=0.1)
    for _ in range(MIN_WAITS):
        await ask("a:1", 0.01)
    assert await ask("dead:1", 60) == pytest.approx(2.0, abs=0.1)
    assert await ask("a:1", 60) == pytest.approx(1.0, abs=0.1)
    assert await ask("a:1", 60) == pytest.approx(2.0, abs=0.1)
    assert await ask("a:1", 60) == pytest.approx(3.0, abs=0.1)
    (result,) = deadlines.learned()
    assert (result.endpoint, result.phase, result.deadline) == ("a:1", Phase.VERDICT, 3.0)
