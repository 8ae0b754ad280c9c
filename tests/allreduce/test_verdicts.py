"""A candidate that does not answer costs little once it is known how long peers take to answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import cast

import pytest

from averaging.discovery.base import Discovery
from averaging.matchmaking import Conduct, Matchmaking, SearchConfig
from averaging.matchmaking.rules import CLOCK_TOLERANCE, pack_looking
from averaging.protocol.group import Mode, group_key, pack_gather
from averaging.protocol.messages import CompressionType, JoinRequest, MessageCode, MessageFromLeader
from averaging.tensors.schema import Schema, TensorSpec
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry
from averaging.timing.deadlines import MIN_WAITS, VERDICT_SECONDS, Deadlines
from averaging.transport.base import Transport
from tests.support.fake_transport import OneLane

ME, DEAD, GOOD, MUTE = "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1", "192.0.2.4:1"
SCHEMA = Schema((TensorSpec("w", "float32", (3,), CompressionType.NONE),), 1024)
GATHER = pack_gather(1.0, None, Mode.NODE)
ROUND_TRIP = 0.02
LOWER = 0.5


@dataclass
class Leaders(OneLane):
    """The network: DEAD never answers, MUTE accepts and then sends nothing, GOOD begins later."""

    begins_after: float = 0.0

    async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        if endpoint == DEAD:
            await asyncio.Event().wait()
        await asyncio.sleep(ROUND_TRIP)
        yield MessageFromLeader(MessageCode.ACCEPTED)
        if endpoint == MUTE:
            await asyncio.Event().wait()
        await asyncio.sleep(self.begins_after)
        yield MessageFromLeader(
            MessageCode.BEGIN_ALLREDUCE,
            bytes(20),
            ordered_group_endpoints=(GOOD, ME),
            gathered=(GATHER, request.gather),
        )


def searcher(
    transport: object, discovery: Discovery, *, group_size: int, deadlines: Deadlines | None = None
) -> Matchmaking:
    config = SearchConfig("run", ME, group_size, 2, 30.0, virtual_time.clock, random.Random(1))
    conduct = Conduct(deadlines)
    return Matchmaking(config, SCHEMA, cast("Transport", transport), discovery, conduct=conduct)


async def search(deadlines: Deadlines, *declared: str, leaders: Leaders | None = None, mode: Mode = Mode.NODE) -> float:
    """How long a search takes among leaders that have declared to wait, the first one for the shortest time."""
    registry = MemoryRegistry(clock=virtual_time.clock, delay=0.0, rng=random.Random(1))
    async with MemoryDiscovery(registry) as discovery:
        now = virtual_time.clock()
        for number, endpoint in enumerate(declared):
            await discovery.store(group_key("run", ""), endpoint, pack_looking(True), now + 15 + 10 * number)
        found = searcher(leaders or Leaders(), discovery, group_size=3, deadlines=deadlines)
        await found.find_group(pack_gather(1.0, None, mode), now + 90)
    return virtual_time.clock() - now


def test_a_dead_candidate_costs_less_as_soon_as_round_trips_are_known() -> None:
    async def main() -> None:
        deadlines = Deadlines(LOWER, 10.0)
        assert await search(deadlines, DEAD, GOOD) == pytest.approx(VERDICT_SECONDS, abs=0.2)
        usual = [await search(deadlines, GOOD) for _ in range(MIN_WAITS)]
        # It missed one before, so it gets twice what one gets who is new.
        assert await search(deadlines, DEAD, GOOD) <= max(usual) + 4 * LOWER + 0.1

        fresh = Deadlines(LOWER, 10.0)
        for _ in range(MIN_WAITS):
            await search(fresh, GOOD)
        assert await search(fresh, DEAD, GOOD) <= max(usual) + 2 * LOWER + 0.1

    virtual_time.run(main())


def test_a_leader_that_has_accepted_may_decide_until_its_declaration_expires() -> None:
    async def main() -> None:
        deadlines = Deadlines(LOWER, 10.0)
        for _ in range(MIN_WAITS):
            await search(deadlines, GOOD)
        assert await search(deadlines, GOOD, leaders=Leaders(begins_after=14.0)) == pytest.approx(14.0, abs=0.1)

    virtual_time.run(main())


def test_a_client_waits_for_a_silent_leader_until_its_declaration_expires() -> None:
    async def main() -> None:
        waited = await search(Deadlines(LOWER, 10.0), MUTE, GOOD, mode=Mode.CLIENT)
        assert waited == pytest.approx(15 + CLOCK_TOLERANCE, abs=0.2)  # and not its own 90 s

    virtual_time.run(main())


@pytest.mark.parametrize("stopped", [20.0, 60.0])
def test_a_peer_that_stood_still_counts_no_other_as_silent(stopped: float) -> None:
    async def main() -> None:
        deadlines = Deadlines(LOWER, 10.0)
        for _ in range(MIN_WAITS):
            await search(deadlines, GOOD)

        async def stop() -> None:
            await asyncio.sleep(ROUND_TRIP / 2)
            virtual_time.stand_still(stopped)

        stopping = asyncio.create_task(stop())
        await search(deadlines, GOOD)
        await stopping
        (told,) = deadlines.learned()
        assert told.waits == MIN_WAITS + 1
        assert told.deadline < 2 * LOWER

    virtual_time.run(main())


@pytest.mark.parametrize("verdict", [MessageCode.ACCEPTED, MessageCode.NOT_LOOKING_FOR_GROUP])
def test_a_full_group_waits_for_the_answer_to_its_leader_s_own_request(verdict: MessageCode) -> None:
    """Otherwise it could be in two groups at once."""
    asked, answer = asyncio.Event(), asyncio.Event()

    class Undecided(OneLane):
        async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
            asked.set()
            await answer.wait()
            yield MessageFromLeader(verdict)
            yield MessageFromLeader(
                MessageCode.BEGIN_ALLREDUCE,
                bytes(20),
                ordered_group_endpoints=(GOOD, ME),
                gathered=(GATHER, request.gather),
            )

    async def main() -> None:
        async with MemoryDiscovery(MemoryRegistry(clock=virtual_time.clock)) as discovery:
            now = virtual_time.clock()
            await discovery.store(group_key("run", ""), GOOD, pack_looking(True), now + 10)
            found = searcher(Undecided(), discovery, group_size=2)
            async with asyncio.TaskGroup() as tasks, asyncio.timeout(5.0):
                searching = tasks.create_task(found.find_group(GATHER, now + 30))
                await asked.wait()
                replies = found.join_group(JoinRequest(MUTE, SCHEMA.hash, now + 60, GATHER))
                assert (await anext(replies)).code is MessageCode.ACCEPTED
                decision = tasks.create_task(anext(replies))
                await asyncio.sleep(1.0)
                assert not decision.done()
                answer.set()
                decided, group = await decision, await searching
                await replies.aclose()
        if verdict is MessageCode.ACCEPTED:
            assert (decided.code, decided.suggested_leader) == (MessageCode.GROUP_DISBANDED, GOOD)
            assert (group.leader, set(group.endpoints)) == (GOOD, {GOOD, ME})
        else:
            assert decided.code is MessageCode.BEGIN_ALLREDUCE
            assert (group.leader, set(group.endpoints)) == (ME, {MUTE, ME})

    virtual_time.run(main())
