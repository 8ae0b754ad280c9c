"""A group that has just worked together forms again without a search, and nobody else has to wait for it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from averaging import Mode, Outcome, Peer, Receipt
from averaging.discovery import Entry
from averaging.matchmaking.memory import QUIET_SECONDS, LastGroup
from averaging.matchmaking.rules import pack_looking
from averaging.protocol.group import Group, Member
from averaging.protocol.messages import JoinRequest
from averaging.receipts import Role
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery
from averaging.testing.transport import MemoryTransport
from tests.support.selection import rest_is_long
from tests.support.simulated import in_virtual_time
from tests.support.swarm import Swarm, scalars, spread

GROUP_WAIT = 5.0


class Calls:
    """The records that peers write to look for a group, and their requests to join one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        store, join = MemoryDiscovery.store, MemoryTransport.join_group

        async def counted_store(own: MemoryDiscovery, key: str, subkey: str, value: bytes, expiration: float) -> None:
            self.records[subkey] += ".0b" in key
            await store(own, key, subkey, value, expiration)

        def counted_join(own: MemoryTransport, endpoint: str, request: JoinRequest) -> Any:
            self.requests[request.endpoint] += 1
            return join(own, endpoint, request)

        monkeypatch.setattr(MemoryDiscovery, "store", counted_store)
        monkeypatch.setattr(MemoryTransport, "join_group", counted_join)

    def take(self) -> tuple[int, int]:
        """The numbers of both since the last call."""
        taken = self.records.total(), self.requests.total()
        self.records.clear()
        self.requests.clear()
        return taken


class Run:
    """Peers that average in groups of `group_size`."""

    def __init__(self, seed: int, count: int = 4, group_size: int = 4, **swarm: Any) -> None:
        self.swarm, self.stack = Swarm(seed, **swarm), AsyncExitStack()
        self.group_size = group_size
        self.tensors = scalars(count + 1, seed)
        self.peers = [self.peer(f"peer:{n + 1}", n) for n in range(count)]

    def peer(self, name: str, number: int, **options: Any) -> Peer:
        options = {"group_size": self.group_size, "group_wait": GROUP_WAIT, "share_state": False} | options
        return self.swarm.peer(name, [self.tensors[number]], **options)

    async def __aenter__(self) -> Run:
        for peer in self.peers:
            await self.stack.enter_async_context(peer)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.stack.aclose()

    async def round(self, peers: Sequence[Peer] = (), jitter: float = 0.0) -> list[Receipt]:
        """One round of these peers, of all by default, each of which begins within `jitter` seconds."""

        async def average(peer: Peer) -> Receipt:
            await asyncio.sleep(jitter * self.swarm.rng.random())
            return await peer.average()

        return await asyncio.gather(*map(average, peers or self.peers))


def whole(receipts: Sequence[Receipt]) -> bool:
    """Whether all averaged in one group, and lost nobody."""
    return len({receipt.group_id for receipt in receipts}) == 1 and all(
        receipt.outcome is Outcome.AVERAGED and not receipt.dropped and len(receipt.members) == len(receipts)
        for receipt in receipts
    )


def leader(receipts: Sequence[Receipt]) -> str:
    return next(receipt.endpoint for receipt in receipts if receipt.role is Role.LEADER)


@in_virtual_time
async def test_a_group_forms_again_with_one_request_of_each_follower_and_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(monkeypatch)
    async with Run(1, latency=(0.001, 0.005)) as run:
        first = await run.round()
        assert calls.take()[0] == 4  # one record of each search
        for _ in range(5):
            again = await run.round()
            assert whole(again)
            assert leader(again) == leader(first)
            assert all(receipt.phases["looking"] < QUIET_SECONDS for receipt in again)
            assert calls.take() == (0, 3)
        assert spread(run.tensors[:4]) < 1e-12


@pytest.mark.parametrize("seed", rest_is_long(range(200), 3))
@in_virtual_time
async def test_whatever_the_members_begin_later_than_each_other_no_round_loses_one(seed: int) -> None:
    """The leader may begin first or last, sooner or later than the others declare themselves."""
    rng = random.Random(seed)
    slow = rng.choice([0.002, 0.02, 0.2])
    async with Run(seed, latency=(0.001, slow), delay=slow) as run:
        for _ in range(8):
            jitter = rng.choice([0.0, QUIET_SECONDS / 2, QUIET_SECONDS, 3 * QUIET_SECONDS, 2.0])
            receipts = await run.round(jitter=jitter)
            assert whole(receipts), receipts
            assert max(receipt.seconds for receipt in receipts) < jitter + 20 * slow + 1.5
            await asyncio.sleep(rng.choice([0.0, 0.01, 1.0]))


@pytest.mark.parametrize("latest", [0, 1])
@in_virtual_time
async def test_receipts_name_a_member_that_comes_late(latest: int) -> None:
    async with Run(3) as run:
        first = await run.round()
        first.sort(key=lambda receipt: receipt.role is not Role.LEADER)
        by_name = {peer.endpoint: peer for peer in run.peers}
        late = by_name[first[latest].endpoint]  # the leader, and another one
        for _ in range(3):
            others = asyncio.create_task(run.round([peer for peer in run.peers if peer is not late]))
            await asyncio.sleep(1.0)
            receipts = [await late.average(), *await others]
            assert whole(receipts)
            for receipt in receipts[1:]:
                assert receipt.last_to_arrive is not None
                assert receipt.last_to_arrive.endpoint == late.endpoint
                assert receipt.last_to_arrive.seconds == pytest.approx(1.0, abs=2 * QUIET_SECONDS)


@pytest.mark.parametrize("mode", [Mode.NODE, Mode.CLIENT])
@pytest.mark.parametrize("seed", rest_is_long(range(5), 1))
@pytest.mark.parametrize("pause", [0.0, 0.3, 2.0])
@in_virtual_time
async def test_a_newcomer_is_in_at_the_next_round_at_the_latest(seed: int, mode: Mode, pause: float) -> None:
    """The group is full without it, and goes on all the time."""
    async with Run(seed, latency=(0.001, 0.005), delay=0.01) as run:
        running = True

        async def repeat(peer: Peer) -> list[Receipt]:
            receipts = []
            while running:
                receipts.append(await peer.average())
                await asyncio.sleep(pause)
            return receipts

        for _ in range(4):
            assert whole(await run.round())
            await asyncio.sleep(pause)
        newcomer = run.peer("new:1", 4, mode=mode)
        async with newcomer, asyncio.TaskGroup() as tasks:
            going = [tasks.create_task(repeat(peer)) for peer in run.peers]
            await asyncio.sleep(0.05)
            began = virtual_time.clock()
            receipt = await newcomer.average()
            running = False
        assert receipt.averaged
        # All later rounds of the others: that which was in progress, the newcomer's, and one or none beside it.
        for task in going:
            ids = [r.group_id for r in task.result() if r.averaged and r.started > began]
            assert receipt.group_id not in ids[2:]


@in_virtual_time
async def test_a_group_without_its_leader_forms_as_usual() -> None:
    async with Run(5) as run:
        for _ in range(3):
            receipts = await run.round()
        run.swarm.network.kill(leader(receipts))
        left = [peer for peer in run.peers if peer.endpoint != leader(receipts)]
        later = await run.round(left)
        assert whole(later)
        # The others wait for a fourth until the declaration expires, as they would without the last group.
        assert max(receipt.seconds for receipt in later) < GROUP_WAIT + 1.0
        assert whole(await run.round(left))


@pytest.mark.parametrize(("seed", "pause"), rest_is_long([(0, 0.0), (1, 6.0), (1, 0.0), (2, 6.0)], 2))
@in_virtual_time
async def test_groups_that_are_smaller_than_the_run_mix_as_before(seed: int, pause: float) -> None:
    """Rounds follow each other faster than declarations expire, or more slowly: nobody stays with the same peers."""
    async with Run(seed, count=8, group_size=4, delay=0.01) as run:
        partners: dict[str, set[str]] = {peer.endpoint: set() for peer in run.peers}
        for _ in range(8):
            receipts = await run.round(jitter=0.05)
            assert len({receipt.group_id for receipt in receipts}) <= 3
            for receipt in receipts:
                partners[receipt.endpoint].update(receipt.members)
            await asyncio.sleep(pause)
        assert min(map(len, partners.values())) >= 7
        assert spread(run.tensors[:8]) < 0.02


# The decision alone


def group(*names: str) -> Group:
    return Group(b"id", tuple(map(Member, names)), names[0])


def declared(*names: str, until: float = 5.0, looking: bool = True) -> dict[str, Entry]:
    return {name: Entry(pack_looking(looking), until) for name in names}


def after_a_round(endpoint: str = "b", *, at_end: Any = None, is_whole: bool = True) -> LastGroup:
    last, entries = LastGroup(endpoint), declared("a", "b", "c")
    last.note_declaration(5.0)
    last.note_begin(group("a", "b", "c"), entries)
    last.note_end(entries if at_end is None else at_end, is_whole)
    return last


def test_the_last_leader_leads_again_only_if_a_search_would_find_the_same_group() -> None:
    entries, known = declared("a", "b", "c"), {"a", "b", "c"}
    assert after_a_round().leader(entries, known, 1.0) == "a"
    assert after_a_round("a").leader(entries, known, 1.0) == "a"
    assert after_a_round().leader({}, set(), 1.0) == "a"
    assert not LastGroup("b").leader({}, set(), 1.0)
    assert not after_a_round(is_whole=False).leader(entries, known, 1.0)  # a member was lost
    assert not after_a_round().leader(entries, known, 5.0)  # this peer's declaration has expired
    assert not after_a_round().leader(entries | declared("d", looking=False), known, 1.0)
    assert not after_a_round().leader(entries, known | {"d"}, 1.0)
    assert not after_a_round().leader(entries | declared("c", until=6.0), known, 1.0)  # it waits for a new group
