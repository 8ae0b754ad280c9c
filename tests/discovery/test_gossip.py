"""Gossip between many peers in virtual time: stored records reach all over a bad network, and which are refused."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from averaging.discovery.gossip import GossipDiscovery
from averaging.discovery.gossip.membership import GossipSettings
from averaging.discovery.gossip.record import Author, Ed25519Identity, Reason, RecordLimits
from averaging.errors import CallRefusedError
from averaging.protocol.messages import Digest, ExchangeReply, Record, Rumour
from averaging.testing import virtual_time
from tests.support.gossip_swarm import KEY, PEERS, RUN, GossipSwarm, everywhere, in_an_hour, joined, now, until
from tests.support.selection import rest_is_long
from tests.support.simulated import in_virtual_time

# Spreading


@pytest.mark.parametrize("count", [2, 8, pytest.param(64, marks=pytest.mark.long)])
@in_virtual_time
async def test_a_new_record_reaches_every_peer_with_one_message_each(count: int) -> None:
    async with GossipSwarm(1, settings=GossipSettings(exchange_interval=1e6)) as swarm:
        peers = await swarm.grow(count)
        assert everywhere(peers, PEERS, set(swarm.hosts))()
        before = swarm.network.calls["push"]
        await peers[-1].store(KEY, "peer-x:1", b"here", in_an_hour())
        seconds = await until(everywhere(peers, KEY, {"peer-x:1"}), within=1)
        hops = math.ceil(math.log(count, swarm.settings.fanout)) + 1
        assert seconds <= hops * (0.04 + swarm.settings.tick) + 0.01
        assert swarm.network.calls["push"] - before == count - 1


@in_virtual_time
async def test_peers_that_hold_the_same_compare_a_hash_and_no_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    complete: list[bool] = []
    exchange = GossipDiscovery.exchange

    def noted(peer: GossipDiscovery, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        complete.append(digest.complete)
        return exchange(peer, digest)

    monkeypatch.setattr(GossipDiscovery, "exchange", noted)
    async with GossipSwarm(1, settings=GossipSettings(exchange_interval=0.1)) as swarm:
        await swarm.grow(3)
        await asyncio.sleep(1.0)
        complete.clear()
        await asyncio.sleep(1.0)
    assert complete
    assert not any(complete)


@in_virtual_time
async def test_exchanges_bring_what_rumours_missed() -> None:
    async with GossipSwarm(3) as swarm:
        peers = await swarm.grow(16)
        swarm.network.freeze("peer-5:1")
        await peers[0].store(KEY, "a:1", b"", in_an_hour())
        await asyncio.sleep(5)
        assert peers[5].get(KEY) == {}
        swarm.network.thaw("peer-5:1")
        await until(everywhere(peers, KEY, {"a:1"}), within=10)


@pytest.mark.parametrize("signed", rest_is_long([False, True]))
@in_virtual_time
async def test_sixty_four_peers_converge_although_a_fifth_of_the_messages_is_lost(signed: bool) -> None:
    async with GossipSwarm(
        4, loss=0.2, settings=GossipSettings(tick=1.0)
    ) as swarm:  # fewer messages, so that it is fast
        names = [f"peer-{number}:1" for number in range(64)]
        for number, name in enumerate(names):
            identity = Ed25519Identity(number.to_bytes(32, "little")) if signed else None
            seeds = [names[number // 2]] if number else []
            host = swarm.start(name, seeds, identity=identity, join_timeout=60.0)
            if number % 16 == 0:  # the others join meanwhile
                await joined(host)
        await asyncio.gather(*(joined(host) for host in swarm.hosts.values()))
        peers = [swarm[name] for name in names]
        await until(everywhere(peers, PEERS, set(names)), within=20, step=1.0)
        for number in range(8):
            await peers[number].store(KEY, names[number], b"", in_an_hour())
        await until(everywhere(peers, KEY, set(names[:8])), within=20, step=1.0)
        for number in range(4):
            await peers[number].withdraw(KEY, names[number])
        await until(everywhere(peers, KEY, set(names[4:8])), within=20, step=1.0)
        await asyncio.sleep(max(0.0, swarm.settings.peer_lifetime - now()))
        # A renewal may be lost so often that the record before it expires, but it arrives.
        await until(everywhere(peers, PEERS, set(names)), within=10, step=1.0)


@in_virtual_time
async def test_dead_peers_cut_no_peer_off_from_rumours() -> None:
    async with GossipSwarm(5, settings=GossipSettings(exchange_interval=1e6, peer_lifetime=1000.0)) as swarm:
        await swarm.grow(64)
        dead = swarm.rng.sample(sorted(swarm.hosts), 30)
        for name in dead:
            swarm.network.freeze(name) if swarm.rng.random() < 0.5 else await swarm.kill(name)
        living = [host.discovery for name, host in swarm.hosts.items() if name not in dead]
        await living[0].store(KEY, "a:1", b"", in_an_hour())
        await until(everywhere(living, KEY, {"a:1"}), within=swarm.settings.rumour_timeout)


# Expiration, withdrawal, watching


@in_virtual_time
async def test_a_withdrawal_reaches_all_peers_and_an_expiration_needs_no_message() -> None:
    async with GossipSwarm(6) as swarm:
        peers = await swarm.grow(8)
        await peers[0].store(KEY, "a:1", b"", virtual_time.clock() + 5)
        await peers[1].store(KEY, "b:1", b"", in_an_hour())
        await until(everywhere(peers, KEY, {"a:1", "b:1"}), within=1)
        await peers[1].withdraw(KEY, "b:1")
        await peers[2].withdraw(KEY, "a:1")  # not its own
        await until(everywhere(peers, KEY, {"a:1"}), within=1)
        swarm.network.cut(*(frozenset([name]) for name in swarm.hosts))
        await until(everywhere(peers, KEY, set()), within=5)


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
