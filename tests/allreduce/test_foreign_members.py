"""Foreign members that break the protocol, leave, fail or die, as senders and as reducers: the others go on."""

import asyncio
from typing import Any

import pytest
import torch

from tests.foreign.driver import DEADLINE, Foreign, Message, as_bytes, begun, gather, our_peer
from tests.foreign.groups import BROKEN_PARTS, ELEMENTS, PART, PARTS, Group, averages, group_with, values
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


# As reducers: their parts keep our local values


def reply(tensor: Message | None = None, code: object = "AVERAGED_PART") -> Message:
    return {"code": code} | ({"tensor_part": tensor} if tensor is not None else {})


GOOD_PART = {"buffer": bytes(4 * ELEMENTS), "size": [ELEMENTS], "dtype": "float32"}

BROKEN_REPLIES: dict[str, list[Message]] = {
    "nothing": [],
    "an internal error": [reply(code="INTERNAL_ERROR")],
    "a cancellation": [reply(code="CANCELLED")],
    "a violation": [reply(code="PROTOCOL_VIOLATION")],
    "another group": [reply(code="BAD_GROUP_ID")],
    "an unknown code": [reply(code=77)],
    "a part instead of an average": [reply(GOOD_PART, code="PART_FOR_AVERAGING")],
    "no code": [reply(GOOD_PART, code="NO_CODE")],
    "no tensor": [reply()],
    **{tensor: [reply(BROKEN_PARTS[tensor])] for tensor in BROKEN_PARTS},
}


AFTER_ONE_PART = [(broken, 1) for broken in BROKEN_REPLIES]
BEFORE_ANY = [(broken, 0) for broken in ("nothing", "an internal error", "another shape")]


@pytest.mark.parametrize(("broken", "first"), AFTER_ONE_PART + BEFORE_ANY)
async def test_a_reducer_with_invalid_answers(foreign: Foreign, broken: str, first: int) -> None:
    """Its parts keep their local values; as a sender it still takes part."""
    replies = [reply(GOOD_PART)] * first + BROKEN_REPLIES[broken]
    async with group_with(foreign, client=False, replies=replies) as group:
        await ends_with_local_values(group, first)


async def ends_with_local_values(group: Group, averaged: int) -> None:
    replies, average = await asyncio.gather(
        group.bad.send(reducer=group.us.endpoint, messages=await group.messages(group.bad)), group.good_sends()
    )
    wanted = group.ours.clone()
    own, theirs = group.own_parts, PARTS // 2 * ELEMENTS - group.own_parts.start
    wanted[own] = group.of_all[own]
    wanted[theirs : theirs + averaged * ELEMENTS] = 0.0
    assert torch.equal(average, group.of_all[own])
    assert torch.equal(torch.cat([averages(reply) for reply in replies]), group.of_all[own])
    kept = (PARTS // 2 - averaged) * ELEMENTS
    assert torch.equal(await group.ends(without=True, kept_local=kept), wanted)


async def test_a_reducer_that_never_answers(foreign: Foreign) -> None:
    replies = [reply(GOOD_PART)]
    async with group_with(foreign, client=False, stall_timeout=3.0, replies=replies, hangs=True) as group:
        await ends_with_local_values(group, 1)


async def test_a_reducer_that_never_ends_its_stream(foreign: Foreign) -> None:
    """All averages arrived, so no member is dropped, and the round does not wait for stall_timeout."""
    replies, waits = (
        [reply(GOOD_PART)] * (PARTS // 2),
        {"round_timeout": 99.0, "stall_timeout": 50.0, "min_stall_timeout": 0.2},
    )
    async with group_with(foreign, client=False, replies=replies, hangs=True, **waits) as group:
        messages = await group.messages(group.bad)
        await asyncio.gather(group.bad.send(reducer=group.us.endpoint, messages=messages), group.good_sends())
        wanted = torch.zeros_like(group.ours)
        wanted[group.own_parts] = group.of_all[group.own_parts]
        async with asyncio.timeout(DEADLINE):
            assert torch.equal(await group.ends(without=False), wanted)


async def test_a_reducer_that_dies(foreign: Foreign) -> None:
    async with group_with(foreign, client=False, replies=[], hangs=True) as group:
        messages = await group.messages(group.bad)
        sending = group.bad_sends(messages)
        await group.has_taken(len(messages))
        await group.bad.next_stream()
        assert torch.equal(await group.good_sends(), group.of_all[group.own_parts])
        assert len(await sending) == PARTS // 2
        await group.bad.close()
        wanted = group.ours.clone()
        wanted[group.own_parts] = group.of_all[group.own_parts]
        assert torch.equal(await group.ends(without=True, kept_local=PARTS // 2 * ELEMENTS), wanted)


async def test_our_peer_gives_up(foreign: Foreign) -> None:
    async with group_with(foreign, client=False, replies=[], hangs=True) as group:
        messages = await group.messages(group.bad)
        sending = group.bad_sends(messages)
        first = await group.bad.next_stream()
        group_id, endpoint = group.announced["group_id"], group.us.endpoint
        assert first == {"code": "PART_FOR_AVERAGING", "group_id": group_id, "endpoint": endpoint}
        await group.has_taken(len(messages))
        group.receipt.cancel()
        assert await group.bad.next_stream() == {"code": "CANCELLED", "group_id": group_id, "endpoint": endpoint}
        assert await sending == [{"code": "CANCELLED"}]


async def test_our_peer_breaks_down(foreign: Foreign, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("averaging.allreduce.part_forms.DenseForm.encode", break_down)
    bad = await foreign.peer()
    await bad.answer_parts(replies=[])
    async with our_peer([values(1)], part_size_bytes=PART) as us:
        await us.declare(bad.endpoint)
        averaging = asyncio.ensure_future(us.peer.average())
        await bad.next_request()
        await bad.answer(follower=us.endpoint, code="ACCEPTED")
        group = begun(us, bad)
        await bad.begin(group=group)
        notice = await bad.next_stream()
        assert notice == {"code": "INTERNAL_ERROR", "group_id": group["group_id"], "endpoint": us.endpoint}
        with pytest.raises(ExceptionGroup):
            await averaging
