"""Which records and calls gossip refuses, and what is logged about it; in virtual time."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import replace

import pytest

from averaging.discovery.gossip.access import GossipSettings
from averaging.discovery.gossip.record import Author, Ed25519Identity, Reason, RecordLimits
from averaging.errors import CallRefusedError
from averaging.protocol.messages import Digest, Record, Rumour
from averaging.testing import virtual_time
from tests.support.gossip_swarm import KEY, RUN, GossipSwarm, in_an_hour, joined
from tests.support.simulated import in_virtual_time


def push_from(swarm: GossipSwarm, *records: Record) -> asyncio.Task[list[str]]:
    async def push() -> list[str]:
        stranger = swarm.network.transport("stranger:1")
        refusals = await stranger.push("peer-0:1", RUN, tuple(Rumour(record) for record in records))
        return [refusal.reason for refusal in refusals]

    return asyncio.create_task(push())


@in_virtual_time
async def test_forged_foreign_and_oversized_records_are_refused_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with GossipSwarm(23) as swarm:
        await joined(swarm.start("peer-0:1", identity=Ed25519Identity()))
        peer = swarm["peer-0:1"]
        await peer.store(KEY, "mine:1", b"mine", in_an_hour())
        stranger = Author(RUN, Ed25519Identity(), RecordLimits())
        clock = virtual_time.clock()
        good = stranger.write(KEY, "a:1", b"", clock + 100, clock, None)
        foreign = stranger.write(KEY, "mine:1", b"stolen", clock + 100, clock + 1, None)
        oversized = replace(good, value=b"x" * 1025)
        unsigned = replace(good, signature=b"")
        forged = replace(good, owner=peer.list_records(KEY)[0].owner)
        too_far = replace(good, expiration=clock + 10_000)
        takes_back = stranger.withdraw(foreign, clock + 2)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                reasons = await push_from(swarm, unsigned, forged, oversized, too_far)
                assert reasons == [Reason.FORGED, Reason.FORGED, Reason.OVERSIZED, Reason.TOO_FAR]
        assert await push_from(swarm, foreign) == [Reason.FOREIGN]
        assert await push_from(swarm, takes_back, good) == []
        assert {subkey: entry.value for subkey, entry in peer.get(KEY).items()} == {"mine:1": b"mine", "a:1": b""}
        assert peer.refused == {Reason.FORGED: 6, Reason.OVERSIZED: 3, Reason.TOO_FAR: 3, Reason.FOREIGN: 1}
        assert len([one for one in caplog.records if "refused a record" in one.message]) == 4


@in_virtual_time
async def test_a_peer_logs_that_others_refuse_its_records(caplog: pytest.LogCaptureFixture) -> None:
    async with GossipSwarm(30) as swarm:
        await joined(swarm.start("peer-0:1"))
        swarm.settings = GossipSettings(limits=RecordLimits(records_per_owner=1000))  # for the second peer only
        await joined(swarm.start("peer-1:1", ["peer-0:1"]))
        for number in range(300):
            await swarm["peer-1:1"].store(KEY, f"a:{number}", b"", in_an_hour())
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(1)
        expected = [one.message for one in caplog.records if "peer-0:1 refuses this peer's record" in one.message]
        assert len(expected) == 1
        assert Reason.OWNER_FULL in expected[0]
        assert len(swarm["peer-0:1"].get(KEY)) == 255


@pytest.mark.parametrize("reachable", [True, False])
@in_virtual_time
async def test_a_peer_logs_that_others_do_not_reach_it(caplog: pytest.LogCaptureFixture, reachable: bool) -> None:
    caplog.set_level(logging.WARNING)
    async with GossipSwarm(32) as swarm:
        await swarm.grow(2)
        behind = swarm.start("behind:1", ["peer-0:1"])
        await joined(behind)
        if not reachable:  # as behind a firewall: it can call and cannot be called
            await behind.transport.close()
        await asyncio.sleep(300)
    expected = [one.message for one in caplog.records if "can they reach behind:1?" in one.message]
    assert len(expected) == (0 if reachable else 1)


@in_virtual_time
async def test_calls_of_another_run_and_calls_with_too_much_are_refused() -> None:
    async with GossipSwarm(25) as swarm:
        await joined(swarm.start("peer-0:1"))
        stranger = swarm.network.transport("stranger:1")
        record = Record(KEY, "a:1", b"", 1, in_an_hour(), owner=bytes(32), claimed=1)
        with pytest.raises(CallRefusedError, match="belongs to run 'run', not to 'another'"):
            await stranger.push("peer-0:1", "another", (Rumour(record),))
        for stream in (stranger.exchange, stranger.subscribe):
            with pytest.raises(CallRefusedError, match="belongs to run"):
                async with aclosing(stream("peer-0:1", Digest("another", "", 0))) as replies:
                    await anext(replies)
        with pytest.raises(CallRefusedError, match="too many"):
            await stranger.push("peer-0:1", RUN, (Rumour(record),) * 2000)
        entries = tuple((number, 1) for number in range(40_000))
        with pytest.raises(CallRefusedError, match="more than any peer may hold"):
            async with aclosing(stranger.exchange("peer-0:1", Digest(RUN, "", 1, entries, True))) as replies:
                await anext(replies)
