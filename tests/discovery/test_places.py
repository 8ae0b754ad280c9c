"""Places under one key in etcd's order, and groups of whole peers in them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from averaging import Peer
from averaging.discovery.etcd.places import MAX_READABLE, GroupPlace, GroupPlaces, place_of
from averaging.testing import virtual_time
from averaging.transport.key_value import StoredValue
from tests.support.etcd_swarm import EtcdSwarm
from tests.support.memory_etcd import MemoryEtcd

KEY = "run.0b"


def test_numbers_are_divided_in_their_order_and_keys_fit() -> None:
    places = [place_of(KEY, StoredValue(b"", b"", 7, 9, writes), 4) for writes in range(1, 10)]
    assert [place.last for place in places] == [4] * 4 + [8] * 4 + [12]
    assert len({place.key for place in places}) == 3
    assert places[0].key != place_of(KEY, StoredValue(b"", b"", 8, 9, 1), 4).key  # drawn anew
    long = "k" * 256
    assert len(place_of(long, StoredValue(b"", b"", 2**62, 9, 2**62), 2).key.encode()) <= MAX_READABLE
    assert place_of(long, StoredValue(b"", b"", 1, 1, 1), 2).key != place_of(long + "k", places[0].drawn, 2).key


def simulate(main: Callable[[MemoryEtcd, int], Awaitable[None]]) -> None:
    async def run() -> None:
        etcd = MemoryEtcd((0.001, 0.01))
        await main(etcd, await etcd.client().grant(300.0))

    virtual_time.run(run())


def test_a_group_that_is_not_full_closes_its_place() -> None:
    """So its members, and those that come later, meet in one place the next time; also if the closing was lost."""

    async def main(etcd: MemoryEtcd, lease: int) -> None:
        peers = [GroupPlaces("run", etcd.client()) for _ in range(6)]
        first = [await peer.take(KEY, 4, lease) for peer in peers[:3]]
        assert len({place.key for place in first}) == 1
        left = [peer.leave(KEY, began=True) for peer in peers[:3]]
        assert left[0] is not None
        await peers[0].close(left[0])
        second = [await peer.take(KEY, 4, lease) for peer in peers[:3]]
        assert len({place.key for place in second}) == 1
        assert second[0].key != first[0].key
        for peer in peers[:3]:
            peer.leave(KEY, began=True)  # and nobody closes it
        third = [await peer.take(KEY, 4, lease) for peer in peers[:4]]
        assert len({place.key for place in third}) == 1
        assert third[0].key != second[0].key
        for peer in peers[:3]:
            peer.leave(KEY, began=True)
        fourth = [await peer.take(KEY, 4, lease) for peer in peers[4:]]
        assert not {place.key for place in fourth} & {place.key for place in third}

    simulate(main)


def test_a_later_place_is_not_closed() -> None:
    async def main(etcd: MemoryEtcd, lease: int) -> None:
        peers = [GroupPlaces("run", etcd.client()) for _ in range(5)]
        places = [await peer.take(KEY, 4, lease) for peer in peers]
        left = peers[0].leave(KEY, began=True)
        assert left is not None
        await peers[0].close(left)  # number 5 is in the next place already
        following = await peers[0].take(KEY, 4, lease)
        assert following.key == places[4].key

    simulate(main)


def test_a_search_keeps_its_place_while_others_may_come_there() -> None:
    async def main(etcd: MemoryEtcd, lease: int) -> None:
        one, other, third = (GroupPlaces("run", etcd.client()) for _ in range(3))
        place = await one.take(KEY, 3, lease)
        assert await one.take(KEY, 3, lease) == place
        second = await other.take(KEY, 3, lease)
        assert second.key == place.key
        last = await third.take(KEY, 3, lease)
        again: GroupPlace = await one.take(KEY, 3, lease)  # it is full, and somebody has not come
        assert again.key != last.key
        one.leave(KEY, began=False)
        assert (await one.take(KEY, 3, lease)).key == again.key

    simulate(main)


# Whole peers


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("count", "rounds"), [(64, 2), pytest.param(4096, 1, marks=pytest.mark.long)], ids=["64", "4096"]
)
def test_many_peers_under_one_key_ask_once_and_all_have_a_group_at_once(count: int, rounds: int) -> None:
    swarm = EtcdSwarm(seed=1)

    async def main() -> None:
        async with swarm.peers(count, group_size=8) as peers:
            for _ in range(rounds):
                swarm.network.calls.clear()
                receipts = await asyncio.gather(*(peer.average() for peer in peers))
                assert [len(receipt.members) for receipt in receipts] == [8] * count
                assert swarm.network.calls["join_group"] <= 1.3 * count
                assert max(receipt.phases["looking"] for receipt in receipts) < 1.5

    virtual_time.run(main())
    assert swarm.network.errors == []


@pytest.mark.parametrize("seed", range(3))
def test_groups_form_although_some_peers_die_and_others_come_late(seed: int) -> None:
    """A number that nobody uses costs one wait; then those left over find each other."""
    swarm = EtcdSwarm(seed)

    async def main() -> None:
        async with swarm.peers(37, group_size=4, group_wait=2.0, round_timeout=20.0) as peers:
            rng = random.Random(seed)

            async def live(peer: Peer) -> list[bool]:
                averaged = []
                for _ in range(4):
                    await asyncio.sleep(rng.uniform(0, 1.0))
                    search = asyncio.create_task(peer.average())
                    if rng.random() < 0.1:
                        await asyncio.sleep(rng.uniform(0, 0.3))
                        search.cancel()
                    try:
                        averaged.append((await search).averaged)
                    except asyncio.CancelledError:
                        continue
                return averaged

            done = [each for lives in await asyncio.gather(*map(live, peers)) for each in lives]
            assert sum(done) >= 0.9 * len(done)

    virtual_time.run(main())
    assert swarm.network.errors == []


def test_a_run_that_fits_in_one_group_meets_under_the_key_itself() -> None:
    swarm = EtcdSwarm(seed=2)

    async def main() -> None:
        async with swarm.peers(5, group_size=8, group_wait=1.0) as peers:
            for _ in range(2):
                receipts = await asyncio.gather(*(peer.average() for peer in peers))
                assert [len(receipt.members) for receipt in receipts] == [5] * 5
        assert "draw" not in swarm.etcd.calls

    virtual_time.run(main())


def test_peers_that_entered_first_learn_of_the_others_before_they_decide() -> None:
    """Otherwise they would look under the key itself, and the others in places, until the next look at neighbours."""
    swarm = EtcdSwarm(seed=3)

    async def main() -> None:
        options: dict[str, Any] = {"group_size": 4, "group_wait": 2.0, "seconds": 1.0}
        async with swarm.peers(3, **options) as early, swarm.peers(13, first=3, **options) as others:
            receipts = await asyncio.gather(*(peer.average() for peer in [*early, *others]))
            assert [len(receipt.members) for receipt in receipts] == [4] * 16

    virtual_time.run(main())
