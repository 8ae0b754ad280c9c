"""The broadcast tree over the ring: every peer is reached exactly once."""

from __future__ import annotations

import math
import random
from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from averaging.discovery.gossip.membership import BroadcastRing, all_others


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
