"""Gossip between peers that join, leave, die, return, or are cut off, in virtual time, and what is logged."""

import asyncio
import logging
from collections.abc import AsyncGenerator

import pytest

from averaging.discovery.gossip.bootstrap import DEFINITE_SECONDS
from averaging.discovery.gossip.membership import GossipSettings
from averaging.errors import CallRefusedError, ClosedError, JoinError
from averaging.protocol.messages import Digest, ExchangeReply
from averaging.testing import virtual_time
from tests.support.gossip_swarm import (
    KEY,
    NO_AVERAGING,
    PEERS,
    GossipSwarm,
    everywhere,
    in_an_hour,
    joined,
    members,
    now,
    until,
)
from tests.support.simulated import in_virtual_time


@in_virtual_time
async def test_a_killed_peer_and_its_records_vanish_at_all_others() -> None:
    async with GossipSwarm(10) as swarm:
        peers = await swarm.grow(16)
        await peers[3].store(KEY, "peer-3:1", b"", virtual_time.clock() + 20)
        await until(everywhere(peers, KEY, {"peer-3:1"}), within=1)
        await swarm.kill("peer-3:1")
        rest = peers[:3] + peers[4:]
        assert everywhere(rest, KEY, {"peer-3:1"})()
        await until(everywhere(rest, KEY, set()), within=20)
        names = {f"peer-{number}:1" for number in range(16)} - {"peer-3:1"}
        await until(everywhere(rest, PEERS, names), within=swarm.settings.peer_lifetime)
        assert not any(peer.knows("peer-3:1") for peer in rest)


@in_virtual_time
async def test_the_presence_record_of_a_peer_whose_port_refuses_goes_at_once_and_reaches_no_newcomer() -> None:
    async with GossipSwarm(53) as swarm:
        rest = (await swarm.grow(3))[:2]
        await swarm.kill("peer-2:1")
        await until(everywhere(rest, PEERS, {"peer-0:1", "peer-1:1"}), within=15)
        await joined(swarm.start("newcomer:1", ["peer-1:1"]))
        for _ in range(200):
            await asyncio.sleep(0.1)
            assert not any("peer-2:1" in members(host.discovery) for host in swarm.hosts.values())


@in_virtual_time
async def test_a_live_peer_whose_port_refused_for_a_moment_is_back_with_its_next_sign_of_life() -> None:
    async with GossipSwarm(54) as swarm:
        peers = await swarm.grow(2)
        swarm.network.refuse("peer-0:1", "peer-1:1")
        await peers[0].store(KEY, "peer-0:1", b"", in_an_hour())  # which it sends to the other
        await until(lambda: members(peers[0]) == {"peer-0:1"}, within=1)
        swarm.network.heal()
        await until(lambda: members(peers[0]) == {"peer-0:1", "peer-1:1"}, within=10 + 3)


@in_virtual_time
async def test_a_peer_without_a_presence_record_is_not_listed_although_other_records_of_it_last() -> None:
    async with GossipSwarm(5) as swarm:
        first, second = await swarm.grow(2)
        await second.store(KEY, "peer-1:1", b"", in_an_hour())
        await until(everywhere([first], KEY, {"peer-1:1"}), within=1)
        swarm.network.freeze("peer-1:1")
        lifetime = swarm.settings.peer_lifetime
        await until(lambda: first.endpoints() == {"peer-0:1"}, within=lifetime + 1)
        assert set(first.get(KEY)) == {"peer-1:1"}
        swarm.network.thaw("peer-1:1")
        await until(lambda: first.endpoints() == {"peer-0:1", "peer-1:1"}, within=lifetime)


@in_virtual_time
async def test_what_is_being_withdrawn_as_a_peer_leaves_is_gone_too() -> None:
    async with GossipSwarm(60, latency=(0.01, 0.01)) as swarm:
        (first,) = await swarm.grow(1)
        for moment in range(10):  # the withdrawal waits, is being sent, or has arrived
            name = f"peer-{moment + 1}:1"
            await joined(swarm.start(name, ["peer-0:1"]))
            await swarm[name].store(KEY, name, b"", in_an_hour())
            await until(everywhere([first], KEY, {name}), within=1)
            await swarm[name].withdraw(KEY, name)
            await asyncio.sleep(moment * swarm.settings.tick / 2)
            await swarm.stop(name)
            assert not first.knows(name)


@in_virtual_time
async def test_a_peer_that_leaves_is_gone_at_once() -> None:
    async with GossipSwarm(11) as swarm:
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


@pytest.mark.parametrize("gap", [-3.0, 0.0, 3.0])
@in_virtual_time
async def test_two_peers_that_know_only_each_other_find_each_other_in_either_order(gap: float) -> None:
    async with GossipSwarm(12) as swarm:
        first, second = ("a:1", "b:1") if gap < 0 else ("b:1", "a:1")
        one = swarm.start(first, [second])
        await asyncio.sleep(abs(gap))
        assert not one.joined.is_set()
        other = swarm.start(second, [first])
        await joined(one)
        await joined(other)
        assert now() - abs(gap) < 0.5
        await until(everywhere([one.discovery, other.discovery], PEERS, {"a:1", "b:1"}), within=1)


@in_virtual_time
async def test_one_live_seed_is_enough_and_the_own_address_is_not_one() -> None:
    async with GossipSwarm(13) as swarm:
        await joined(swarm.start("a:1", ["a:1"]))
        swarm.network.freeze("frozen:1")
        await joined(swarm.start("b:1", ["dead:1", "frozen:1", "b:1", "a:1"]))
        assert now() < 0.2
        assert members(swarm["b:1"]) >= {"a:1", "b:1"}


@in_virtual_time
async def test_seeds_that_all_fail_are_named_with_the_reasons_in_time() -> None:
    async with GossipSwarm(14) as swarm:
        await joined(swarm.start("other:1", run_id="another"))
        swarm.network.freeze("frozen:1")
        host = swarm.start("a:1", ["dead:1", "other:1", "frozen:1"], join_timeout=3.0)
        with pytest.raises(JoinError) as caught:
            await joined(host)
        assert now() == pytest.approx(3.0, abs=0.1)
        assert caught.value.reasons == {
            "dead:1": "connection refused",
            "other:1": "the called peer belongs to run 'another', not to 'run'; give both peers the same run id",
            "frozen:1": "no answer",
        }
        assert "dead:1: connection refused; other:1: the called peer belongs to run 'another', not to 'run'; " in str(
            caught.value
        )
        del swarm.hosts["a:1"]
        # All tasks have ended: no seed is called any more.
        calls = swarm.network.calls["exchange"]
        await asyncio.sleep(20)
        assert swarm.network.calls["exchange"] == calls


@in_virtual_time
async def test_a_partitioned_run_becomes_one_again() -> None:
    async with GossipSwarm(16) as swarm:
        peers = await swarm.grow(32)
        names = list(swarm.hosts)
        left, right = frozenset(names[:16]), frozenset(names[16:])
        swarm.network.cut(left, right)
        # Much longer than the lifetime of a presence record
        await until(lambda: all(members(swarm[name]) == set(left) for name in left), within=60)
        await until(lambda: all(members(swarm[name]) == set(right) for name in right), within=60)
        await peers[0].store(KEY, "left:1", b"", in_an_hour())
        await peers[31].store(KEY, "right:1", b"", in_an_hour())
        await until(everywhere(peers[:16], KEY, {"left:1"}), within=10)
        swarm.network.heal()
        await until(everywhere(peers, PEERS, set(names)), within=30, step=0.1)
        await until(everywhere(peers, KEY, {"left:1", "right:1"}), within=10)


@in_virtual_time
async def test_a_restarted_peer_takes_its_places_when_the_old_records_expire(caplog: pytest.LogCaptureFixture) -> None:
    async with GossipSwarm(18) as swarm:
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


@in_virtual_time
async def test_a_peer_that_cancels_joining_is_withdrawn_and_can_return(caplog: pytest.LogCaptureFixture) -> None:
    """A seed may have its presence record by then, and would keep it until it expires."""
    pushed: list[int] = []

    async def join_for(milliseconds: int) -> None:
        async with GossipSwarm(23) as swarm:
            [seed] = await swarm.grow(1)
            leaving = swarm.start("a:1", ["peer-0:1"])
            await asyncio.sleep(milliseconds / 1000)
            if not leaving.joined.is_set() and "a:1" in members(seed):
                pushed.append(milliseconds)
            leaving.task.cancel()
            await asyncio.wait([leaving.task])
            await asyncio.sleep(0.1)
            assert members(seed) == {"peer-0:1"}
            await joined(swarm.start("a:1", ["peer-0:1"]))
            await until(lambda: "a:1" in members(seed), 1.0)

    for milliseconds in range(1, 120, 3):
        await join_for(milliseconds)
    assert pushed
    assert caplog.messages == []


@in_virtual_time
async def test_a_leaving_peer_writes_no_more_records() -> None:
    """They would outlive the peer, and the others would take it for a member."""
    async with GossipSwarm(settings=GossipSettings(peer_refresh=0.3)) as swarm:
        await swarm.grow(3)
        swarm.network.freeze("peer-2:1")  # so that leaving takes a while
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


@pytest.mark.parametrize("endpoint", ["a:1", None], ids=["node", "client"])
@in_virtual_time
async def test_a_wrong_run_ends_the_join_at_once(endpoint: str | None) -> None:
    async with GossipSwarm(50) as swarm:
        await joined(swarm.start("x:1", run_id="another"))
        await joined(swarm.start("y:1", run_id="another"))
        began = now()
        host = swarm.start(endpoint, ["x:1", "y:1"], join_timeout=60.0)
        with pytest.raises(JoinError, match="cannot be in one run as they are configured") as caught:
            await joined(host)
        assert DEFINITE_SECONDS <= now() - began < 2
        assert set(caught.value.reasons) == {"x:1", "y:1"}
        for reason in caught.value.reasons.values():
            assert reason == "the called peer belongs to run 'another', not to 'run'; give both peers the same run id"
        swarm.hosts.pop(host.transport.endpoint)


@in_virtual_time
async def test_one_wrong_seed_does_not_fail_the_join_while_another_may_answer() -> None:
    async with GossipSwarm(51) as swarm:
        await joined(swarm.start("wrong:1", run_id="another"))
        host = swarm.start("a:1", ["wrong:1", "late:1"], join_timeout=20.0)
        await asyncio.sleep(15)
        assert not host.task.done()
        await joined(swarm.start("late:1"))
        await joined(host)
        assert now() < 19
        assert members(swarm["a:1"]) >= {"a:1", "late:1"}


# What is logged meanwhile


# Clocks


class Broken:
    """A seed that begins to answer and fails; its clock is far off."""

    async def exchange(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        if digest.complete:
            raise CallRefusedError("", "is broken")
        yield ExchangeReply(differs=True, sent=virtual_time.clock() - 75)


@in_virtual_time
async def test_the_error_names_clocks_that_differ_too_much_if_no_seed_answered() -> None:
    async with GossipSwarm(56) as swarm:
        await swarm.network.transport("broken:1").serve(NO_AVERAGING, Broken())  # type: ignore[arg-type]
        host = swarm.start("a:1", ["broken:1"], join_timeout=2.0)
        with pytest.raises(JoinError) as caught:
            await joined(host)
        assert "(broken:1: is broken)" in str(caught.value)
        hint = (
            "The clocks are too far apart: that of broken:1 is 75 s behind this peer's; set them, for example with NTP."
        )
        assert str(caught.value).endswith(hint)
        del swarm.hosts["a:1"]
