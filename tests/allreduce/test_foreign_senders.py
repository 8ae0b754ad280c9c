"""Foreign senders that break the protocol, leave or die: our reducer continues with the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.foreign.driver import Foreign, as_bytes, gather, our_peer
from tests.foreign.groups import BROKEN_PARTS, PART, PARTS, group_with, values
from tests.support.selection import rest_is_long

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("nothing_is_left_behind"),
]

VIOLATION = [{"code": "PROTOCOL_VIOLATION"}]

BROKEN_MESSAGES: dict[str, Any] = {
    "no tensor": {},
    "an average": {"code": "AVERAGED_PART"},
    "not a message": b"\xff\xff\xff",
    "an unknown code": {"code": 77},
}


IN_THE_MIDDLE = [(broken, 2) for broken in (*BROKEN_PARTS, *BROKEN_MESSAGES)]
AT_ONCE = [(broken, 0) for broken in (*reversed(BROKEN_MESSAGES), "another shape")]


@pytest.mark.parametrize(("broken", "place"), IN_THE_MIDDLE + rest_is_long(AT_ONCE, 2))
async def test_a_sender_of_invalid_messages(foreign: Foreign, broken: str, place: int) -> None:
    """Its earlier parts count if they arrived; it gets only the code."""
    async with group_with(foreign, client=True, stall_timeout=3.0) as group:
        messages = await group.messages(group.bad)
        if broken in BROKEN_PARTS:
            messages[place]["tensor_part"] = BROKEN_PARTS[broken]
        elif broken == "no tensor":
            del messages[place]["tensor_part"]
        elif isinstance(replacement := BROKEN_MESSAGES[broken], dict):
            messages[place] |= replacement
        else:
            messages[place] = replacement
        assert await group.bad.send(reducer=group.us.endpoint, messages=messages) == VIOLATION
        wanted = group.up_to(place)
        if broken in ("not a message", "an unknown code") and place == 0:
            await group.bad.send(reducer=group.us.endpoint, messages=group.leave_notice("CANCELLED"))
        assert torch.equal(await group.good_sends(), wanted)
        assert torch.equal(await group.ends(without=True), wanted)


async def test_streams_of_peers_that_are_no_senders_of_the_group(foreign: Foreign) -> None:
    stranger = await foreign.peer()
    async with group_with(foreign, client=True) as group:
        for name in (stranger.endpoint, group.us.endpoint, "", "client::nobody"):
            messages = await group.messages(group.bad)
            messages[0]["endpoint"] = name
            assert await stranger.send(reducer=group.us.endpoint, messages=messages) == VIOLATION
        other = [message | {"group_id": b"another"} for message in await group.messages(group.bad)]
        assert await stranger.send(reducer=group.us.endpoint, messages=other) == [{"code": "BAD_GROUP_ID"}]
        assert await stranger.send(reducer=group.us.endpoint, messages=[]) == []
        bad, good = await asyncio.gather(
            group.bad.send(reducer=group.us.endpoint, messages=await group.messages(group.bad)), group.good_sends()
        )
        assert len(bad) == PARTS
        assert torch.equal(good, group.of_all)
        assert torch.equal(await group.ends(without=False), group.of_all)


async def test_an_auxiliary_that_sends(foreign: Foreign) -> None:
    node, auxiliary = await foreign.client(), await foreign.peer()
    async with our_peer([values(1)], group_size=3, part_size_bytes=PART) as us, us.averaging() as receipt:
        assert await us.asks_to_join(node, gather(mode=1)) == "ACCEPTED"
        assert await us.asks_to_join(auxiliary, gather(mode=2)) == "ACCEPTED"
        announced = await us.begins(node, auxiliary)
        arguments = {"group": announced, "schema": us.schema, "tensors": as_bytes([values(2)])}
        messages = await node.messages(reducer=us.endpoint, **arguments)
        messages[0]["endpoint"] = auxiliary.endpoint
        assert await auxiliary.send(reducer=us.endpoint, messages=messages) == VIOLATION
        await asyncio.gather(node.average(**arguments), auxiliary.average(**arguments))
        assert (await receipt).dropped == ()


async def test_a_second_stream_of_the_same_sender(foreign: Foreign) -> None:
    async with group_with(foreign, client=True) as group:
        messages = await group.messages(group.bad)
        sending = group.bad_sends(messages)
        await group.has_taken(len(messages))
        assert await group.bad.send(reducer=group.us.endpoint, messages=messages) == VIOLATION
        assert torch.equal(await group.good_sends(), group.of_all)
        assert len(await sending) == PARTS
        assert torch.equal(await group.ends(without=False), group.of_all)


@pytest.mark.parametrize("code", ["CANCELLED", "INTERNAL_ERROR"])
@pytest.mark.parametrize("sent", [0, 1, PARTS])
async def test_a_member_that_leaves(foreign: Foreign, sent: int, code: str) -> None:
    async with group_with(foreign, client=True, stall_timeout=3.0) as group:
        messages = (await group.messages(group.bad))[:sent]
        sending = group.bad_sends(messages, ends=sent == 0)
        await group.has_taken(sent)
        assert await group.bad.send(reducer=group.us.endpoint, messages=group.leave_notice(code)) == []
        await group.bad.break_off()  # another member could have sent the notice in its name
        await asyncio.gather(sending, return_exceptions=True)
        wanted = group.up_to(sent)
        assert torch.equal(await group.good_sends(), wanted)
        assert torch.equal(await group.ends(without=True), wanted)
        assert code in (await group.receipt).dropped[0].reason


@pytest.mark.parametrize("ends", [True, False], ids=["ends its stream", "falls silent"])
@pytest.mark.parametrize("sent", rest_is_long([0, 3, 1], 2))
async def test_a_sender_that_stops(foreign: Foreign, sent: int, ends: bool) -> None:
    async with group_with(foreign, client=True, stall_timeout=3.0) as group:
        good = asyncio.ensure_future(group.good_sends())
        messages = (await group.messages(group.bad))[:sent]
        sending = group.bad_sends(messages, ends=ends or sent == 0)
        wanted = group.up_to(sent)
        assert torch.equal(await good, wanted)
        assert torch.equal(await group.ends(without=True), wanted)
        *replies, last = await sending or [{"code": "CANCELLED"}]
        assert last == {"code": "CANCELLED"}
        assert {reply["code"] for reply in replies} <= {"AVERAGED_PART"}


async def test_a_sender_whose_connection_breaks(foreign: Foreign) -> None:
    async with group_with(foreign, client=True) as group:
        messages = (await group.messages(group.bad))[:1]
        sending = group.bad_sends(messages, ends=False)
        await group.has_taken(1)
        await group.bad.break_off()
        wanted = group.up_to(1)
        assert torch.equal(await group.good_sends(), wanted)
        assert torch.equal(await group.ends(without=True), wanted)
        await asyncio.gather(sending, return_exceptions=True)


async def test_replies_come_in_the_compression_of_the_request(foreign: Foreign) -> None:
    async with group_with(foreign, client=True) as group:
        schema = group.us.schema | {"compression": "FLOAT16", "part_size_bytes": PART // 2}
        messages = await group.bad.messages(
            reducer=group.us.endpoint, group=group.announced, schema=schema, tensors=as_bytes([group.others / 60])
        )
        replies, average = await asyncio.gather(
            group.bad.send(reducer=group.us.endpoint, messages=messages), group.good_sends()
        )
        assert {reply["tensor_part"]["compression"] for reply in replies} == {"FLOAT16"}
        halves = [torch.frombuffer(bytearray(r["tensor_part"]["buffer"]), dtype=torch.float16) for r in replies]
        assert torch.equal(torch.cat(halves), average.clamp(-65504, 65504).half())
        assert torch.equal(await group.ends(without=False), average)
