"""Peers with the smallest declarations that do not answer, or accept and then send nothing: the others go on."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from typing import cast

import pytest

from averaging import Mode, Outcome, Peer, Receipt
from averaging.matchmaking import Conduct, Matchmaking, SearchConfig
from averaging.matchmaking.conduct import ResponseHistory
from averaging.matchmaking.rules import CLOCK_TOLERANCE, MIN_HEAD_START, pack_looking
from averaging.protocol.group import Group, group_key, pack_gather
from averaging.protocol.messages import CompressionType, JoinRequest, MessageCode, MessageFromLeader
from averaging.tensors.schema import Schema, TensorSpec
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry
from averaging.transport.base import Transport
from tests.support.fake_transport import OneLane
from tests.support.rounds import SilentLeader
from tests.support.selection import rest_is_long
from tests.support.swarm import Swarm, scalars

PAUSE = 0.2
"""Seconds between two rounds."""

ATTACKERS = 20


SEEDS = rest_is_long(range(3))


def rounds(
    seed: int, seconds: float, attackers: int = 0, *, accept: bool = False, fresh: bool = False
) -> list[tuple[float, Receipt]]:
    """The rounds of one of four honest peers, each with the moment at which it ended.

    Args:
        seconds: of virtual time.
        attackers: peers that declare to wait for a shorter time than all honest ones.
        accept: whether these accept requests to join.
        fresh: whether they have new names each time.
    """
    swarm = Swarm(seed)
    peers = [
        swarm.peer(f"peer:{number}", [tensor], group_size=4, group_wait=5.0)
        for number, tensor in enumerate(scalars(4, seed), 1)
    ]

    async def declare(discovery: MemoryDiscovery, names: Iterator[str]) -> None:
        known: list[str] = []
        while True:
            if fresh or not known:
                known = [next(names) for _ in range(attackers)]
                for name in known:
                    await swarm.network.transport(name).serve(SilentLeader(accept), None)
            until = virtual_time.clock() + (0.8 if fresh else 2.0)
            for number, name in enumerate(known):
                await discovery.store(group_key("run", ""), name, pack_looking(True), until + number / 1000)
            await asyncio.sleep(0.4)

    async def average(peer: Peer) -> list[tuple[float, Receipt]]:
        found = []
        while (now := asyncio.get_running_loop().time()) < seconds:
            receipt = await peer.average()
            if now + receipt.seconds < seconds:  # the last round may have no group
                found.append((now + receipt.seconds, receipt))
            await asyncio.sleep(PAUSE)
        return found

    async def main() -> list[tuple[float, Receipt]]:
        async with MemoryDiscovery(swarm.registry) as discovery, AsyncExitStack() as stack:
            names = (f"192.0.2.{number % 250}:{1 + number // 250}" for number in range(1_000_000))
            declaring = asyncio.create_task(declare(discovery, names))
            await asyncio.sleep(0.1)
            for peer in peers:
                await stack.enter_async_context(peer)
            found = await asyncio.gather(*map(average, peers))
            declaring.cancel()
        return found[0]

    return cast("list[tuple[float, Receipt]]", swarm.simulate(main()))


def per_minute(found: list[tuple[float, Receipt]], since: float) -> float:
    """Rounds of all four that ended after `since`, in a minute."""
    whole = [moment for moment, receipt in found if moment > since and len(receipt.members) == 4]
    return 60 * len(whole) / (found[-1][0] - since)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_twenty_silent_leaders_cost_a_few_seconds_once(seed: int) -> None:
    usual = per_minute(rounds(seed, 60.0), since=1.0)
    found = rounds(seed, 60.0, ATTACKERS)
    assert all(receipt.outcome is Outcome.AVERAGED for _, receipt in found)
    first, _ = found[0]
    assert first < 8.0  # seconds, for the first search, in which no peer is known
    assert per_minute(found, since=first) > usual / 2  # a tenth of it if they were asked one after the other
    assert per_minute(found, since=20.0) > 0.9 * usual


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_new_names_in_each_search_cost_a_bounded_time(seed: int) -> None:
    """Each of 50 new names a second would cost a head start if it were asked alone."""
    found = rounds(seed, 60.0, ATTACKERS, fresh=True)
    assert found[0][0] < 15.0
    assert per_minute(found, since=20.0) > 60.0
    for moment, receipt in found:
        assert receipt.outcome is Outcome.AVERAGED
        assert receipt.seconds < 1.0 or moment < 30.0, receipt  # once the honest peers know each other


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_deserters_are_not_asked_once_they_are_known(seed: int) -> None:
    found = rounds(seed, 100.0, 4, accept=True)
    known = 4 * (5.0 + CLOCK_TOLERANCE) + 2.0  # each costs a declaration and the tolerance
    late = [receipt for moment, receipt in found if moment > known]
    assert len(late) > 100
    for receipt in late:
        assert receipt.outcome is Outcome.AVERAGED
        assert receipt.seconds < 1.0, receipt


@pytest.mark.long
def test_many_seeds_of_ordinary_swarms_find_whole_groups_at_once() -> None:
    """Also in later rounds, in which it is known how fast others answer."""
    looking: list[float] = []
    for seed in range(60):
        rng = random.Random(seed)
        count = rng.randrange(2, 33)
        latency = rng.choice([(0.001, 0.02), (0.01, 0.01), (0.001, 0.05), (0.001, 0.3), (0.1, 0.15)])
        swarm = Swarm(seed, latency=latency, delay=rng.choice([0.0, 0.02, 0.1]))
        peers = [
            swarm.peer(f"peer:{number}", [tensor], group_size=count, group_wait=5.0, round_timeout=20.0)
            for number, tensor in enumerate(scalars(count, seed), 1)
        ]
        for receipt in (receipt for own in swarm.simulate(swarm.average_together(peers, 3)) for receipt in own):
            assert receipt.outcome is Outcome.AVERAGED, f"seed {seed}: {receipt}"
            assert (len(receipt.members), receipt.dropped) == (count, ()), f"seed {seed}: {receipt}"
            looking.append(receipt.seconds - receipt.allreduce_seconds)
    # When candidates were asked one after the other, it was 0.70 s and 0.177 s.
    assert max(looking) < 0.7
    assert statistics.mean(looking) < 0.18


ME, FIRST, SECOND, FOLLOWER = "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1", "192.0.2.4:1"
SCHEMA = Schema((TensorSpec("w", "float32", (3,), CompressionType.NONE),), 1024)
GATHER = pack_gather(1.0, None, Mode.NODE)


class Leaders(OneLane):
    """The network: each of two leaders accepts after a time of its own, and then begins or disbands.

    Attributes:
        answers_after: seconds until a leader accepts.
        decides_after: seconds from then on until it decides.
        disbands: the leader that does not begin.
        left: when the follower of each leader left.
    """

    def __init__(
        self, first: float, second: float, decide: tuple[float, float] = (1.0, 1.0), disbands: str = ""
    ) -> None:
        self.answers_after = {FIRST: first, SECOND: second}
        self.decides_after = dict(zip((FIRST, SECOND), decide, strict=True))
        self.disbands = disbands
        self.asked: list[str] = []
        self.left: dict[str, float] = {}

    async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        self.asked.append(endpoint)
        try:
            await asyncio.sleep(self.answers_after.get(endpoint, 100.0))
            yield MessageFromLeader(MessageCode.ACCEPTED)
            await asyncio.sleep(self.decides_after[endpoint])
            if endpoint == self.disbands:
                yield MessageFromLeader(MessageCode.GROUP_DISBANDED)
                return
            members, gathers = (endpoint, request.endpoint), (GATHER, request.gather)
            yield MessageFromLeader(MessageCode.BEGIN_ALLREDUCE, bytes(20), "", members, gathers)
        except (GeneratorExit, asyncio.CancelledError):
            self.left[endpoint] = asyncio.get_running_loop().time()
            raise


def searcher(
    leaders: Leaders, discovery: MemoryDiscovery, history: ResponseHistory, group_size: int = 4
) -> Matchmaking:
    return Matchmaking(
        SearchConfig("run", ME, group_size, 2, 20.0, virtual_time.clock, random.Random(1)),
        SCHEMA,
        cast("Transport", leaders),
        discovery,
        conduct=Conduct(history=history),
    )


def search(leaders: Leaders, history: ResponseHistory | None = None, silent: int = 0) -> Group:
    """The group that is found among the two leaders and the `silent` ones before them, which do not answer."""

    async def main() -> Group:
        async with MemoryDiscovery(MemoryRegistry(clock=virtual_time.clock)) as discovery:
            now = virtual_time.clock()
            names = [*(f"192.0.2.8:{number + 1}" for number in range(silent)), FIRST, SECOND]
            for number, name in enumerate(names):
                await discovery.store(group_key("run", ""), name, pack_looking(True), now + 10 + number)
            found = searcher(leaders, discovery, history or ResponseHistory())
            return await found.find_group(GATHER, now + 30)

    return virtual_time.run(main())


def two_silent() -> ResponseHistory:
    """Two peers did not answer, so one that was never asked gets 3 s / 2^2 as long as no peer answers."""
    history = ResponseHistory()
    for stranger in range(2):
        history.note_silence(f"192.0.2.9:{stranger + 1}")
    return history


def test_the_first_leads_if_it_answers_within_its_head_start() -> None:
    leaders = Leaders(first=2.9, second=0.01)
    group = search(leaders)
    assert (group.leader, leaders.asked) == (FIRST, [FIRST])


def test_the_second_leads_if_the_first_does_not_answer_in_time_and_the_request_is_withdrawn() -> None:
    leaders = Leaders(first=0.8, second=0.02)
    group = search(leaders, two_silent())
    assert (group.leader, leaders.asked) == (SECOND, [FIRST, SECOND])
    assert leaders.left[FIRST] == pytest.approx(0.77, abs=0.01)  # as soon as the second accepts


def test_the_first_leads_if_it_answers_before_the_second_that_was_asked_meanwhile() -> None:
    history, leaders = two_silent(), Leaders(first=0.8, second=0.5)
    group = search(leaders, history)
    assert (group.leader, leaders.asked) == (FIRST, [FIRST, SECOND])
    assert leaders.left[SECOND] == pytest.approx(0.75 + 0.375, abs=0.01)  # when the head start of the second is over
    assert not history.suspicion(FIRST), "it has answered, if late"


@pytest.mark.parametrize(
    ("leaders", "leads", "leaves"),
    [
        (Leaders(first=0.8, second=0.1), FIRST, {SECOND: 0.95}),
        (Leaders(first=0.8, second=0.1, decide=(1.0, 0.05)), SECOND, {FIRST: 0.9}),
        (Leaders(first=0.8, second=0.1, decide=(0.1, 1.0), disbands=FIRST), SECOND, {FIRST: 0.9}),
    ],
    ids=["the first leads", "the second begins at that moment", "the first disbands at that moment"],
)
def test_of_two_that_accept_only_one_leads(leaders: Leaders, leads: str, leaves: dict[str, float]) -> None:
    """The first after 0.8 s, the second after 0.85 s."""
    group = search(leaders, two_silent())
    assert group.leader == leads
    left = {name: when for name, when in leaders.left.items() if name != leads}
    assert left == pytest.approx(leaves, abs=0.01)


def test_the_first_leads_even_if_the_second_that_was_asked_with_it_accepts_sooner() -> None:
    leaders = Leaders(first=0.1, second=0.05)
    group = search(leaders, two_silent(), silent=2)
    together = 0.75 + 0.375
    assert (group.leader, leaders.asked[2:]) == (FIRST, [FIRST, SECOND])
    assert leaders.left[SECOND] == pytest.approx(together + 0.1 + MIN_HEAD_START, abs=0.01)


class Silent(Leaders):
    """Leaders that answer no request."""

    def __init__(self) -> None:
        super().__init__(first=100.0, second=100.0)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_complete_group_waits_no_longer_than_a_head_start(cancelled: bool) -> None:
    """And its leader does not begin if its search is cancelled."""

    async def main() -> None:
        async with MemoryDiscovery(MemoryRegistry(clock=virtual_time.clock)) as discovery:
            now = virtual_time.clock()
            await discovery.store(group_key("run", ""), FIRST, pack_looking(True), now + 10)
            leaders = Silent()
            found = searcher(leaders, discovery, two_silent(), group_size=2)
            searching = asyncio.create_task(found.find_group(GATHER, now + 30))
            await asyncio.sleep(0.1)
            replies = found.join_group(JoinRequest(FOLLOWER, SCHEMA.hash, now + 60, GATHER))
            assert (await anext(replies)).code is MessageCode.ACCEPTED
            decision = asyncio.create_task(anext(replies))
            await asyncio.sleep(0.6)
            assert not decision.done()
            if cancelled:
                searching.cancel()
                assert (await decision).code is MessageCode.GROUP_DISBANDED
            else:
                assert (await decision).code is MessageCode.BEGIN_ALLREDUCE
                assert asyncio.get_running_loop().time() == pytest.approx(0.75, abs=0.01)
                assert set((await searching).endpoints) == {ME, FOLLOWER}
                assert list(leaders.left) == [FIRST]
            await asyncio.wait([searching])
            await replies.aclose()

    virtual_time.run(main())


def test_a_peer_that_stood_still_counts_no_other_as_silent() -> None:
    history = ResponseHistory()
    for stranger in range(10):
        history.note_silence(f"192.0.2.9:{stranger + 1}")
    leaders = Leaders(first=0.05, second=0.01)

    async def main() -> None:
        async with MemoryDiscovery(MemoryRegistry(clock=virtual_time.clock)) as discovery:
            now = virtual_time.clock()
            for number, name in enumerate((FIRST, SECOND)):
                await discovery.store(group_key("run", ""), name, pack_looking(True), now + 10 + number)
            found = searcher(leaders, discovery, history)
            asyncio.get_running_loop().call_later(0.045, virtual_time.stand_still, 5.0)
            assert (await found.find_group(GATHER, now + 30)).leader == FIRST
        assert leaders.asked == [FIRST]

    virtual_time.run(main())
