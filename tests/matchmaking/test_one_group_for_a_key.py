"""Where only one group may have a key, another one begins once the first has averaged for nobody, and not before."""

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from averaging import Peer, Receipt
from averaging.matchmaking import Quorum
from averaging.testing import virtual_time
from tests.support.swarm import Swarm

GRACE = 0.25
ONCE = Quorum(2, GRACE)


async def refuse(_: object) -> str:
    return "the test refuses it"


class Members:
    """Peers that average one phase of a topic."""

    def __init__(self, swarm: Swarm, stack: AsyncExitStack) -> None:
        self._swarm, self._stack = swarm, stack
        self._topics: dict[Peer, Any] = {}

    async def enter(self, name: str, **options: Any) -> Peer:
        peer = self._swarm.peer(name, {"own": torch.zeros(1)}, group_wait=2.0, round_timeout=20.0, **options)
        await self._stack.enter_async_context(peer)
        self._topics[peer] = peer.topic("steps", {"step": torch.ones(6)}, adopt="whole")
        peer.progress.announce(b"trains")
        return peer

    def are_in_group(self, peer: Peer) -> bool:
        """Whether this peer sees that others are in a group of the phase."""
        return peer.group_began(self._topics[peer], "1") is not None

    def average(self, peer: Peer, *, fails: bool = False, **options: Any) -> Coroutine[Any, Any, Receipt]:
        if fails:
            options["confirm"] = refuse
        if peer.config.mode.name != "AUXILIARY":
            options |= {"quorum": ONCE, "gather": {"quorum": list(ONCE.stated)}}
        return peer.average(self._topics[peer], phase="1", **options)


def simulate(main: Any, seed: int) -> Any:
    swarm = Swarm(seed)

    async def run() -> Any:
        async with AsyncExitStack() as stack:
            return await main(swarm, Members(swarm, stack))

    return swarm.simulate(run())


@pytest.mark.parametrize("auxiliary", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_group_that_has_averaged_for_nobody_is_followed_by_another_one_at_once(seed: int, auxiliary: bool) -> None:
    async def main(swarm: Swarm, members: Members) -> Mapping[str, float]:
        peers = [await members.enter(f"peer:{number}") for number in (1, 2)]
        if auxiliary:
            peers.append(await members.enter("helper:1", mode="auxiliary"))
        await asyncio.sleep(0.1)
        failed = await asyncio.gather(*(members.average(peer, fails=True) for peer in peers))
        assert not any(receipt.averaged for receipt in failed)
        assert len({receipt.group_id for receipt in failed}) == 1
        await asyncio.sleep(0.1)
        assert not any(map(members.are_in_group, peers))
        began = virtual_time.clock()
        receipts = await asyncio.gather(*(members.average(peer) for peer in peers[:2]))  # an auxiliary need not look
        assert all(receipt.averaged for receipt in receipts), receipts
        return {receipt.endpoint: virtual_time.clock() - began for receipt in receipts}

    assert max(simulate(main, seed).values()) < GRACE + 1.0


@pytest.mark.parametrize("seed", range(4))
def test_a_group_that_has_averaged_for_one_member_is_followed_by_none(seed: int) -> None:
    """The one that holds its result says so until the others have it."""

    async def main(swarm: Swarm, members: Members) -> list[Receipt]:
        first, second, third = [await members.enter(f"peer:{number}") for number in (1, 2, 3)]
        await asyncio.sleep(0.1)
        made, failed = await asyncio.gather(members.average(first), members.average(second, fails=True))
        assert (made.averaged, failed.averaged) == (True, False)
        await asyncio.sleep(0.1)
        assert list(map(members.are_in_group, (first, second, third))) == [False, True, True]
        return await asyncio.gather(*(members.average(peer, search_timeout=10.0) for peer in (second, third)))

    assert not any(receipt.averaged for receipt in simulate(main, seed))
