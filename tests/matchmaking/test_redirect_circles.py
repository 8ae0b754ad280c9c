"""Four peers that are declared as the earliest leaders and send whoever asks on to each other: the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import pytest

from averaging import Outcome, Peer, Receipt
from averaging.matchmaking.rules import pack_looking
from averaging.protocol.group import group_key
from averaging.protocol.messages import JoinRequest, MessageCode, MessageFromLeader
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery
from tests.support.rounds import OneRound
from tests.support.swarm import Swarm, scalars

NAMES = [f"192.0.2.{number}:1" for number in range(10, 14)]
MATCHMAKING_TIME, DECLARED, TIMEOUT = 5.0, 2.0, 60.0
PAUSE = 1.0
"""Seconds between two rounds."""


class InACircle(OneRound):
    """Suggests the next one of `NAMES`.

    Args:
        name: its own.
        accepts: whether it accepts requests to join first.
        seconds: until it answers, or until it disbands its group.
    """

    def __init__(self, name: str, accepts: bool, seconds: float) -> None:
        self._next = NAMES[(NAMES.index(name) + 1) % len(NAMES)]
        self._accepts, self._seconds = accepts, seconds

    async def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        if self._accepts:
            yield MessageFromLeader(MessageCode.ACCEPTED)
        await asyncio.sleep(self._seconds)
        code = MessageCode.GROUP_DISBANDED if self._accepts else MessageCode.NOT_A_LEADER
        yield MessageFromLeader(code, suggested_leader=self._next)


async def declare(discovery: MemoryDiscovery) -> None:
    while True:
        for number, name in enumerate(NAMES):
            until = virtual_time.clock() + DECLARED + number / 1000
            await discovery.store(group_key("run", ""), name, pack_looking(True), until)
        await asyncio.sleep(0.4)


@pytest.mark.parametrize(
    ("accepts", "seconds", "known_after"),
    [(False, 0.0, 5.0), (False, 0.9, 30.0), (True, 0.0, 15.0), (True, 2.0, 60.0), (True, 4.8, 90.0)],
    ids=["refuse", "refuse late", "disband at once", "disband later", "disband at the last moment"],
)
def test_those_that_lead_into_a_circle_are_left_alone_once_they_are_known(
    accepts: bool, seconds: float, known_after: float
) -> None:
    swarm = Swarm(0)
    peers = [
        swarm.peer(f"peer:{number}", [tensor], group_size=4, group_wait=MATCHMAKING_TIME, round_timeout=TIMEOUT)
        for number, tensor in enumerate(scalars(4, 0), 1)
    ]
    time = virtual_time.clock

    async def average(peer: Peer) -> list[tuple[float, Receipt]]:
        found, began = [], time()
        while (moment := time() - began) < known_after + 15.0:
            receipt = await peer.average()
            if moment < known_after + 10.0:  # in the last one it may be alone
                found.append((moment, receipt))
            await asyncio.sleep(PAUSE)
        return found

    async def main() -> list[tuple[float, Receipt]]:
        async with MemoryDiscovery(swarm.registry) as discovery, AsyncExitStack() as stack:
            for name in NAMES:
                await swarm.network.transport(name).serve(InACircle(name, accepts, seconds), None)
            declaring = asyncio.create_task(declare(discovery))
            await asyncio.sleep(0.1)
            for peer in peers:
                await stack.enter_async_context(peer)
            found = await asyncio.gather(*map(average, peers))
            declaring.cancel()
            return [one for own in found for one in own]

    late = 0
    for moment, receipt in swarm.simulate(main()):
        assert receipt.outcome is Outcome.AVERAGED, receipt
        assert receipt.seconds < TIMEOUT, receipt
        if moment > known_after:
            assert len(receipt.members) == 4, receipt
            assert receipt.seconds < 1.0, (moment, receipt)
            late += 1
    assert late >= 4 * 5
