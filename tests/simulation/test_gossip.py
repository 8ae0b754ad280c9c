"""Gossip between many peers in virtual time: what is stored is read everywhere, whatever the network does."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from averaging.discovery.gossip import GossipDiscovery, peers_key
from averaging.discovery.identity import Author, Ed25519Identity, UnsignedIdentity
from averaging.discovery.records import Limits, Reason
from averaging.discovery.settings import GossipSettings
from averaging.errors import CallRefusedError, ClosedError, ConfigError, NoSeedAnsweredError
from averaging.messages import Digest, Record, Rumour
from averaging.transport import virtual_time
from tests.simulation.gossip_swarm import KEY, RUN, GossipSwarm, everywhere, joined, members, now, until

PEERS = peers_key(RUN)


def in_an_hour() -> float:
    return virtual_time.clock() + 3500


# Spreading


@pytest.mark.parametrize("count", [2, 8, 64])
def test_a_fresh_record_reaches_everybody_with_one_message_each(count: int) -> None:
    swarm = GossipSwarm(1, settings=GossipSettings(exchange_interval=1e6))

    async def main() -> None:
        peers = await swarm.grow(count)
        assert everywhere(peers, PEERS, set(swarm.hosts))()
        before = swarm.network.calls["push"]
        await peers[-1].store(KEY, "peer-x:1", b"here", in_an_hour())
        seconds = await until(everywhere(peers, KEY, {"peer-x:1"}), within=1)
        hops = math.ceil(math.log(count, swarm.settings.fanout)) + 1
        assert seconds <= hops * (0.04 + swarm.settings.tick) + 0.01
        assert swarm.network.calls["push"] - before == count - 1

    swarm.simulate(main())


def test_what_is_stored_in_one_tick_is_told_in_one_message_each() -> None:
    swarm = GossipSwarm(1, settings=GossipSettings(exchange_interval=1e6))

    async def main() -> None:
        peers = await swarm.grow(16)
        before = swarm.network.calls["push"]
        for number in range(20):
            await peers[3].store(KEY, f"a:{number + 1}", b"", in_an_hour())
        await until(everywhere(peers, KEY, {f"a:{number + 1}" for number in range(20)}), within=1)
        assert swarm.network.calls["push"] - before == 15

    swarm.simulate(main())


def test_what_all_store_at_once_all_read() -> None:
    swarm = GossipSwarm(2)

    async def main() -> None:
        peers = await swarm.grow(64)
        await asyncio.gather(
            *(peer.store(KEY, f"peer-{number}:1", b"%d" % number, in_an_hour()) for number, peer in enumerate(peers))
        )
        names = {f"peer-{number}:1" for number in range(64)}
        await until(everywhere(peers, KEY, names), within=3)
        for peer in peers:
            assert {entry.value for entry in peer.get(KEY).values()} == {b"%d" % number for number in range(64)}
            assert peer.endpoints() == names
            assert peer.names("peer-7:1")
            assert not peer.names("peer-64:1")

    swarm.simulate(main())


def test_exchanges_alone_bring_what_rumours_missed() -> None:
    swarm = GossipSwarm(3)

    async def main() -> None:
        peers = await swarm.grow(16)
        swarm.network.freeze("peer-5:1")
        await peers[0].store(KEY, "a:1", b"", in_an_hour())
        await asyncio.sleep(5)
        assert peers[5].get(KEY) == {}
        swarm.network.thaw("peer-5:1")
        await until(everywhere(peers, KEY, {"a:1"}), within=10)

    swarm.simulate(main())


@pytest.mark.parametrize("signed", [False, True])
def test_sixty_four_peers_converge_though_a_fifth_of_the_messages_is_lost(signed: bool) -> None:
    swarm = GossipSwarm(4, loss=0.2, settings=GossipSettings(tick=1.0))  # fewer messages, so that it is fast

    async def main() -> None:
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
        # A sign of life that is lost often may come after the one before has expired, but it comes.
        await until(everywhere(peers, PEERS, set(names)), within=10, step=1.0)

    swarm.simulate(main())


def test_dead_peers_do_not_cut_anybody_off_from_rumours() -> None:
    swarm = GossipSwarm(5, settings=GossipSettings(exchange_interval=1e6, peer_lifetime=1000.0))

    async def main() -> None:
        await swarm.grow(64)
        dead = swarm.rng.sample(sorted(swarm.hosts), 30)
        for name in dead:
            swarm.network.freeze(name) if swarm.rng.random() < 0.5 else await swarm.kill(name)
        living = [host.discovery for name, host in swarm.hosts.items() if name not in dead]
        await living[0].store(KEY, "a:1", b"", in_an_hour())
        await until(everywhere(living, KEY, {"a:1"}), within=swarm.settings.rumour_patience)

    swarm.simulate(main())


# Expiry, withdrawal, watching


def test_what_is_withdrawn_goes_everywhere_and_what_expires_goes_by_itself() -> None:
    swarm = GossipSwarm(6)

    async def main() -> None:
        peers = await swarm.grow(8)
        await peers[0].store(KEY, "a:1", b"", virtual_time.clock() + 5)
        await peers[1].store(KEY, "b:1", b"", in_an_hour())
        await until(everywhere(peers, KEY, {"a:1", "b:1"}), within=1)
        await peers[1].withdraw(KEY, "b:1")
        await peers[2].withdraw(KEY, "a:1")  # not its own
        await until(everywhere(peers, KEY, {"a:1"}), within=1)
        swarm.network.cut(*(frozenset([name]) for name in swarm.hosts))
        await until(everywhere(peers, KEY, set()), within=5)

    swarm.simulate(main())


def test_a_withdrawal_beats_the_old_record_that_arrives_late() -> None:
    swarm = GossipSwarm(7)

    async def main() -> None:
        a, b = await swarm.grow(2)
        await a.store(KEY, "a:1", b"", virtual_time.clock() + 10)
        (old,) = a.list_records(KEY)
        await a.withdraw(KEY, "a:1")
        await asyncio.sleep(1)
        assert await b.push(RUN, (Rumour(old),)) == ()
        assert b.get(KEY) == {}
        await asyncio.sleep(8.9)
        assert await b.push(RUN, (Rumour(old),)) == ()
        assert b.get(KEY) == {}

    swarm.simulate(main())


def test_watching_merges_changes_and_sees_expiry_at_its_moment() -> None:
    swarm = GossipSwarm(8)

    async def main() -> None:
        a, b = await swarm.grow(2)
        async with aclosing(b.watch(KEY)) as watching:
            assert await anext(watching) == {}
            expiration = virtual_time.clock() + 5
            for number in range(10):
                await a.store(KEY, "a:1", b"%d" % number, expiration)
            await a.store(KEY, "b:1", b"", in_an_hour())
            entries = await anext(watching)
            assert entries["a:1"].value == b"9"
            assert set(entries) == {"a:1", "b:1"}
            assert set(await anext(watching)) == {"b:1"}
            assert virtual_time.clock() == pytest.approx(expiration, abs=0.01)
            await a.withdraw(KEY, "b:1")
            assert await anext(watching) == {}

    swarm.simulate(main())


def test_watching_ends_when_the_discovery_is_left() -> None:
    swarm = GossipSwarm(9)

    async def main() -> None:
        (a,) = await swarm.grow(1)

        async def count() -> int:
            return len([entries async for entries in a.watch(KEY)])

        watcher = asyncio.create_task(count())
        await asyncio.sleep(1)
        await swarm.stop("peer-0:1")
        assert await watcher == 1
        with pytest.raises(ClosedError):
            await a.store(KEY, "a:1", b"", in_an_hour())
        await a.withdraw(KEY, "a:1")

    swarm.simulate(main())


# Coming and going


def test_a_killed_peer_and_its_records_vanish_at_all_others() -> None:
    swarm = GossipSwarm(10)

    async def main() -> None:
        peers = await swarm.grow(16)
        await peers[3].store(KEY, "peer-3:1", b"", virtual_time.clock() + 20)
        await until(everywhere(peers, KEY, {"peer-3:1"}), within=1)
        await swarm.kill("peer-3:1")
        rest = peers[:3] + peers[4:]
        assert everywhere(rest, KEY, {"peer-3:1"})()
        await until(everywhere(rest, KEY, set()), within=20)
        names = {f"peer-{number}:1" for number in range(16)} - {"peer-3:1"}
        await until(everywhere(rest, PEERS, names), within=swarm.settings.peer_lifetime)
        assert not any(peer.names("peer-3:1") for peer in rest)

    swarm.simulate(main())


def test_who_gives_no_sign_of_life_is_no_peer_any_more_though_other_records_of_it_last() -> None:
    swarm = GossipSwarm(5)

    async def main() -> None:
        first, second = await swarm.grow(2)
        await second.store(KEY, "peer-1:1", b"", in_an_hour())
        await until(everywhere([first], KEY, {"peer-1:1"}), within=1)
        swarm.network.freeze("peer-1:1")
        lifetime = swarm.settings.peer_lifetime
        await until(lambda: first.endpoints() == {"peer-0:1"}, within=lifetime + 1)
        assert set(first.get(KEY)) == {"peer-1:1"}
        swarm.network.thaw("peer-1:1")
        await until(lambda: first.endpoints() == {"peer-0:1", "peer-1:1"}, within=lifetime)

    swarm.simulate(main())


def test_a_peer_that_slept_through_its_own_expiry_is_back_at_once() -> None:
    """Its late sign of life is told; the exchanges would bring it only some time."""
    quiet = GossipSettings(exchange_interval=1000.0, retry_interval=1000.0)
    swarm = GossipSwarm(settings=quiet)

    async def main() -> None:
        await joined(swarm.start("a:1"))
        swarm.settings = replace(quiet, peer_lifetime=3.0)
        await joined(swarm.start("sleepy:1", ["a:1"]))
        await until(lambda: members(swarm["a:1"]) == {"a:1", "sleepy:1"}, 1)
        await until(lambda: members(swarm["a:1"]) == {"a:1"}, 3.5)
        await until(lambda: members(swarm["a:1"]) == {"a:1", "sleepy:1"}, 8)

    swarm.simulate(main())


def test_a_sign_of_life_that_finds_no_room_is_reported_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    swarm = GossipSwarm(settings=GossipSettings(limits=Limits(records=2), peer_lifetime=3.0))

    async def main() -> None:
        await joined(swarm.start("a:1"))
        await until(lambda: not members(swarm["a:1"]), 3.5)
        for number in range(2):
            await swarm["a:1"].store(KEY, f"{number}:1", b"", virtual_time.clock() + 8)
        await until(lambda: "cannot show the others that it is here" in caplog.text, 8)
        await until(lambda: members(swarm["a:1"]) == {"a:1"}, 11)

    swarm.simulate(main())


def test_a_peer_that_leaves_is_gone_at_once() -> None:
    swarm = GossipSwarm(11)

    async def main() -> None:
        peers = await swarm.grow(16)
        await peers[3].store(KEY, "peer-3:1", b"", in_an_hour())
        await until(everywhere(peers, KEY, {"peer-3:1"}), within=1)
        before = now()
        await swarm.stop("peer-3:1")
        assert now() - before <= swarm.settings.leave_timeout + 0.1
        rest = peers[:3] + peers[4:]
        names = {f"peer-{number}:1" for number in range(16)} - {"peer-3:1"}
        await until(everywhere(rest, PEERS, names), within=0.5)
        assert everywhere(rest, KEY, set())()

    swarm.simulate(main())


@pytest.mark.parametrize("gap", [-3.0, 0.0, 3.0])
def test_two_peers_that_know_only_each_other_find_each_other_in_either_order(gap: float) -> None:
    swarm = GossipSwarm(12)

    async def main() -> None:
        first, second = ("a:1", "b:1") if gap < 0 else ("b:1", "a:1")
        one = swarm.start(first, [second])
        await asyncio.sleep(abs(gap))
        assert not one.joined.is_set()
        other = swarm.start(second, [first])
        await joined(one)
        await joined(other)
        assert now() - abs(gap) < 0.5
        await until(everywhere([one.discovery, other.discovery], PEERS, {"a:1", "b:1"}), within=1)

    swarm.simulate(main())


def test_one_living_seed_is_enough_and_ones_own_address_is_none() -> None:
    swarm = GossipSwarm(13)

    async def main() -> None:
        await joined(swarm.start("a:1", ["a:1"]))
        swarm.network.freeze("frozen:1")
        await joined(swarm.start("b:1", ["dead:1", "frozen:1", "b:1", "a:1"]))
        assert now() < 0.2
        assert members(swarm["b:1"]) >= {"a:1", "b:1"}

    swarm.simulate(main())


def test_seeds_that_all_fail_are_named_with_the_reasons_in_time() -> None:
    swarm = GossipSwarm(14)

    async def main() -> None:
        await joined(swarm.start("other:1", run_id="another"))
        swarm.network.freeze("frozen:1")
        host = swarm.start("a:1", ["dead:1", "other:1", "frozen:1"], join_timeout=3.0)
        with pytest.raises(NoSeedAnsweredError) as caught:
            await joined(host)
        assert now() == pytest.approx(3.0, abs=0.1)
        assert caught.value.reasons == {
            "dead:1": "connection refused",
            "other:1": "other:1 belongs to run 'another', not to 'run'",
            "frozen:1": "no answer",
        }
        assert "dead:1: connection refused; other:1 belongs to run 'another', not to 'run'; " in str(caught.value)
        del swarm.hosts["a:1"]
        # What had been started is over: nobody asks any more.
        calls = swarm.network.calls["exchange"]
        await asyncio.sleep(20)
        assert swarm.network.calls["exchange"] == calls

    swarm.simulate(main())


def test_a_seed_that_comes_late_is_found() -> None:
    swarm = GossipSwarm(15)

    async def main() -> None:
        await joined(swarm.start("a:1"))
        await joined(swarm.start("b:1", ["a:1", "late:1"]))
        await asyncio.sleep(60)
        await joined(swarm.start("late:1"))
        everybody = [host.discovery for host in swarm.hosts.values()]
        await until(everywhere(everybody, PEERS, {"a:1", "b:1", "late:1"}), within=20)

    swarm.simulate(main())


def test_a_swarm_that_was_cut_in_two_becomes_one_again() -> None:
    swarm = GossipSwarm(16)

    async def main() -> None:
        peers = await swarm.grow(32)
        names = list(swarm.hosts)
        left, right = frozenset(names[:16]), frozenset(names[16:])
        swarm.network.cut(left, right)
        # Much longer than anybody is believed to live without a sign
        await until(lambda: all(members(swarm[name]) == set(left) for name in left), within=60)
        await until(lambda: all(members(swarm[name]) == set(right) for name in right), within=60)
        await peers[0].store(KEY, "left:1", b"", in_an_hour())
        await peers[31].store(KEY, "right:1", b"", in_an_hour())
        await until(everywhere(peers[:16], KEY, {"left:1"}), within=10)
        swarm.network.heal()
        await until(everywhere(peers, PEERS, set(names)), within=30, step=0.1)
        await until(everywhere(peers, KEY, {"left:1", "right:1"}), within=10)

    swarm.simulate(main())


def test_members_that_vanished_are_looked_for_even_without_a_seed() -> None:
    swarm = GossipSwarm(17)

    async def main() -> None:
        a, b = await swarm.grow(2)
        swarm.network.cut(frozenset(["peer-0:1"]))
        await until(lambda: members(a) == {"peer-0:1"} and members(b) == {"peer-1:1"}, within=60)
        await swarm.kill("peer-1:1")  # which had peer-0 as its seed
        await joined(swarm.start("peer-1:1"))
        await until(lambda: members(a) == {"peer-0:1", "peer-1:1"}, within=30)

    swarm.simulate(main())


def test_a_peer_restarted_at_the_same_address_takes_its_places_when_the_old_records_expire(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swarm = GossipSwarm(18)

    async def main() -> None:
        peers = await swarm.grow(8)
        await peers[3].store(KEY, "peer-3:1", b"old", virtual_time.clock() + 25)
        await until(everywhere(peers, KEY, {"peer-3:1"}), within=1)
        await swarm.kill("peer-3:1")
        await joined(swarm.start("peer-3:1", ["peer-0:1"]))
        peers[3] = swarm["peer-3:1"]
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            await peers[3].store(KEY, "peer-3:1", b"new", in_an_hour())
            await asyncio.sleep(10)
        own = [one for one in caplog.records if "restarted" in one.message and KEY in one.message]
        assert len(own) == 1
        assert all(peer.get(KEY)["peer-3:1"].value == b"old" for peer in peers)
        assert all("peer-3:1" in members(peer) for peer in peers)
        await until(lambda: all(peer.get(KEY)["peer-3:1"].value == b"new" for peer in peers), within=16)
        await asyncio.sleep(60)
        assert all("peer-3:1" in members(peer) for peer in peers)
        assert all(peer.get(KEY)["peer-3:1"].value == b"new" for peer in peers)

    swarm.simulate(main())


def test_two_owners_of_one_place_in_a_cut_network_end_with_one_everywhere() -> None:
    swarm = GossipSwarm(19)

    async def main() -> None:
        peers = await swarm.grow(8)
        names = list(swarm.hosts)
        swarm.network.cut(frozenset(names[:4]), frozenset(names[4:]))
        await peers[5].store(KEY, "x:1", b"first", in_an_hour())
        await asyncio.sleep(0.1)
        await peers[2].store(KEY, "x:1", b"second", in_an_hour())
        await asyncio.sleep(1)
        await peers[2].store(KEY, "x:1", b"second, renewed", in_an_hour())
        await asyncio.sleep(5)
        assert {peer.get(KEY)["x:1"].value for peer in peers} == {b"first", b"second, renewed"}
        swarm.network.heal()
        await until(lambda: all(peer.get(KEY)["x:1"].value == b"first" for peer in peers), within=20)
        await asyncio.sleep(20)
        await peers[5].withdraw(KEY, "x:1")
        await until(lambda: all(peer.get(KEY)["x:1"].value == b"second, renewed" for peer in peers), within=1)

    swarm.simulate(main())


def test_a_bug_in_a_task_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = GossipSwarm(20)

    async def main() -> None:
        await swarm.grow(2)
        host = swarm.hosts.pop("peer-1:1")

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(host.discovery._members, "pick", broken)
        with pytest.raises(ExceptionGroup) as caught:
            await host.task
        assert caught.group_contains(ZeroDivisionError)

    swarm.simulate(main())


def test_an_error_in_the_body_is_not_wrapped_and_a_cancellation_goes_through() -> None:
    swarm = GossipSwarm(21)

    async def main() -> None:
        for error in (KeyError("mine"), asyncio.CancelledError()):
            swarm.start("a:1")
            discovery = swarm["a:1"]
            await swarm.stop("a:1")
            transport = swarm.network.transport("b:1")
            discovery = GossipDiscovery(RUN, "b:1", transport, clock=virtual_time.clock)
            with pytest.raises(type(error)):
                async with discovery:
                    raise error

    swarm.simulate(main())


def test_who_gives_up_while_it_joins_is_gone_and_can_come_back_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """A seed may have its record by then, and would have it for as long as that of a peer that was killed."""
    pushed: list[float] = []

    def attempt(patience: float) -> None:
        swarm = GossipSwarm(23)

        async def main() -> None:
            [seed] = await swarm.grow(1)
            leaving = swarm.start("a:1", ["peer-0:1"])
            await asyncio.sleep(patience)
            if not leaving.joined.is_set() and "a:1" in members(seed):
                pushed.append(patience)
            leaving.task.cancel()
            await asyncio.wait([leaving.task])
            await asyncio.sleep(0.1)
            assert members(seed) == {"peer-0:1"}
            await joined(swarm.start("a:1", ["peer-0:1"]))
            await until(lambda: "a:1" in members(seed), 1.0)

        swarm.simulate(main())

    for milliseconds in range(1, 120, 3):
        attempt(milliseconds / 1000)
    assert pushed
    assert caplog.messages == []


def test_nothing_is_written_any_more_by_a_peer_that_is_leaving() -> None:
    """It would outlive the peer: the others would take it for one that is there."""
    swarm = GossipSwarm(settings=GossipSettings(peer_refresh=0.3))

    async def main() -> None:
        await swarm.grow(3)
        swarm.network.freeze("peer-2:1")  # so that it takes a while until all have been told
        leaving, start = swarm["peer-1:1"], now()
        stopping = asyncio.create_task(swarm.stop("peer-1:1"))
        await until(lambda: "peer-1:1" not in members(leaving), 1.0)
        with pytest.raises(ClosedError):
            await leaving.store(KEY, "peer-1:1", b"", virtual_time.clock() + 60.0)
        await stopping
        assert now() - start > 0.5
        assert "peer-1:1" not in members(leaving)
        assert "peer-1:1" not in members(swarm["peer-0:1"])
        swarm.network.thaw("peer-2:1")

    swarm.simulate(main())


def test_leaving_a_frozen_network_ends_in_time() -> None:
    swarm = GossipSwarm(22)

    async def main() -> None:
        await swarm.grow(8)
        for number in range(1, 8):
            swarm.network.freeze(f"peer-{number}:1")
        before = now()
        await swarm.stop("peer-0:1")
        assert swarm.settings.leave_timeout <= now() - before < swarm.settings.leave_timeout + 0.2

    swarm.simulate(main())


# What is not believed


def push_from(swarm: GossipSwarm, *records: Record) -> asyncio.Task[list[str]]:
    async def push() -> list[str]:
        stranger = swarm.network.transport("stranger:1")
        refusals = await stranger.push("peer-0:1", RUN, tuple(Rumour(record) for record in records))
        return [refusal.reason for refusal in refusals]

    return asyncio.create_task(push())


def test_forged_foreign_and_oversized_records_are_refused_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    swarm = GossipSwarm(23)

    async def main() -> None:
        await joined(swarm.start("peer-0:1", identity=Ed25519Identity()))
        peer = swarm["peer-0:1"]
        await peer.store(KEY, "mine:1", b"mine", in_an_hour())
        stranger = Author(RUN, Ed25519Identity(), Limits())
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

    swarm.simulate(main())


def test_a_peer_is_told_that_others_refuse_its_records(caplog: pytest.LogCaptureFixture) -> None:
    swarm = GossipSwarm(30)

    async def main() -> None:
        await joined(swarm.start("peer-0:1"))
        swarm.settings = GossipSettings(limits=Limits(records_per_owner=1000))  # the second peer's own idea of a limit
        await joined(swarm.start("peer-1:1", ["peer-0:1"]))
        for number in range(300):
            await swarm["peer-1:1"].store(KEY, f"a:{number}", b"", in_an_hour())
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(1)
        told = [one.message for one in caplog.records if "peer-0:1 refuses this peer's record" in one.message]
        assert len(told) == 1
        assert Reason.OWNER_FULL in told[0]
        assert len(swarm["peer-0:1"].get(KEY)) == 255

    swarm.simulate(main())


@pytest.mark.parametrize(("ahead", "told"), [(-600.0, [Reason.EXPIRED]), (0.0, [])])
def test_a_peer_is_told_that_its_clock_is_behind_and_not_that_a_record_was_late(
    caplog: pytest.LogCaptureFixture, ahead: float, told: list[Reason]
) -> None:
    swarm = GossipSwarm(31, latency=(0.01, 0.02))
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        await joined(swarm.start("peer-0:1"))
        await joined(swarm.start("peer-1:1", ["peer-0:1"], clock=lambda: virtual_time.clock() + ahead))
        await asyncio.sleep(11)  # since the last complaint, about its presence
        caplog.clear()
        now = virtual_time.clock() + ahead
        await swarm["peer-1:1"].store(KEY, "a:1", b"", now + 0.01)
        await asyncio.sleep(0.008)  # it is on its way, and has expired when it arrives
        await swarm["peer-1:1"].store(KEY, "a:1", b"", now + 60)
        await asyncio.sleep(1)

    swarm.simulate(main())
    found = [one.message for one in caplog.records if "refuses this peer's record of 'a:1'" in one.message]
    assert [reason for message in found for reason in Reason if message.endswith(reason)] == told


@pytest.mark.parametrize("reachable", [True, False])
def test_a_peer_is_told_that_others_do_not_reach_it(caplog: pytest.LogCaptureFixture, reachable: bool) -> None:
    swarm = GossipSwarm(32)
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        await swarm.grow(2)
        behind = swarm.start("behind:1", ["peer-0:1"])
        await joined(behind)
        if not reachable:  # it goes on calling, and nothing arrives at its own port, as behind a firewall
            await behind.transport.close()
        await asyncio.sleep(300)

    swarm.simulate(main())
    told = [one.message for one in caplog.records if "can they reach behind:1?" in one.message]
    assert len(told) == (0 if reachable else 1)


def test_records_over_the_bounds_are_refused_and_live_ones_stay() -> None:
    swarm = GossipSwarm(24, settings=GossipSettings(limits=Limits(records=20, records_per_owner=10)))

    async def main() -> None:
        await joined(swarm.start("peer-0:1"))
        clock = virtual_time.clock()
        reasons = []
        for _ in range(3):
            author = Author(RUN, UnsignedIdentity(swarm.rng), Limits())
            written = [author.write(KEY, f"{n}:1", b"", clock + 9, clock, None) for n in range(11)]
            reasons.append(set(await push_from(swarm, *written)) - {Reason.FOREIGN})
        assert reasons == [{Reason.OWNER_FULL}, {Reason.OWNER_FULL, Reason.FULL}, {Reason.FULL}] or reasons == [
            {Reason.OWNER_FULL},
            {Reason.FULL},
            {Reason.FULL},
        ]
        assert len(swarm["peer-0:1"].get(KEY)) == 10
        assert members(swarm["peer-0:1"]) == {"peer-0:1"}

    swarm.simulate(main())


def test_callers_of_another_run_and_callers_without_measure_are_refused() -> None:
    swarm = GossipSwarm(25)

    async def main() -> None:
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

    swarm.simulate(main())


def test_nobody_can_make_the_run_repeat_a_rumour() -> None:
    swarm = GossipSwarm(26, settings=GossipSettings(exchange_interval=1e6))

    async def main() -> None:
        peers = await swarm.grow(8)
        await asyncio.sleep(1)
        before = swarm.network.calls["push"]
        clock = virtual_time.clock()
        record = Author(RUN, UnsignedIdentity(swarm.rng), Limits()).write(KEY, "a:1", b"", clock + 100, clock, None)
        stranger = swarm.network.transport("stranger:1")
        for _ in range(20):
            for name in swarm.hosts:
                await stranger.push(name, RUN, (Rumour(record, 1, 2**64 - 1),))
        await until(everywhere(peers, KEY, {"a:1"}), within=1)
        await asyncio.sleep(5)
        pushed_by_peers = swarm.network.calls["push"] - before - 160
        assert pushed_by_peers <= 8 * (swarm.settings.fanout + 1)

    swarm.simulate(main())


def test_a_name_that_is_no_endpoint_is_no_peer() -> None:
    with pytest.raises(ConfigError, match="cannot be a peer's name"):
        GossipDiscovery(RUN, "nowhere", GossipSwarm().network.transport("nowhere"))


# Clients


def test_a_client_reads_and_stores_through_a_member_and_turns_to_another_when_that_dies() -> None:
    swarm = GossipSwarm(27)

    async def main() -> None:
        peers = await swarm.grow(8)
        host = swarm.start(None, ["peer-0:1"])
        await joined(host)
        client = host.discovery
        assert members(client) == {f"peer-{number}:1" for number in range(8)}
        await asyncio.sleep(1)
        await peers[3].store(KEY, "peer-3:1", b"", in_an_hour())
        await until(everywhere([client], KEY, {"peer-3:1"}), within=0.5)
        await client.store(KEY, "from-client:1", b"", in_an_hour())
        await until(everywhere([*peers, client], KEY, {"peer-3:1", "from-client:1"}), within=1)
        for _ in range(4):  # whomever it follows is dead in the end
            followed = client._members.followed
            assert followed is not None
            await swarm.kill(followed)
            name = f"after-{followed}"
            await next(iter(swarm.hosts.values())).discovery.store(KEY, name, b"", in_an_hour())
            await until(lambda name=name: name in client.get(KEY), within=10)  # type: ignore[misc]
            await until(lambda: client._members.followed is not None, within=10)
        await swarm.stop(host.transport.endpoint)
        rest = [one.discovery for one in swarm.hosts.values()]
        await until(lambda: not any(peer.names("from-client:1") for peer in rest), within=3)

    swarm.simulate(main())


def test_a_client_leaves_a_member_that_falls_silent() -> None:
    swarm = GossipSwarm(28)

    async def main() -> None:
        peers = await swarm.grow(3)
        host = swarm.start(None, ["peer-0:1"])
        await joined(host)
        await until(lambda: host.discovery._members.followed is not None, within=1)
        followed = host.discovery._members.followed
        assert followed is not None
        swarm.network.freeze(followed)
        other = next(peer for name, peer in zip(swarm.hosts, peers, strict=False) if name != followed)
        await other.store(KEY, "a:1", b"", in_an_hour())
        await until(everywhere([host.discovery], KEY, {"a:1"}), within=2 * swarm.settings.peer_refresh + 15)
        swarm.network.thaw(followed)

    swarm.simulate(main())


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("refuses", [False, True])
def test_a_client_asks_a_member_that_gives_it_no_stream_more_and_more_seldom(
    monkeypatch: pytest.MonkeyPatch, begins: bool, refuses: bool
) -> None:
    """Though it answers comparisons, as one without `Subscribe` does, or behind what cuts streams that have begun."""
    swarm = GossipSwarm(28)
    asked: list[float] = []

    async def end(peer: GossipDiscovery, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        asked.append(now())
        if begins:
            yield ()
        if refuses:
            raise CallRefusedError("peer-0:1", "does not serve this")

    monkeypatch.setattr(GossipDiscovery, "subscribe", end)

    async def main() -> None:
        await swarm.grow(1)
        await joined(swarm.start(None, ["peer-0:1"]))
        await asyncio.sleep(20)

    swarm.simulate(main())
    assert 5 < len(asked) < 25


def test_a_client_that_reads_too_slowly_is_cut_off() -> None:
    swarm = GossipSwarm(29, settings=GossipSettings(follower_backlog=10, most_followers=1))

    async def main() -> None:
        (peer,) = await swarm.grow(1)
        stranger = swarm.network.transport("stranger:1")
        async with aclosing(stranger.subscribe("peer-0:1", Digest(RUN, "", 0))) as stream:
            assert len(await anext(stream)) == 1
            with pytest.raises(CallRefusedError, match="try another peer"):
                async with aclosing(stranger.subscribe("peer-0:1", Digest(RUN, "", 0))) as second:
                    await anext(second)
            for number in range(11):
                await peer.store(KEY, f"a:{number}", b"", in_an_hour())
            with pytest.raises(CallRefusedError, match="too slow"):
                async for _ in stream:
                    pass
        await asyncio.sleep(1)
        async with aclosing(stranger.subscribe("peer-0:1", Digest(RUN, "", 0))) as stream:
            assert len(await anext(stream)) == 12

    swarm.simulate(main())


def test_it_is_entered_only_once() -> None:
    swarm = GossipSwarm()

    async def main() -> None:
        await joined(swarm.start("a:1"))
        with pytest.raises(ClosedError, match="only once"):
            await swarm["a:1"].__aenter__()

    swarm.simulate(main())


def test_a_client_needs_somebody_to_join() -> None:
    with pytest.raises(ConfigError, match="needs a peer to join"):
        GossipDiscovery(RUN, "client::x", GossipSwarm().network.transport(None))
