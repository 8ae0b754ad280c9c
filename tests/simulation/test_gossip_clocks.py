"""Peers that gossip while their clocks differ: when records are forgotten, and what both sides are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

from averaging.transport import virtual_time
from tests.simulation.gossip_swarm import KEY, GossipSwarm, everywhere, joined, members, now, until


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
        await swarm["ahead:1"].store(KEY, "ahead:1", b"", virtual_time.clock() + ahead + 20)
        rest = [swarm[name] for name in everybody - {"ahead:1"}]
        await until(lambda: all(members(peer) == everybody for peer in rest), within=20)
        await until(everywhere(rest, KEY, {"ahead:1"}), within=1)
        await asyncio.sleep(60)  # its signs of life are renewed
        assert all(members(peer) == everybody for peer in rest)
        await swarm.kill("ahead:1")
        # The latest sign of life may reach the last of them some exchanges later.
        await until(lambda: not any("ahead:1" in peer.endpoints() for peer in rest), within=30 + 3 + 15)
        assert everywhere(rest, KEY, set())()
        await joined(swarm.start("newcomer:1", ["peer-1:1"]))
        for _ in range(40):  # nobody gives it back to anybody
            await asyncio.sleep(1)
            assert not any("ahead:1" in members(host.discovery) for host in swarm.hosts.values())

    swarm.simulate(main())


def test_who_watches_sees_a_record_of_a_clock_that_is_ahead_go_when_it_is_dropped() -> None:
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
