"""Searches for a group on machines that sleep, or stand still, for longer than the search may take."""

import asyncio
from contextlib import AsyncExitStack

import pytest
import torch

from averaging import Receipt
from averaging.receipts.receipt import Outcome
from averaging.testing import virtual_time
from averaging.testing.virtual_time import stand_still
from tests.support.swarm import Swarm, scalars

ASLEEP = 600.0


def average(seed: int, still_after: float, *, peers: int, comes_late: bool = False) -> tuple[list[Receipt], float]:
    """All look for `peers` for 60 s, and stand still on the way; returns the receipts, and the virtual seconds."""
    swarm = Swarm(seed)
    tensors = scalars(peers, seed)
    mean = torch.stack(tensors).mean(dim=0)

    async def main() -> tuple[list[Receipt], float]:
        async with AsyncExitStack() as stack:
            entered = [
                await stack.enter_async_context(
                    swarm.peer(f"peer:{number}", [tensor], group_size=peers, min_group_size=peers, group_wait=60.0)
                )
                for number, tensor in enumerate(tensors, 1)
            ]
            began = virtual_time.clock()
            early = entered[:-1] if comes_late else entered
            looking = [asyncio.create_task(peer.average()) for peer in early]
            await asyncio.sleep(still_after)
            assert not any(task.done() for task in looking)
            stand_still(ASLEEP)
            looking += [asyncio.create_task(peer.average()) for peer in entered[len(early) :]]
            receipts = await asyncio.gather(*looking)
            return receipts, virtual_time.clock() - began - ASLEEP - still_after

    receipts, seconds = swarm.simulate(main())
    if all(receipt.outcome is Outcome.AVERAGED for receipt in receipts):
        assert all(torch.allclose(tensor, mean) for tensor in tensors)
    return receipts, seconds


@pytest.mark.parametrize("seed", range(4))
def test_those_that_slept_in_the_middle_of_it_find_each_other(seed: int) -> None:
    receipts, seconds = average(seed, 0.002 * seed, peers=4)
    assert [receipt.outcome for receipt in receipts] == [Outcome.AVERAGED] * 4, receipts
    assert seconds < 10, receipts


@pytest.mark.parametrize("seed", range(2))
def test_a_peer_that_slept_has_the_rest_of_its_time_for_those_that_come_later(seed: int) -> None:
    receipts, seconds = average(seed, 20.0, peers=3, comes_late=True)
    assert [receipt.outcome for receipt in receipts] == [Outcome.AVERAGED] * 3, receipts
    assert seconds < 10, receipts


def test_a_peer_that_slept_gives_up_when_the_rest_of_its_time_is_over() -> None:
    swarm = Swarm(1)

    async def main() -> float:
        async with swarm.peer("peer:1", scalars(1, 1), group_wait=60.0) as peer:
            looking = asyncio.create_task(peer.average())
            await asyncio.sleep(20.0)
            stand_still(ASLEEP)
            woke = virtual_time.clock()
            assert (await looking).outcome is Outcome.NO_GROUP
            return virtual_time.clock() - woke

    assert swarm.simulate(main()) == pytest.approx(40.0, abs=4.0)
