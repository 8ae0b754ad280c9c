"""Parts of groups that our peer does not know, not yet, or no longer, and impossible rounds."""

import asyncio
from typing import Any

import pytest
import torch

from averaging.matchmaking import Matchmaking
from tests.foreign.driver import DEADLINE, Foreign, as_bytes, gather, our_peer
from tests.foreign.groups import PART, SHAPE, group_with, values

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("nothing_is_left_behind"),
]


async def test_parts_of_an_unknown_group(foreign: Foreign) -> None:
    sender = await foreign.peer()
    part = {"buffer": bytes(32), "size": [8], "dtype": "float32"}
    message = {"code": "PART_FOR_AVERAGING", "group_id": b"?" * 20, "endpoint": sender.endpoint, "tensor_part": part}
    async with our_peer() as us:
        assert await sender.send(reducer=us.endpoint, messages=[message]) == [{"code": "BAD_GROUP_ID"}]
        async with us.averaging():
            assert await sender.send(reducer=us.endpoint, messages=[message]) == [{"code": "BAD_GROUP_ID"}]


async def test_parts_after_the_round(foreign: Foreign) -> None:
    async with group_with(foreign, client=True) as group:
        messages = await group.messages(group.bad)
        await asyncio.gather(group.bad.send(reducer=group.us.endpoint, messages=messages), group.good_sends())
        await group.ends(without=False)
        refused = await group.bad.send(reducer=group.us.endpoint, messages=messages)
        assert refused == [{"code": "BAD_GROUP_ID"}]


@pytest.mark.parametrize("begins", [True, False], ids=["it begins", "it is disbanded"])
@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "not yet accepted"])
async def test_parts_before_the_round(
    foreign: Foreign, monkeypatch: pytest.MonkeyPatch, accepted: bool, begins: bool
) -> None:
    waits = asyncio.Event()
    assembling = Matchmaking.assembling

    async def announced(self: Matchmaking) -> None:
        waits.set()
        await assembling(self)

    monkeypatch.setattr(Matchmaking, "assembling", announced)
    leader = await foreign.peer()
    async with our_peer([values(1)], part_size_bytes=PART) as us:
        await us.declare(leader.endpoint)
        async with us.averaging() as receipt:
            await leader.next_request()
            group = {
                "group_id": b"g" * 20,
                "ordered_group_endpoints": [leader.endpoint, us.endpoint],
                "gathered": [gather(), gather()],
            }
            if accepted:
                await leader.answer(follower=us.endpoint, code="ACCEPTED")
            arguments = {"group": group, "schema": us.schema, "tensors": as_bytes([values(2)])}
            if begins:
                round_ = asyncio.ensure_future(leader.average(**arguments))
            else:
                messages = await leader.messages(reducer=us.endpoint, **arguments)
                round_ = asyncio.ensure_future(leader.send(reducer=us.endpoint, messages=messages))
            async with asyncio.timeout(DEADLINE):
                await waits.wait()
            if not accepted:
                await leader.answer(follower=us.endpoint, code="ACCEPTED")
            if begins:
                await leader.begin(group=group)
                (after,) = await round_
                assert (await receipt).dropped == ()
                assert after == as_bytes([(values(1) + values(2)) / 2])[0]
            else:
                await leader.answer(follower=us.endpoint, code="GROUP_DISBANDED")
                assert await round_ == [{"code": "BAD_GROUP_ID"}]


async def test_weights_that_sum_to_zero(foreign: Foreign) -> None:
    """This is an error before the round, in which our peer takes no part."""
    node = await foreign.peer()
    async with our_peer([values(1)], part_size_bytes=PART) as us, us.averaging(weight=0) as receipt:
        assert await us.asks_to_join(node, gather(0.0)) == "ACCEPTED"
        group = await us.begins(node)
        result = await receipt
        assert not result.averaged
        assert "sum to zero" in result.reason
        messages = await node.messages(
            reducer=us.endpoint, group=group, schema=us.schema, tensors=as_bytes([values(2)])
        )
        assert await node.send(reducer=us.endpoint, messages=messages) == [{"code": "BAD_GROUP_ID"}]


async def test_a_part_without_a_remaining_weight(foreign: Foreign) -> None:
    good, bad = await foreign.client(), await foreign.client()
    options: dict[str, Any] = {"group_size": 3, "part_size_bytes": PART, "stall_timeout": 3.0}
    async with our_peer([values(1)], **options) as us, us.averaging(weight=0) as receipt:
        assert await us.asks_to_join(good, gather(0.0, mode=1)) == "ACCEPTED"
        assert await us.asks_to_join(bad, gather(1.0, mode=1)) == "ACCEPTED"
        group = await us.begins(good, bad)
        message = {"code": "CANCELLED", "group_id": group["group_id"], "endpoint": bad.endpoint}
        assert await bad.send(reducer=us.endpoint, messages=[message]) == []
        messages = await good.messages(
            reducer=us.endpoint, group=group, schema=us.schema, tensors=as_bytes([values(2)])
        )
        # No more than it takes: gRPC may lose a reply that comes while its client still writes.
        assert await good.send(reducer=us.endpoint, messages=messages[:1]) == [{"code": "INTERNAL_ERROR"}]
        result = await receipt
        with us.peer.tensors() as (tensor,):
            assert torch.equal(tensor, values(1))
    reasons = {dropped.endpoint: dropped.reason for dropped in result.dropped}
    assert reasons.keys() == {good.endpoint, bad.endpoint}
    assert "INTERNAL_ERROR" in reasons[good.endpoint]
    assert result.kept_local == SHAPE[0]
