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


class OneLeader(OneLane):
    """The network: every peer that is asked to lead begins a group with these members."""

    def __init__(self, *members: str) -> None:
        self.members = members
        self.asked: list[str] = []

    async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        self.asked.append(endpoint)
        yield MessageFromLeader(MessageCode.ACCEPTED)
        gathers = (GATHER,) * len(self.members)
        yield MessageFromLeader(
            MessageCode.BEGIN_ALLREDUCE, bytes(20), ordered_group_endpoints=self.members, gathered=gathers
        )


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
