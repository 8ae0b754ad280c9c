"""Followers that receive slower than versions come: each gets one, not too old, and few are kept for all."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging import WeightPublisher
from averaging.rpc import RpcServer
from averaging.weights.claims import CLAIM_RATE, CLAIM_SECONDS, MOST_CLAIMED, Claims
from averaging.weights.receiver import FollowerOptions, VersionReceiver
from averaging.wire import weights_pb2 as wire
from tests.support.fault_proxy import FaultProxy
from tests.support.weights_worker import weights_of
from tests.weights.test_weights import LIMIT, same

INTERVAL, BASES = 0.2, 2


class Run:
    """Followers at one publisher, in steps of commits."""

    def __init__(self, transfers: list[float], begins: list[float]) -> None:
        self.claims = Claims()
        self.transfers, self.next = transfers, list(begins)
        self.has, self.takes = [-1] * len(transfers), [-1] * len(transfers)
        self.began = [0.0] * len(transfers)
        self.kept: set[int] = set()
        self.ages: list[list[float]] = [[] for _ in transfers]
        self.lost = [0] * len(transfers)
        self.most = 0

    def commit(self, version: int) -> None:
        now, usual = version * INTERVAL, set(range(max(0, version - BASES), version + 1))
        self.kept = usual | (self.claims.claimed(usual, self.kept, now) & self.kept)
        self.most = max(self.most, len(self.kept))
        for number, transfer in enumerate(self.transfers):
            if now < self.next[number]:
                continue
            if self.takes[number] >= 0 and self.takes[number] not in self.kept:
                self.lost[number] += 1  # its source has ended the transfer
                self.takes[number] = -1
                self.next[number] = now + 1.0  # it asks again after a pause
                continue
            if self.takes[number] >= 0:
                if now < self.began[number] + transfer:
                    continue
                self.ages[number].append(now - self.has[number] * INTERVAL if self.has[number] >= 0 else 0.0)
                self.has[number], self.takes[number] = self.takes[number], -1
            taken = self.claims.ask(b"%d" % number, self.has[number], version, usual, 0, now)
            if taken is not None and taken in self.kept:
                self.takes[number], self.began[number] = taken, now


@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 10), transfer=st.floats(1.0, 6.0), spread=st.floats(0.0, 5.0))
def test_equal_followers_are_at_most_three_transfers_old(seed: int, count: int, transfer: float, spread: float) -> None:
    rng = random.Random(seed)
    run = Run([transfer] * count, [rng.uniform(0, spread) for _ in range(count)])
    for version in range(300):
        run.commit(version)
    assert run.most <= 1 + BASES + MOST_CLAIMED
    for ages, lost in zip(run.ages, run.lost, strict=True):
        assert len(ages) >= 300 * INTERVAL / (3 * transfer) - 3
        assert lost <= 1, "only before it is known to be slow"
        assert max(ages[3:], default=0.0) <= 3 * transfer + 6 * INTERVAL


@given(seed=st.integers(0, 1 << 32), transfers=st.lists(st.floats(0.1, 9.0), min_size=1, max_size=10))
def test_followers_of_any_speed_finish_versions_and_few_are_kept(seed: int, transfers: list[float]) -> None:
    rng = random.Random(seed)
    run = Run(transfers, [rng.uniform(0, 2) for _ in transfers])
    for version in range(400):
        run.commit(version)
    assert run.most <= 1 + BASES + MOST_CLAIMED
    assert all(has >= 0 for has in run.has)


def test_a_version_that_was_given_up_takes_no_room() -> None:
    claims = Claims()
    for number in range(3):
        assert claims.ask(b"%d" % number, -1, number, {number}, 0, 0.0) == number
    assert claims.claimed({9}, {0, 1, 2, 9}, 1.0) == {0, 1}, "those who have received most"
    assert claims.claimed({9}, {0, 1, 9}, 2.0) == {0, 1}
    claims.leave(b"0")
    assert claims.claimed({9}, {1, 9}, 3.0) == {1}
    assert claims.ask(b"2", -1, 9, {9}, 0, 4.0) == 9, "there is room now"


def test_nobody_holds_a_version_for_ever() -> None:
    claims = Claims()
    for number in range(MOST_CLAIMED):
        assert claims.ask(b"%d" % number, -1, number, {number}, 1000, 0.0) == number
    ends = CLAIM_SECONDS + 1000 / CLAIM_RATE
    assert claims.claimed({9}, {0, 1, 9}, ends - 1) == {0, 1}
    assert claims.claimed({9}, {0, 1, 9}, ends + 1) == set()
    claims.leave(b"0")
    claims.leave(b"0")


@pytest.mark.asyncio
@pytest.mark.usefixtures("nothing_is_left_behind")
async def test_slow_followers_finish_versions_while_newer_ones_come() -> None:
    publisher = WeightPublisher(bases=1)
    with FaultProxy(20e6) as proxy:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(RpcServer(f"127.0.0.1:{proxy.target}", [publisher], grace=0.0))
            await publisher.publish(weights_of(1), 1)
            followers = []
            for _ in range(4):
                options = FollowerOptions(join=[f"127.0.0.1:{proxy.port}"], run_id="", listen=None)
                followers.append(await stack.enter_async_context(VersionReceiver(options)))
            most, version = 0, 1
            while any(each.newest is None or each.newest.manifest.version < 6 for each in followers):
                version += 1
                assert version < 1000
                await publisher.publish(weights_of(version), version)
                most = max(most, len(publisher._store._kept))
            assert most <= 2 + MOST_CLAIMED
            for each in followers:
                assert await each.wait_newer(version - 1, LIMIT), "at last all have the newest"
                assert each.newest is not None
                assert same(each.newest.tensors(), weights_of(version))


def test_a_follower_that_sends_a_whole_version_to_a_slow_one_sends_no_second_one_at_the_same_time() -> None:
    publisher = WeightPublisher(copies=1)
    names = [b"first", b"slow", b"next"]
    publisher._followers.update({name: f"127.0.0.1:{number}" for number, name in enumerate(names, 1)})

    def ask(follower: bytes, version: int) -> str:
        pieces = publisher._store.with_number(version)
        assert pieces is not None
        publisher._asked_for[follower] = version
        return publisher._source_for(wire.FetchRequest(name=pieces.manifest.name, follower=follower, local=True))

    first = publisher._followers[names[0]]
    asyncio.run(publisher.publish(weights_of(1), 1))
    assert [ask(names[0], 1), ask(names[1], 1)] == ["", first]
    for version in (2, 3):
        asyncio.run(publisher.publish(weights_of(version), version))
    assert [ask(names[0], 3), ask(names[2], 3)] == ["", ""], "the slow one receives version 1 from the first one still"
    asyncio.run(publisher.publish(weights_of(4), 4))
    assert [ask(names[0], 4), ask(names[1], 4)] == ["", first], "which is free now"
