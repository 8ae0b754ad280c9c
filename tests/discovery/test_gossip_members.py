"""Which peers are members, suspected or tried again, how a broadcast reaches all, and rumours to the silent."""

import asyncio
import math
import random
from collections import Counter, deque
from typing import cast

from hypothesis import given, strategies as st

from averaging.discovery.gossip.membership import (
    RING,
    BroadcastBranch,
    BroadcastRing,
    GossipAccess,
    GossipSettings,
    Membership,
    all_others,
)
from averaging.discovery.gossip.rumours import Rumours
from averaging.protocol.messages import Record, Refusal, Rumour
from averaging.testing import virtual_time
from averaging.transport.base import Transport
from tests.support import leaks
from tests.support.simulated import in_virtual_time

OWN = "own:1"
NOBODY = cast(Transport, None)


def members(*seeds: str, endpoint: str = OWN, max_lost: int = 256) -> Membership:
    settings = GossipSettings(max_lost=max_lost)
    return Membership(GossipAccess("run", endpoint, NOBODY, settings, lambda: 0.0, random.Random(0)), seeds)


def test_only_endpoints_of_other_peers_are_members() -> None:
    several = members()
    for name in ("a:1", "b:1", OWN, "client::x", "no endpoint", "a:1", "c:0"):
        several.add(name)
    assert len(several) == 2
    assert {several.pick() for _ in range(50)} == {"a:1", "b:1"}
    assert members().pick() is None


def test_silent_peers_are_listed_with_the_reason_for_a_minute() -> None:
    several = members("seed:1")
    for name in ("a:1", "b:1", "c:1", "d:1"):
        several.add(name)
    for name in ("a:1", "b:1", "c:1", "d:1", "seed:1", "stranger:1"):
        several.suspect(name, 100.0, f"why {name}")
    several.note_answer("a:1")
    several.note_call("b:1", 100.0)  # a call from it does not prove that it can be called
    several.remove("c:1", 110.0, expired=False)
    several.remove("d:1", 110.0, expired=True)
    assert several.silent(120.0) == {name: f"why {name}" for name in ("b:1", "d:1", "seed:1")}
    several.add("d:1")
    several.suspect("b:1", 130.0, "why again")
    assert several.silent(165.0) == {"b:1": "why again"}


def test_a_member_whose_address_refuses_connections_is_gone_until_it_is_alive() -> None:
    several = members("seed:1", "other:1")
    for name in ("a:1", "seed:1"):
        several.add(name)
    for name in ("a:1", "seed:1", "other:1"):
        several.suspect(name, 100.0, "connection refused", refused=True)
    assert several.lost == {"a:1", "seed:1"}
    assert several.silent(101.0).keys() == {"a:1", "seed:1", "other:1"}  # their records may be those of live peers
    for name in ("a:1", "seed:1"):
        several.remove(name, 120.0, expired=True)
    for now in (130.0, 1000.0):
        several.pick_missing(now)
        several.suspect("seed:1", now, "connection refused", refused=True)
        several.suspect("other:1", now, "connection refused", refused=True)
        assert several.silent(now).keys() == {"other:1"}  # never seen: the address in `join` may be wrong
    several.suspect("seed:1", 1001.0, "no answer")
    assert several.silent(1001.0)["seed:1"] == "no answer"
    several.suspect("seed:1", 1002.0, "connection refused", refused=True)
    several.note_answer("seed:1")
    assert not several.lost
    assert several.silent(1003.0).keys() == {"other:1"}


def test_seeds_are_tried_again_until_they_are_members() -> None:
    several = members("a:1", "b:1", "a:1", OWN)
    assert several.seeds == ("a:1", "b:1")
    several.add("a:1")
    assert several.pick_missing(0.0) == ["b:1"]
    several.remove("a:1", 0.0, expired=False)
    assert several.pick_missing(0.0) == ["a:1", "b:1"]


def test_a_client_sends_through_the_source_of_its_stream() -> None:
    client = members("seed:1", endpoint="client::x")
    (branch,) = client.branches(1, RING - 1, 4)
    assert branch.candidates == ("seed:1",)
    for name in ("a:1", "b:1", "c:1"):
        client.add(name)
    client.stream_source = "b:1"
    client.suspect("a:1", 0.0, "no answer")
    (branch,) = client.branches(1, RING - 1, 4)
    assert (branch.start, branch.end) == (1, RING - 1)
    assert branch.candidates == ("b:1", "c:1", "a:1", "seed:1")


def names(count: int) -> list[str]:
    return [f"peer-{number}:1" for number in range(count)]


def spread(
    origin: str, views: dict[str, BroadcastRing], fanout: int, dead: frozenset[str] = frozenset()
) -> tuple[Counter[str], int]:
    """Simulates a broadcast; returns the messages to each peer, and the number of hops to the last one."""
    reached: Counter[str] = Counter()
    last = 0
    waiting = deque([(origin, *all_others(origin), 0)])
    while waiting:
        endpoint, start, end, hops = waiting.popleft()
        last = max(last, hops)
        for branch in views[endpoint].branches(endpoint, start, end, fanout):
            target = next((name for name in branch.candidates if name not in dead), None)
            if target is not None:
                reached[target] += 1
                waiting.append((target, branch.start, branch.end, hops + 1))
    return reached, last


@given(st.integers(1, 120), st.integers(2, 6), st.integers(0, 119))
def test_every_peer_is_reached_exactly_once(count: int, fanout: int, origin: int) -> None:
    peers = names(count)
    ring = BroadcastRing(peers)
    reached, hops = spread(peers[origin % count], dict.fromkeys(peers, ring), fanout)
    assert reached == Counter(set(peers) - {peers[origin % count]})
    assert hops <= math.ceil(math.log(count, fanout)) + 1


@given(st.integers(2, 80), st.integers(2, 6), st.data())
def test_dead_peers_do_not_cut_off_live_ones(count: int, fanout: int, data: st.DataObject) -> None:
    peers = names(count)
    dead = frozenset(data.draw(st.sets(st.sampled_from(peers[1:]))))
    reached, _ = spread(peers[0], dict.fromkeys(peers, BroadcastRing(peers)), fanout, dead)
    assert reached == Counter(set(peers[1:]) - dead)


@given(st.integers(2, 60), st.integers(2, 5), st.integers(0, 2**32))
def test_a_broadcast_over_different_views_ends_and_reaches_no_peer_twice(count: int, fanout: int, seed: int) -> None:
    peers, rng = names(count), random.Random(seed)
    views = {peer: BroadcastRing([other for other in peers if rng.random() < 0.7]) for peer in peers}
    reached, _ = spread(peers[0], views, fanout)
    assert all(times == 1 for times in reached.values())
    assert peers[0] not in reached
    # The origin reaches at least its direct branches.
    assert len(reached) >= min(fanout, len(views[peers[0]]) - (peers[0] in views[peers[0]]))


class Silent:
    """The network and its members, none of which ever answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.suspected: list[str] = []

    async def push(self, endpoint: str, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        self.asked.append(endpoint)
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    def branches(self, start: int, end: int, fanout: int) -> list[BroadcastBranch]:
        return [BroadcastBranch(start, end, ("one:1", "other:1") if start == 1 else ("other:1",))]

    def suspect(self, endpoint: str, now: float, why: str, *, refused: bool) -> None:
        self.suspected.append(endpoint)


@in_virtual_time
async def test_a_rumour_that_timed_out_in_the_queue_is_removed() -> None:
    silent, settings = Silent(), GossipSettings(push_timeout=2.0, rumour_timeout=3.0)
    access = GossipAccess("run", "me:1", cast(Transport, silent), settings, virtual_time.clock, random.Random(0))
    rumours = Rumours(access, cast(Membership, silent), lambda *_: None)
    before = leaks.sizes(rumours)
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(rumours.run(tasks.create_task))
        rumours.spread(Record("first", "me:1", b"", 1, virtual_time.clock() + 60.0), 1, 9)
        await asyncio.sleep(1.5)
        rumours.spread(Record("second", "me:1", b"", 1, virtual_time.clock() + 60.0), 11, 19)
        await asyncio.sleep(10.0)
        sending.cancel()
    assert silent.asked == ["one:1", "other:1"]  # the first rumour waited in the queue until its timeout
    assert silent.suspected == silent.asked  # they are tried after all others
    grown = leaks.sizes(rumours) - before
    assert set(grown) == {"Rumours._sent"}  # until the records expire
