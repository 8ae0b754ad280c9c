"""No member averages in a group smaller than its own `min_group_size`, whichever peer leads."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from averaging import Outcome, Peer, Receipt
from averaging.protocol.messages import JoinRequest, MessageFromLeader
from averaging.receipts.receipt import DropCode
from averaging.testing.transport import MemoryTransport
from tests.support.selection import rest_is_long
from tests.support.swarm import Swarm, entered, scalars, together

SECONDS = 12.0


def largest(sizes: Sequence[int]) -> set[int]:
    """The largest group whose size satisfies each of its members, by brute force."""
    for count in range(len(sizes), 1, -1):
        if sum(size <= count for size in sizes) >= count:
            return {number for number, size in enumerate(sizes) if size <= count}
    return set()


async def live(peer: Peer, pause: float) -> list[Receipt]:
    """Averages again and again."""
    receipts = []
    while asyncio.get_running_loop().time() < SECONDS:
        receipts.append(await peer.average())
        await asyncio.sleep(pause)
    return receipts


def receipts_of(swarm: Swarm, peers: Sequence[Peer], pause: float = 2.0) -> list[list[Receipt]]:
    async def main() -> list[list[Receipt]]:
        async with entered(peers):
            found = await asyncio.gather(*(live(peer, pause) for peer in peers))
            assert not any(peer.excluded for peer in peers)
            return found

    return swarm.simulate(main())  # type: ignore[no-any-return]


@pytest.mark.parametrize("count", rest_is_long([3, 2, 4]))
def test_all_mixes_of_sizes(count: int) -> None:
    """All peers that can average do, in groups that are large enough for each member; the others have no group."""
    for seed, sizes in enumerate(itertools.combinations_with_replacement([2, 3, 4], count)):
        swarm = Swarm(seed)
        peers = [
            swarm.peer(
                f"peer:{number + 1}",
                [tensor],
                group_size=4,
                min_group_size=size,
                group_wait=2.0,
                round_timeout=12.0,
                min_stall_timeout=0.2,
            )
            for number, (size, tensor) in enumerate(zip(sizes, scalars(count, seed), strict=True))
        ]
        can = largest(sizes)
        for number, receipts in enumerate(receipts_of(swarm, peers)):
            averaged = [receipt for receipt in receipts if receipt.averaged]
            assert bool(averaged) is (number in can), f"{sizes}, {number}: {[str(receipt) for receipt in receipts]}"
            assert all(len(receipt.members) >= sizes[number] for receipt in averaged)
            assert all(receipt.outcome is Outcome.NO_GROUP for receipt in receipts if not receipt.averaged)


@pytest.mark.parametrize(("group_wait", "rounds"), [(9.0, 10), (1.0, 3)], ids=["it follows", "it leads"])
def test_a_member_with_a_larger_min_group_size_delays_the_others_by_its_declaration_at_most(
    group_wait: float, rounds: int
) -> None:
    swarm = Swarm(1)
    tensors = scalars(3, 1)
    wanting = swarm.peer(
        "peer:1", [tensors[0]], group_size=4, min_group_size=4, group_wait=group_wait, round_timeout=10.0
    )
    others = [
        swarm.peer(f"peer:{number}", [tensors[number - 1]], group_size=2, group_wait=4.0, round_timeout=10.0)
        for number in (2, 3)
    ]
    first, *rest = receipts_of(swarm, [wanting, *others], pause=0.5)
    assert {receipt.outcome for receipt in first} == {Outcome.NO_GROUP}
    assert "no group of at least 4 came together" in first[0].reason
    for receipts in rest:
        assert sum(receipt.averaged for receipt in receipts) > rounds, [str(receipt) for receipt in receipts]


class WithoutSize(MemoryTransport):
    """Leaders do not receive the size that this peer wants, like those of other implementations."""

    def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        return super().join_group(endpoint, replace(request, min_group_size=2))


@pytest.mark.parametrize(("size", "others"), [(3, 1), (4, 2), (8, 5)])
def test_a_member_leaves_a_group_that_is_too_small_and_the_receipt_says_why(size: int, others: int) -> None:
    swarm = Swarm(size)
    tensors = [torch.full((1200,), float(number)) for number in range(others + 1)]
    before = tensors[-1].clone()
    options: dict[str, Any] = {"group_size": 8, "group_wait": 2.0, "round_timeout": 20.0, "part_size_bytes": 1024}
    wanting: dict[str, Any] = {"min_group_size": size, "group_wait": 3.0}
    peers = [swarm.peer(f"peer:{number + 1}", [tensors[number]], **options) for number in range(others)]
    swarm.network.transport = lambda endpoint: WithoutSize(swarm.network, endpoint)  # type: ignore[method-assign]
    peers.append(swarm.peer("wanting:1", [tensors[-1]], **(options | wanting)))

    async def main() -> list[Receipt]:
        async with entered(peers):
            receipts = await together(peers)
            assert not any(peer.excluded for peer in peers)
            return receipts

    *rest, receipt = swarm.simulate(main())
    leader = next(one for one in rest if one.role == "leader")
    assert receipt.outcome is Outcome.FAILED
    assert receipt.reason == (
        f"{leader.endpoint} began a group of {others + 1} members, but this peer takes part only in groups of at least "
        f"{size} (min_group_size), so it left; give all peers of the run the same min_group_size"
    )
    assert (receipt.role, len(receipt.members)) == ("follower", others + 1)
    assert before.equal(tensors[-1])
    for one in rest:
        assert [lost.endpoint for lost in one.dropped] == ["wanting:1"]
        assert one.dropped[0].code in (DropCode.CANCELLED, DropCode.REFUSED)
        assert one.allreduce_seconds < 1.5  # min_stall_timeout: it is not proved who sent the message that it leaves
        assert one.outcome is (Outcome.AVERAGED if others > 1 else Outcome.FAILED), one
