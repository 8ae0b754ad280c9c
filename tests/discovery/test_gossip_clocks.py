"""Clocks of peers that differ: how they are estimated, when records are removed, and what both sides log."""

import asyncio
import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from averaging.discovery.gossip.clock_offsets import STALE_SECONDS, ClockOffsets
from averaging.testing import virtual_time
from tests.support.gossip_swarm import GossipSwarm, joined
from tests.support.simulated import in_virtual_time


def clock(ahead: float) -> Callable[[], float]:
    return lambda: virtual_time.clock() + ahead


def warnings(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """The logged offset of each peer's clock."""
    found = [re.search(r"groups with (\S+) may fail: its clock is (.* s) (ahead|behind)", m) for m in caplog.messages]
    return {one[1]: f"{one[2]} {one[3]}" for one in found if one is not None}


@pytest.mark.parametrize("apart", [4.0, 12.0, 28.0, -4.0, -12.0, -28.0])
@in_virtual_time
async def test_both_sides_log_a_clock_that_is_too_far_from_theirs(
    caplog: pytest.LogCaptureFixture, apart: float
) -> None:
    async with GossipSwarm(43) as swarm:
        await joined(swarm.start("a:1"))
        await joined(swarm.start("b:1", ["a:1"], clock=clock(apart)))
        await asyncio.sleep(30)
        for name, other, ahead in (("a:1", "b:1", apart), ("b:1", "a:1", -apart)):
            assert swarm[name].diagnose().clock_offsets == {other: pytest.approx(ahead, abs=0.1)}
    found = warnings(caplog)
    assert found.keys() == {"a:1", "b:1"}
    assert {words.rpartition(" ")[2] for words in found.values()} == {"ahead", "behind"}
    assert found["b:1"].endswith("ahead" if apart > 0 else "behind")


@pytest.mark.parametrize("apart", [4000.0, -4000.0])
@in_virtual_time
async def test_a_peer_whose_records_all_others_refuse_logs_why(caplog: pytest.LogCaptureFixture, apart: float) -> None:
    async with GossipSwarm(43) as swarm:
        await joined(swarm.start("a:1"))
        await joined(swarm.start("b:1", ["a:1"], clock=clock(apart)))
        await asyncio.sleep(30)
    assert warnings(caplog)["a:1"] == f"4000 s {'behind' if apart > 0 else 'ahead'}"


@pytest.mark.parametrize("apart", [0.0, 2.9, -2.9])
@in_virtual_time
async def test_clocks_within_the_tolerance_are_not_logged(caplog: pytest.LogCaptureFixture, apart: float) -> None:
    async with GossipSwarm(44, latency=(0.001, 0.5)) as swarm:
        await swarm.grow(4)
        await joined(swarm.start("b:1", ["peer-0:1"], clock=clock(apart)))
        await asyncio.sleep(120)
        virtual_time.stand_still(60)
        await asyncio.sleep(60)
    assert warnings(caplog) == {}


@in_virtual_time
async def test_a_peer_that_stood_still_while_others_called_it_logs_no_clock(caplog: pytest.LogCaptureFixture) -> None:
    async with GossipSwarm(45) as swarm:
        await swarm.grow(4)
        await asyncio.sleep(10)
        swarm.network.freeze("peer-1:1")  # messages to it arrive later
        await asyncio.sleep(40)
        swarm.network.thaw("peer-1:1")
        await asyncio.sleep(60)
    assert warnings(caplog) == {}


NOW = 1_700_000_000.0


@pytest.mark.parametrize("back", [0.0, 0.5, 1.0], ids="{:g} of the time after the answer".format)
@pytest.mark.parametrize("elapsed", [0.1, 5.0])
@pytest.mark.parametrize("ahead", [0.0, 2.9, -2.9, 3.2, -3.2, 40.0, -40.0])
def test_an_answer_shows_an_offset_that_its_delay_cannot_explain(ahead: float, elapsed: float, back: float) -> None:
    offsets = ClockOffsets(3.0)
    offsets.note("a:1", NOW + ahead - back * elapsed, NOW, elapsed, 0.0)
    found = offsets.excessive(0.0)
    if abs(ahead) < 3:
        assert found == {}
    elif abs(ahead) > 3 + elapsed:
        assert found == {"a:1": pytest.approx(ahead, abs=elapsed + 0.001)}
    else:  # it depends on which direction was slow
        assert found in ({}, {"a:1": pytest.approx(ahead, abs=elapsed + 0.001)})


def test_several_answers_narrow_it_down_and_the_median_corrects_this_clock() -> None:
    offsets = ClockOffsets(3.0)
    offsets.note("a:1", NOW + 4, NOW, 6.0, 0.0)  # between 4 and 10 s ahead
    offsets.note("a:1", NOW + 1, NOW, 4.0, 1.0)  # between 1 and 5 s
    offsets.note("b:1", NOW + 2, NOW, 0.0, 1.0)
    assert offsets.excessive(1.0) == {"a:1": 4.0}
    assert offsets.own_offset(1.0) == -(4.5 + 2) / 2
    assert offsets.correction(1.0) == 2.0
    offsets.note("c:1", NOW + 9, NOW, math.inf, 1.0)  # how long it was on its way is unknown
    assert offsets.excessive(1.0) == {"a:1": 4.0, "c:1": 9.0}


def test_a_clock_that_was_set_is_used_at_once() -> None:
    offsets = ClockOffsets(3.0)
    offsets.note("a:1", NOW + 40, NOW, 0.1, 0.0)
    offsets.note("a:1", NOW + 2, NOW + 2, 0.1, 2.0)
    assert offsets.excessive(2.0) == {}
    offsets.note("a:1", NOW - 36, NOW + 4, 0.1, 4.0)
    assert offsets.excessive(4.0) == {"a:1": pytest.approx(-40, abs=0.2)}
    assert offsets.excessive(5.0 + STALE_SECONDS) == {}


@given(st.floats())
def test_any_timestamp_can_be_read(theirs: float) -> None:
    offsets = ClockOffsets(3.0)
    offsets.note("a:1", theirs, NOW, 0.1, 0.0)
    for ahead in offsets.excessive(0.0).values():
        assert math.isfinite(ahead)
        assert 3 < abs(ahead) < 1e13
