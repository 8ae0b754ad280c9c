"""Gossip between peers whose clocks differ: when records are removed, and what both sides log."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest

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
