"""Whole rounds in which some members send false values."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
import torch

from averaging import Outcome, Receipt
from averaging.protocol.group import ReplyForm
from tests.support.swarm import Swarm, spread


@pytest.mark.parametrize("reply", list(ReplyForm))
@pytest.mark.parametrize(("rule", "bound"), [("median", 1.0), ("trimmed:2", 1.0), ("clip:3", 3.0)])
def test_two_false_members_of_eight_have_a_bounded_effect(rule: str, bound: float, reply: ReplyForm) -> None:
    swarm = Swarm(5)
    tensors = [torch.rand(700, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(8)]
    honest = torch.stack(tensors[:6]).mean(dim=0)
    for false in tensors[6:]:
        false.fill_(1e6)
    peers = [
        swarm.peer(
            f"peer:{n + 1}", [tensors[n]], group_size=8, aggregation=rule, part_size_bytes=1024, reply_form=reply
        )
        for n in range(8)
    ]
    for receipts in swarm.simulate(swarm.average_together(peers)):
        assert receipts[0].outcome is Outcome.AVERAGED
        assert receipts[0].dropped == ()
    assert spread(tensors[:6]) < 1e-9
    assert float((tensors[0] - honest).abs().max()) < bound


def test_false_members_shift_the_mean() -> None:
    swarm = Swarm(5)
    tensors = [torch.zeros(7) for _ in range(3)]
    tensors[2].fill_(1e6)
    peers = [swarm.peer(f"peer:{n + 1}", [tensors[n]], group_size=3) for n in range(3)]
    swarm.simulate(swarm.average_together(peers))
    assert float(tensors[0].min()) > 3e5


def test_peers_with_different_rules_form_no_group() -> None:
    swarm = Swarm(1)
    rules = ["mean", "clip:3"]
    peers = [
        swarm.peer(f"peer:{n + 1}", [torch.zeros(3)], group_wait=2.0, aggregation=rule) for n, rule in enumerate(rules)
    ]

    async def main() -> list[Receipt]:
        async with AsyncExitStack() as stack:
            for peer in peers:
                await stack.enter_async_context(peer)
            return await asyncio.gather(*(peer.average() for peer in peers))

    for receipt in swarm.simulate(main()):
        assert receipt.outcome is Outcome.NO_GROUP
        assert "contributions are aggregated by" in receipt.reason
