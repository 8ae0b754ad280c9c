"""Gossip between peers whose clocks differ: when records are removed, and what both sides log."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import aclosing

import pytest

from averaging.testing import virtual_time
from tests.support.gossip_swarm import KEY, GossipSwarm, everywhere, joined, members, now, until


def clock(ahead: float) -> Callable[[], float]:
    return lambda: virtual_time.clock() + ahead


# Records whose owner's clock is ahead


@pytest.mark.parametrize("ahead", [40.0, 600.0])
def test_a_dead_peer_whose_clock_was_ahead_is_forgotten_as_soon_as_any_other(ahead: float) -> None:
    swarm = GossipSwarm(41)

    async def main() -> None:
        await swarm.grow(8)
        await joined(swarm.start("ahead:1", ["peer-0:1"], clock=clock(ahead)))
        everybody = set(swarm.hosts)
        await swarm["ahead:1"].store(KEY, "ahead:1", b"", virtual_time.clock() + ahead + 50)
        rest = [swarm[name] for name in everybody - {"ahead:1"}]
        await until(lambda: all(members(peer) == everybody for peer in rest), within=20)
        await until(everywhere(rest, KEY, {"ahead:1"}), within=20)  # who has refused it gets it in an exchange
        await asyncio.sleep(60)  # its presence record is renewed
        assert all(members(peer) == everybody for peer in rest)
        await swarm.kill("ahead:1")
        # The last renewal may reach some peers a few exchanges later.
        await until(lambda: not any("ahead:1" in peer.endpoints() for peer in rest), within=30 + 3 + 15)
        assert everywhere(rest, KEY, set())()
        await joined(swarm.start("newcomer:1", ["peer-1:1"]))
        for _ in range(40):  # no peer sends it to another
            await asyncio.sleep(1)
            assert not any("ahead:1" in members(host.discovery) for host in swarm.hosts.values())

    swarm.simulate(main())


def test_a_watcher_sees_the_early_removal_of_a_record_from_a_clock_ahead() -> None:
    swarm = GossipSwarm(42)

    async def main() -> None:
        await joined(swarm.start("a:1"))
        await joined(swarm.start("ahead:1", ["a:1"], clock=clock(600.0)))
        await swarm["ahead:1"].store(KEY, "ahead:1", b"", virtual_time.clock() + 620)
        async with aclosing(swarm["a:1"].watch(KEY)) as changes:
            while "ahead:1" not in await anext(changes):
                pass
            came = now()
            assert await anext(changes) == {}
            assert now() - came == pytest.approx(20 + 3, abs=0.1)

    swarm.simulate(main())


# Clocks that are too far apart


def warnings(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """The logged offset of each peer's clock."""
    found = [re.search(r"groups with (\S+) may fail: its clock is (.* s) (ahead|behind)", m) for m in caplog.messages]
    return {one[1]: f"{one[2]} {one[3]}" for one in found if one is not None}


@pytest.mark.parametrize("apart", [4.0, 12.0, 40.0, 4000.0])
@pytest.mark.parametrize("joiner", [1, -1], ids=["the joiner is ahead", "the joiner is behind"])
def test_both_sides_log_a_clock_that_is_too_far_from_theirs(
    caplog: pytest.LogCaptureFixture, apart: float, joiner: int
) -> None:
    swarm = GossipSwarm(43)

    async def main() -> None:
        await joined(swarm.start("a:1"))
        await joined(swarm.start("b:1", ["a:1"], clock=clock(joiner * apart)))
        await asyncio.sleep(30)
        for name, other, ahead in (("a:1", "b:1", joiner * apart), ("b:1", "a:1", -joiner * apart)):
            found = swarm[name]._offsets.excessive(now())
            assert found == {other: pytest.approx(ahead, abs=0.1)}

    swarm.simulate(main())
    expected, other = ("ahead", "behind") if joiner > 0 else ("behind", "ahead")
    seconds = f"{apart:.0f} s" if apart > 10 else f"{apart:.1f} s"
    found = warnings(caplog)
    assert set(found) == {"a:1", "b:1"}
    assert found["b:1"].endswith(expected)
    assert found["a:1"].endswith(other)
    assert {words.rpartition(" ")[0] for words in found.values()} <= {seconds, "3.9 s"}


@pytest.mark.parametrize("apart", [0.0, 2.9, -2.9])
def test_clocks_within_the_tolerance_are_not_logged(caplog: pytest.LogCaptureFixture, apart: float) -> None:
    swarm = GossipSwarm(44, latency=(0.001, 0.5))

    async def main() -> None:
        await swarm.grow(4)
        await joined(swarm.start("b:1", ["peer-0:1"], clock=clock(apart)))
        await asyncio.sleep(120)
        virtual_time.stand_still(60)
        await asyncio.sleep(60)

    swarm.simulate(main())
    assert warnings(caplog) == {}


def test_a_peer_that_stood_still_while_others_called_it_logs_no_clock(caplog: pytest.LogCaptureFixture) -> None:
    swarm = GossipSwarm(45)

    async def main() -> None:
        await swarm.grow(4)
        await asyncio.sleep(10)
        swarm.network.freeze("peer-1:1")  # messages to it arrive later
        await asyncio.sleep(40)
        swarm.network.thaw("peer-1:1")
        await asyncio.sleep(60)

    swarm.simulate(main())
    assert warnings(caplog) == {}


def test_a_client_and_the_source_of_its_stream_log_each_other(caplog: pytest.LogCaptureFixture) -> None:
    swarm = GossipSwarm(46)

    async def main() -> None:
        await joined(swarm.start("a:1"))
        await joined(swarm.start(None, ["a:1"], clock=clock(40.0)))
        await asyncio.sleep(10)

    swarm.simulate(main())
    assert warnings(caplog)["a:1"] == "40 s behind"
    assert "groups with a client of this run may fail: its clock is 40 s ahead" in caplog.text
