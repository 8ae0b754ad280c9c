"""A leader learns from a header of the call how large a group its follower wants."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import torch

from averaging import Outcome
from tests.support.peers import average, enter

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


@pytest.mark.asyncio
async def test_no_group_begins_that_is_too_small_for_one_of_its_followers() -> None:
    async with AsyncExitStack() as stack:
        tensors = [{"w": torch.full((4,), float(number))} for number in range(3)]
        leading = await enter(stack, tensors[0], group_wait=2.0, round_timeout=3.0, group_size=4)
        joined = {"join": [leading.endpoint], "round_timeout": 3.0, "group_size": 4}
        wanting = await enter(stack, tensors[1], group_wait=3.0, min_group_size=3, **joined)
        for receipt in await average(leading, wanting):
            assert receipt.outcome is Outcome.NO_GROUP, receipt
        assert "no group of at least 3 came together" in receipt.reason
        assert [tensor["w"].tolist() for tensor in tensors] == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
        third = await enter(stack, tensors[2], group_wait=2.5, **joined)
        for receipt in await average(leading, wanting, third):
            assert receipt.outcome is Outcome.AVERAGED, receipt
            assert len(receipt.members) == 3
