"""What leaders answer that do not lead: errors say it, and suggestions are followed with care."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from averaging.errors import CallRefusedError
from averaging.matchmaking import Conduct, Matchmaking, NoGroupError, SearchConfig
from averaging.matchmaking.rules import pack_looking
from averaging.protocol.group import Mode, group_key, pack_gather
from averaging.protocol.messages import CompressionType, JoinRequest, MessageCode, MessageFromLeader
from averaging.receipts.receipt import Outcome, Receipt
from averaging.tensors.schema import Schema, TensorSpec
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry
from averaging.transport.base import Transport
from tests.support.fake_transport import OneLane
from tests.support.rounds import SilentLeader
from tests.support.swarm import Swarm, scalars

LEADER, STRANGER, ME = "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1"
SCHEMA = Schema((TensorSpec("w", "float32", (3,), CompressionType.NONE),), 1024)
GATHER = pack_gather(1.0, None, Mode.NODE)
CLIENT = "client::0b5e6ff2-6a0f-4a3e-9c1b-2f8f6f0d8d11"


class OneLeader(OneLane):
    """The network: every peer that is asked to lead begins a group with these members."""

    def __init__(self, *members: str) -> None:
        self.members = members
        self.asked: list[str] = []

    async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        self.asked.append(endpoint)
        yield MessageFromLeader(MessageCode.ACCEPTED)
        gathers = tuple(pack_gather(1.0, None, Mode.CLIENT if m is CLIENT else Mode.NODE) for m in self.members)
        yield MessageFromLeader(
            MessageCode.BEGIN_ALLREDUCE, bytes(20), ordered_group_endpoints=self.members, gathered=gathers
        )


class Differing(OneLeader):
    """The network: all other peers average other tensors."""

    async def get_schema(self, endpoint: str) -> Schema:
        return Schema((TensorSpec("w", "float32", (4,), CompressionType.NONE),), 1024)


def matchmaking(
    network: OneLeader,
    discovery: MemoryDiscovery,
    endpoint: str = ME,
    conduct: Conduct | None = None,
) -> Matchmaking:
    config = SearchConfig("run", endpoint, 3, 2, 10.0, virtual_time.clock, random.Random(1))
    return Matchmaking(config, SCHEMA, cast("Transport", network), discovery, conduct=conduct)


def search(
    network: OneLeader,
    *,
    names_stranger: bool = False,
    conduct: Conduct | None = None,
) -> tuple[str, ...]:
    """The members of the group that a follower takes part in; `names_stranger`: whether discovery does so."""

    async def main() -> tuple[str, ...]:
        registry = MemoryRegistry(clock=virtual_time.clock, delay=0.0, rng=random.Random(1))
        async with MemoryDiscovery(registry) as discovery:
            now = virtual_time.clock()
            await discovery.store(group_key("run", ""), LEADER, pack_looking(True), now + 4)
            if names_stranger:
                await discovery.store(group_key("run", ""), STRANGER, pack_looking(False), now + 6)
            return (await matchmaking(network, discovery, conduct=conduct).find_group(GATHER, now + 8)).endpoints

    found: tuple[str, ...] = virtual_time.run(main())
    return found


@pytest.mark.parametrize(
    ("accepts", "then", "reason"),
    [
        (False, None, "ended its answer early"),
        (False, CallRefusedError(LEADER, "TypeError: x is not a function"), "TypeError: x is not a function"),
        (True, None, "ended its answer early"),
        (True, 60.0, "accepted this peer, but neither began a group nor disbanded it"),
        (True, MessageFromLeader(MessageCode.INTERNAL_ERROR), "INTERNAL_ERROR"),
        (True, MessageFromLeader(MessageCode.BEGIN_ALLREDUCE, bytes(20)), "began a group of 0 with 0 gathers"),
    ],
)
def test_the_error_says_what_a_leader_did_instead(accepts: bool, then: object, reason: str) -> None:
    class Odd(OneLeader):
        async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
            if accepts:
                yield MessageFromLeader(MessageCode.ACCEPTED)
            if isinstance(then, Exception):
                raise then
            if isinstance(then, float):
                await asyncio.sleep(then)
            if isinstance(then, MessageFromLeader):
                yield then

    with pytest.raises(NoGroupError, match=rf"\({LEADER}: {reason}\)"):
        search(Odd())


class Redirects(OneLeader):
    """The network: every peer that is asked suggests this one."""

    def __init__(self, suggested: str) -> None:
        super().__init__()
        self.suggested = suggested

    async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        self.asked.append(endpoint)
        yield MessageFromLeader(MessageCode.NOT_A_LEADER, suggested_leader=self.suggested)


@pytest.mark.parametrize("broke", [False, True])
def test_an_excluded_peer_is_not_followed_as_a_suggestion(broke: bool) -> None:
    conduct = Conduct()
    for _ in range(4 * broke):
        conduct.note_fault(STRANGER, 0.0)
    network = Redirects(STRANGER)
    with pytest.raises(NoGroupError):
        search(network, names_stranger=True, conduct=conduct)
    assert (STRANGER in network.asked) is not broke


@pytest.mark.parametrize("suggested", [ME, "169.254.169.254:80", STRANGER])
def test_only_other_peers_that_discovery_knows_are_followed_as_suggestions(suggested: str) -> None:
    network = Redirects(suggested)
    with pytest.raises(NoGroupError):
        search(network)
    assert set(network.asked) == {LEADER}


@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize("mode", [Mode.NODE, Mode.CLIENT])
def test_following_suggestions_ends_when_the_search_is_over(accepts: bool, mode: Mode) -> None:
    """Otherwise it would ask three more peers that are slow to answer, long after its deadline."""
    names = [f"192.0.2.{number}:1" for number in range(10, 14)]

    class Slow(OneLeader):
        async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
            self.asked.append(endpoint)
            suggested = names[(names.index(endpoint) + 1) % len(names)]
            await asyncio.sleep(2.5)
            if accepts:
                yield MessageFromLeader(MessageCode.ACCEPTED)
            yield MessageFromLeader(
                MessageCode.GROUP_DISBANDED if accepts else MessageCode.NOT_A_LEADER, suggested_leader=suggested
            )

    network = Slow()

    async def main() -> float:
        registry = MemoryRegistry(clock=virtual_time.clock, delay=0.0, rng=random.Random(1))
        async with MemoryDiscovery(registry) as discovery:
            now = virtual_time.clock()
            await discovery.store(group_key("run", ""), names[0], pack_looking(True), now + 1)
            for name in names:
                await discovery.store("run.peers", name, b"", now + 60)
            found = matchmaking(network, discovery, CLIENT if mode is Mode.CLIENT else ME)
            with pytest.raises(NoGroupError):
                await found.find_group(pack_gather(1.0, None, mode), now + 2)
            return virtual_time.clock() - now

    assert virtual_time.run(main()) < 2 + 3
    assert network.asked == names[:1]


@pytest.mark.parametrize("accepts", [False, True])
def test_a_stuck_peer_that_renews_its_declaration_does_not_keep_the_others_apart(accepts: bool) -> None:
    swarm = Swarm(1)
    peers = [
        swarm.peer(f"peer:{number}", [tensor], group_size=4, group_wait=5.0, round_timeout=15.0)
        for number, tensor in enumerate(scalars(4, 1), 1)
    ]

    async def declare() -> None:
        async with MemoryDiscovery(swarm.registry) as discovery:
            while True:  # so that its declaration is always the smallest
                until = virtual_time.clock() + 2.5
                await discovery.store(group_key("run", ""), LEADER, pack_looking(True), until)
                await asyncio.sleep(2.4)

    async def main() -> list[list[Receipt]]:
        await swarm.network.transport(LEADER).serve(SilentLeader(accepts), None)
        declaring = asyncio.create_task(declare())
        await asyncio.sleep(0.1)
        try:
            return await swarm.average_together(peers, rounds=3)
        finally:
            declaring.cancel()

    for receipt in (receipt for receipts in swarm.simulate(main()) for receipt in receipts):
        assert receipt.outcome is Outcome.AVERAGED, receipt
        assert len(receipt.members) == 4
        assert receipt.seconds < (5 + 3 + 1 if accepts else 5)


@pytest.mark.parametrize("named", [False, True])
def test_another_schema_counts_only_from_a_peer_that_discovery_knows(named: bool) -> None:
    """Any caller can send any hash; only a peer with a record shows that the run has other tensors."""

    async def main() -> BaseException | None:
        async with MemoryDiscovery(MemoryRegistry(clock=virtual_time.clock)) as discovery:
            found = matchmaking(Differing(), discovery)
            now = virtual_time.clock()
            if named:
                await discovery.store("run.others", STRANGER, b"", now + 60)
            searching = asyncio.create_task(found.find_group(GATHER, now + 5))
            await asyncio.sleep(1)
            replies = found.join_group(JoinRequest(STRANGER, b"another", now + 60, GATHER))
            assert [reply.code async for reply in replies] == [MessageCode.BAD_SCHEMA_HASH]
            await asyncio.wait([searching])
            return searching.exception()

    assert ("averages something else" in str(virtual_time.run(main()))) is named
