"""Timeouts in fair seconds, in virtual time: when they expire, their messages, and what is learned from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest

from averaging.state.donors import WINDOW, DonorDeadlines
from averaging.testing import virtual_time
from averaging.timing.fair_timeout import FairTimeout, learned_timeout
from averaging.timing.learned_deadlines import MIN_WAITS, Deadline, Deadlines, Phase

LOWER, UPPER = 1.0, 10.0


def now() -> float:
    return asyncio.get_running_loop().time()


def simulate(main: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(main)


def test_it_expires_in_time_with_an_explanation() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match=r"^silent for 2 s, deadline 2 s = a test$"):
            async with FairTimeout(Deadline(2.0, "a test"), LOWER):
                await asyncio.sleep(60)
        assert now() == pytest.approx(2.0, abs=0.01)

    simulate(main())


def test_each_restart_begins_a_new_wait() -> None:
    async def main() -> None:
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

    simulate(main())


def test_seconds_in_which_this_peer_was_stopped_do_not_count() -> None:
    async def main() -> None:
        async with FairTimeout(Deadline(2.0, "a test"), LOWER) as limit:
            await asyncio.sleep(1.0)
            virtual_time.stand_still(60.0)
            await asyncio.sleep(0.7)
            assert limit.waited < 2.0
        assert not limit.expired

    simulate(main())


def test_no_timer_is_left_after_the_context() -> None:
    async def main() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with FairTimeout(Deadline(2.0, "a test"), LOWER):
            await asyncio.sleep(1.0)
        await asyncio.sleep(10.0)
        assert not complaints

    simulate(main())


def test_other_errors_pass_through() -> None:
    async def main() -> None:
        deadlines = Deadlines(LOWER, UPPER)
        for error in (TimeoutError("another"), StopAsyncIteration(), asyncio.CancelledError()):
            with pytest.raises(type(error)) as raised:
                async with learned_timeout(deadlines, "a:1", Phase.VERDICT):
                    raise error
            assert raised.value is error
        assert not len(deadlines)

    simulate(main())


def test_answer_times_are_learned_and_a_silent_peer_costs_little() -> None:
    async def main() -> None:
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

    simulate(main())


async def download(deadlines: Deadlines, donor: str, gaps: list[float]) -> float:
    """Reads messages that arrive after these pauses; returns the length of the last wait if the donor was given up.

    Raises:
        ConnectionError: at a pause below 0.
    """

    async def messages() -> AsyncGenerator[None, None]:
        for gap in gaps:
            if gap < 0:
                raise ConnectionError
            await asyncio.sleep(gap)
            yield

    last = now()
    try:
        async with DonorDeadlines(deadlines).watch(donor) as watch:
            async for _ in messages():
                watch.message_received()
                last = now()
    except TimeoutError:
        return now() - last
    return 0.0


def test_an_unknown_donor_gets_the_longest_deadline_and_then_what_this_download_has_taught() -> None:
    async def main() -> None:
        assert await download(Deadlines(LOWER, UPPER), "a:1", [60]) == pytest.approx(10.0, abs=0.3)
        usual = [0.5] * (1 + WINDOW * MIN_WAITS)
        assert await download(Deadlines(LOWER, UPPER), "a:1", [0.5, 0.5, 60]) == pytest.approx(10.0, abs=0.3)
        assert await download(Deadlines(LOWER, UPPER), "a:1", [*usual, 60]) == pytest.approx(2.0, abs=0.3)
        assert await download(Deadlines(LOWER, UPPER), "a:1", [*usual, 1.9, 60]) == pytest.approx(3.8, abs=0.3)
        assert await download(Deadlines(LOWER, UPPER), "a:1", [*usual, 1.9, 0.5, 60]) == pytest.approx(3.8, abs=0.3)

    simulate(main())


def test_deadlines_are_used_for_the_next_download_from_the_same_and_from_other_donors() -> None:
    async def main() -> None:
        deadlines = Deadlines(LOWER, UPPER)
        for _ in range(MIN_WAITS):
            assert not await download(deadlines, "a:1", [0.1, 0.01, 0.3, 0.01])  # the longest wait counts
        medians = {one.phase: one.median for one in deadlines.learned()}
        assert medians == pytest.approx({Phase.STATE: 0.1, Phase.CHUNK: 0.3})
        assert await download(deadlines, "b:1", [60]) == pytest.approx(2.0, abs=0.3)
        assert await download(deadlines, "b:1", [60]) == pytest.approx(4.0, abs=0.3)
        assert await download(deadlines, "b:1", [0.1, 60]) == pytest.approx(2.4, abs=0.3)
        assert await download(deadlines, "a:1", [60]) == pytest.approx(1.0, abs=0.3)
        assert await download(deadlines, "a:1", [0.1, 60]) == pytest.approx(1.2, abs=0.3)

    simulate(main())


def test_few_chunks_are_learned_from_at_the_end_and_many_in_whole_windows() -> None:
    async def main() -> None:
        def chunks(deadlines: Deadlines) -> list[tuple[int, float]]:
            return [(one.waits, round(one.median, 3)) for one in deadlines.learned() if one.phase is Phase.CHUNK]

        few, broken, many, none = (Deadlines(LOWER, UPPER) for _ in range(4))
        for _ in range(MIN_WAITS):
            await download(none, "a:1", [0.1])
            await download(few, "a:1", [0.1, 0.3, 0.2])
            with pytest.raises(ConnectionError):
                await download(broken, "a:1", [0.1, 0.3, -1.0])
            await download(many, "a:1", [0.1, *[0.4] * WINDOW, *[0.2] * WINDOW, 0.9])
        assert not chunks(none)
        assert chunks(few) == [(MIN_WAITS, 0.3)]
        assert not chunks(broken)
        assert chunks(many) == [(2 * MIN_WAITS, 0.3)]

    simulate(main())


def test_a_donor_that_was_given_up_and_becomes_slower_is_read_eventually() -> None:
    async def main() -> None:
        deadlines = Deadlines(LOWER, UPPER)
        for _ in range(MIN_WAITS):
            assert not await download(deadlines, "a:1", [0.1] * 4)
        lost = [await download(deadlines, "a:1", [0.1, 5.0, 5.0]) for _ in range(6)]
        assert lost[0] == pytest.approx(1.0, abs=0.3)
        assert lost[-3:] == [0.0] * 3

    simulate(main())


def test_a_donor_that_was_given_up_early_gets_the_longest_deadline_once() -> None:
    async def main() -> None:
        deadlines = Deadlines(LOWER, UPPER)
        for _ in range(MIN_WAITS):
            assert not await download(deadlines, "a:1", [0.1])
        donors = DonorDeadlines(deadlines)
        for seconds, retry in ((1.0, True), (10.0, False)):
            began = now()
            with pytest.raises(TimeoutError):
                async with donors.watch("a:1"):
                    await asyncio.sleep(60)
            assert now() - began == pytest.approx(seconds, abs=0.3)
            assert donors.should_retry("a:1") is retry
        with pytest.raises(TimeoutError):
            async with (unknown := DonorDeadlines(Deadlines(LOWER, UPPER))).watch("a:1"):
                await asyncio.sleep(60)
        assert not unknown.should_retry("a:1")  # it had the longest one at once

    simulate(main())
