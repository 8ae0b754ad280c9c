"""Whole rounds in which some members send false values."""

from __future__ import annotations

import pytest
import torch

from averaging import Outcome
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
