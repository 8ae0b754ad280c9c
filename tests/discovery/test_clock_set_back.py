"""A wall clock that is set during a search neither delays the end of the search nor causes it."""

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
import torch

from averaging import Mode, Outcome, Peer
from averaging.matchmaking import Matchmaking, NoGroupError, SearchConfig
from averaging.matchmaking.rules import CLOCK_TOLERANCE, pack_looking
from averaging.peer import PeerContext
from averaging.protocol.group import group_key, pack_gather
from averaging.protocol.messages import CompressionType, JoinRequest, MessageCode, MessageFromLeader
from averaging.tensors.schema import Schema, TensorSpec
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry
from averaging.testing.transport import MemoryNetwork
from averaging.transport.base import Transport
from tests.support.fake_transport import OneLane
from tests.support.simulated import in_virtual_time

LEADER, ME = "192.0.2.1:1", "192.0.2.3:1"
TIMEOUT, STEP = 10.0, 1800.0


class Clock:
    """The wall clock."""

    behind = 0.0

    def __call__(self) -> float:
        return virtual_time.clock() - self.behind


def peer_of(registry: MemoryRegistry, network: MemoryNetwork, endpoint: str, clock: Any, mode: Mode) -> Peer:
    return Peer(
        [torch.ones(2)],
        run_id="run",
        context=PeerContext(
            transport=network.transport(None if mode is Mode.CLIENT else endpoint),
            discovery=lambda *_: MemoryDiscovery(registry),
            clock=clock,
            rng=random.Random(1),
        ),
        mode=mode,
        group_size=2,
        group_wait=3.0,
        round_timeout=TIMEOUT,
    )


@pytest.mark.parametrize("behind", [STEP, -STEP])
@pytest.mark.parametrize("mode", Mode)
@in_virtual_time
async def test_a_search_ends_in_time(mode: Mode, behind: float) -> None:
    clock = Clock()
    registry, network = MemoryRegistry(clock=clock, rng=random.Random(1)), MemoryNetwork(random.Random(1))
    async with peer_of(registry, network, ME, clock, mode) as peer:
        searching = asyncio.create_task(peer.average())
        await asyncio.sleep(1.0)
        clock.behind = behind
        receipt = await searching
    assert receipt.outcome is Outcome.NO_GROUP
    assert TIMEOUT - CLOCK_TOLERANCE - 0.1 < receipt.seconds < TIMEOUT + CLOCK_TOLERANCE + 0.1


@pytest.mark.parametrize("mode", [Mode.NODE, Mode.CLIENT])
@in_virtual_time
async def test_a_clock_that_is_set_forward_does_not_end_the_search(mode: Mode) -> None:
    clock = Clock()
    clock.behind = STEP
    registry = MemoryRegistry(clock=virtual_time.clock, rng=random.Random(1))
    network = MemoryNetwork(random.Random(1))
    async with (
        peer_of(registry, network, ME, clock, mode) as one,
        peer_of(registry, network, LEADER, virtual_time.clock, Mode.NODE) as other,
    ):
        searching = asyncio.create_task(one.average())
        await asyncio.sleep(1.0)
        clock.behind = 0.0
        await asyncio.sleep(1.0)
        await other.average()
        receipt = await searching
    assert receipt.outcome is Outcome.AVERAGED, receipt
    assert receipt.seconds < 6.0


class SilentLeader(OneLane):
    """The network: the leader accepts, the clock is set back, and the leader sends nothing more."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        self._clock.behind = STEP
        yield MessageFromLeader(MessageCode.ACCEPTED)
        await asyncio.get_running_loop().create_future()


@in_virtual_time
async def test_a_follower_waits_no_longer_for_a_silent_leader() -> None:
    clock = Clock()
    config = SearchConfig("run", ME, 4, 2, 3.0, clock, random.Random(2))
    schema = Schema((TensorSpec("w", "float32", (3,), CompressionType.NONE),), 1024)
    async with MemoryDiscovery(MemoryRegistry(clock=clock, rng=random.Random(1))) as discovery:
        await discovery.store(group_key("run", ""), LEADER, pack_looking(True), clock() + 1.0)
        matchmaking = Matchmaking(config, schema, cast(Transport, SilentLeader(clock)), discovery)
        with pytest.raises(NoGroupError):
            await matchmaking.find_group(pack_gather(1.0, None, Mode.NODE), clock() + TIMEOUT)
    # It may have asked once more just before the end.
    assert asyncio.get_running_loop().time() < TIMEOUT + CLOCK_TOLERANCE + 3.0 + CLOCK_TOLERANCE
