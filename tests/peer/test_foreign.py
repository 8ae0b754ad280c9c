"""Whole rounds with peers that know the wire contract alone, in every role."""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from msgspec import msgpack

from averaging import Mode
from averaging.protocol.group import Group, ReplyForm
from averaging.protocol.messages import CompressionType
from averaging.wire import averaging_pb2, runtime_pb2
from tests.foreign.driver import (
    DEADLINE,
    RUN,
    Foreign,
    ForeignPeer,
    Message,
    Ours,
    as_bytes,
    from_bytes,
    gather,
    our_peer,
    whole_numbers,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("nothing_is_left_behind"),
]

SHAPES = [(300000,), (10, 10), (5,)]
PART = 1 << 18

Tensors = list[torch.Tensor]


async def follow(us: Ours, gathers: Mapping[ForeignPeer, bytes]) -> Message:
    """All of these join the group that our peer leads; returns what they are told."""
    for follower, gathered in gathers.items():
        assert await us.asks_to_join(follower, gathered) == "ACCEPTED"
    group = await us.begins(*gathers)
    assert set(group) == {"group_id", "ordered_group_endpoints", "gathered"}
    assert len(group["group_id"]) == 20
    told = dict(zip(group["ordered_group_endpoints"], group["gathered"], strict=True))
    assert set(told) == {us.endpoint, *(follower.endpoint for follower in gathers)}
    assert {follower.endpoint: told[follower.endpoint] for follower in gathers} == {
        follower.endpoint: gathered for follower, gathered in gathers.items()
    }
    return group


async def average(us: Ours, group: Message, tensors: Mapping[ForeignPeer, Tensors]) -> list[Tensors]:
    """The foreign members' part in the round; returns what they end with."""
    after = await asyncio.gather(
        *(member.average(group=group, schema=us.schema, tensors=as_bytes(own)) for member, own in tensors.items())
    )
    return [from_bytes(ended, own) for ended, own in zip(after, tensors.values(), strict=True)]


def mean_of(*tensors: Tensors, weights: Sequence[float] = ()) -> Tensors:
    weights = weights or [1.0] * len(tensors)
    summed = [sum(w * t for w, t in zip(weights, group, strict=True)) for group in zip(*tensors, strict=True)]
    return [torch.as_tensor(total) / sum(weights) for total in summed]


def same_bytes(one: Tensors, other: Tensors) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


async def test_our_messages_are_the_seeds(compiled_seed: Path) -> None:
    """Field by field and code by code; ours may only have more compressions, from 16 on."""
    seed = FileDescriptorSet.FromString((compiled_seed / "seed.bin").read_bytes())
    for file, module in zip(sorted(seed.file, key=lambda f: f.name), (averaging_pb2, runtime_pb2), strict=True):
        ours = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        for found in (file, ours):
            found.ClearField("name")
            found.ClearField("dependency")
            for message in found.message_type:
                for field in message.field:
                    field.ClearField("json_name")
        for enum in ours.enum_type:
            for value in [value for value in enum.value if enum.name == "CompressionType" and value.number >= 16]:
                enum.value.remove(value)
        assert ours == file


async def test_the_foreign_process_has_nothing_of_the_library(foreign: Foreign) -> None:
    assert await foreign.call("imported") == []


async def test_foreign_followers_send_and_reduce(foreign: Foreign) -> None:
    ours, theirs, others = (whole_numbers(seed, *SHAPES) for seed in range(3))
    mean = mean_of(ours, theirs, others)
    first, second = await foreign.peer(), await foreign.peer()
    async with our_peer(ours, group_size=3, part_size_bytes=PART) as us, us.averaging(gather=[1, "a"]) as receipt:
        group = await follow(us, {first: gather(user={"step": 1}), second: gather(wrapped=True)})
        for after in await average(us, group, {first: theirs, second: others}):
            assert same_bytes(after, mean)
        told = await receipt
    assert told.averaged, told.reason
    assert told.dropped == ()
    assert told.group_id == Group(group["group_id"], ()).public_id
    assert list(told.members) == group["ordered_group_endpoints"]
    assert told.gathered == {us.endpoint: [1, "a"], first.endpoint: {"step": 1}, second.endpoint: None}
    assert same_bytes(ours, mean)


async def test_a_foreign_leader_begins_in_its_own_order(foreign: Foreign) -> None:
    ours, theirs, others = (whole_numbers(seed, *SHAPES) for seed in range(3))
    mean = mean_of(ours, theirs, others)
    leader, third = await foreign.peer(), await foreign.peer()
    async with our_peer(ours, group_size=3, part_size_bytes=PART) as us:
        await us.declare(leader.endpoint)
        leading = asyncio.ensure_future(leader.lead(size=3, gather=gather()))
        assert await us.asks_to_join(third, gather(), leader=leader) == "ACCEPTED"
        async with us.averaging() as receipt:
            group = await leading
            for after in await average(us, group, {leader: theirs, third: others}):
                assert same_bytes(after, mean)
            told = await receipt
    assert told.averaged, told.reason
    assert list(told.members) == group["ordered_group_endpoints"]
    assert same_bytes(ours, mean)


@pytest.mark.parametrize("bandwidths", [(None, None, None), (3e6, None, 1e6), (1e7, 1e6, 1e4), (5.0, 0.0, 5)])
async def test_weights_and_bandwidths(foreign: Foreign, bandwidths: tuple[float | None, ...]) -> None:
    shapes = [(20000,), (3, 4), (), (0,), (7,)]
    ours, theirs, others = (whole_numbers(seed, *shapes) for seed in range(3))
    mean = mean_of(ours, theirs, others, weights=[2, 4, 2])
    first, second = await foreign.peer(), await foreign.peer()
    own, b, c = bandwidths
    async with (
        our_peer(ours, group_size=3, part_size_bytes=1024, bandwidth=own) as us,
        us.averaging(weight=2) as receipt,
    ):
        group = await follow(us, {first: gather(4, b), second: gather(2.0, c)})
        for after in await average(us, group, {first: theirs, second: others}):
            assert same_bytes(after, mean)
        assert (await receipt).dropped == ()
    assert same_bytes(ours, mean)


async def test_a_foreign_client_only_sends_and_a_foreign_auxiliary_only_reduces(foreign: Foreign) -> None:
    ours, theirs, others, unsent = (whole_numbers(seed, *SHAPES) for seed in range(4))
    mean = mean_of(ours, theirs, others, unsent, weights=[1, 1, 2, 0])
    client, node, auxiliary = await foreign.client(), await foreign.peer(), await foreign.peer()
    async with our_peer(ours, group_size=4, part_size_bytes=PART) as us, us.averaging() as receipt:
        group = await follow(us, {client: gather(mode=1), node: gather(2.0), auxiliary: gather(mode=2)})
        *averaged, untouched = await average(us, group, {client: theirs, node: others, auxiliary: unsent})
        assert (await receipt).dropped == ()
    assert all(same_bytes(after, mean) for after in averaged)
    assert same_bytes(untouched, unsent)
    assert same_bytes(ours, mean)


async def test_our_client_follows_a_foreign_leader(foreign: Foreign) -> None:
    ours, theirs = (whole_numbers(seed, *SHAPES) for seed in range(2))
    mean = mean_of(ours, theirs)
    leader = await foreign.peer()
    async with our_peer() as seed, our_peer(ours, part_size_bytes=PART, mode=Mode.CLIENT, join=[seed.endpoint]) as us:
        await seed.declare(leader.endpoint)
        receipt = asyncio.ensure_future(us.peer.average())
        request = await leader.next_request()
        assert request["client_mode"] is True
        assert request["endpoint"] == us.endpoint
        prefix, _, name = us.endpoint.partition("::")
        assert (prefix, uuid.UUID(name).version) == ("client", 4)
        assert msgpack.decode(request["gather"])[:3] == [1.0, None, 1]
        group = {
            "group_id": b"g" * 20,
            "ordered_group_endpoints": [us.endpoint, leader.endpoint],
            "gathered": [request["gather"], gather()],
        }
        await leader.answer(follower=us.endpoint, code="ACCEPTED")
        await leader.begin(group=group)
        (after,) = await average(us, group, {leader: theirs})
        assert (await receipt).dropped == ()
        assert us.endpoint not in seed.discovery.endpoints()
    assert same_bytes(after, mean)
    assert same_bytes(ours, mean)


async def test_our_auxiliary_reduces_for_foreign_nodes(foreign: Foreign) -> None:
    ours, theirs, others = (whole_numbers(seed, *SHAPES) for seed in range(3))
    before = [tensor.clone() for tensor in ours]
    mean = mean_of(theirs, others)
    first, second = await foreign.peer(), await foreign.peer()
    async with our_peer(ours, group_size=3, part_size_bytes=PART, mode=Mode.AUXILIARY) as us, us.averaging() as receipt:
        group = await follow(us, {first: gather(), second: gather()})
        for after in await average(us, group, {first: theirs, second: others}):
            assert same_bytes(after, mean)
        assert (await receipt).averaged
    assert same_bytes(ours, before)


async def test_two_of_ours_and_a_foreign_one(foreign: Foreign) -> None:
    ours, others, theirs = (whole_numbers(seed, *SHAPES) for seed in range(3))
    mean = mean_of(ours, others, theirs)
    node = await foreign.peer()
    async with (
        our_peer(ours, group_size=3, part_size_bytes=PART) as us,
        our_peer(others, group_size=3, part_size_bytes=PART, join=[us.endpoint]) as them,
        us.averaging() as receipt,
        them.averaging() as other_receipt,
    ):
        assert await us.asks_to_join(node, gather()) == "ACCEPTED"
        group = await us.begins(node)
        (after,) = await average(us, group, {node: theirs})
        assert (await receipt).members == (await other_receipt).members == tuple(group["ordered_group_endpoints"])
    assert same_bytes(after, mean)
    assert same_bytes(ours, mean)
    assert same_bytes(others, mean)


CODES = [
    CompressionType.NONE,
    CompressionType.FLOAT16,
    CompressionType.MEANSTD_16BIT,
    CompressionType.UNIFORM_8BIT,
    CompressionType.QUANTILE_8BIT,
]


@pytest.mark.parametrize("reply", list(ReplyForm))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
async def test_other_dtypes(foreign: Foreign, dtype: torch.dtype, reply: ReplyForm) -> None:
    ours, theirs = (
        [(t / 60).clamp(-500, 500).to(dtype) for t in whole_numbers(seed, (3000,), ())] for seed in range(2)
    )
    mean = mean_of(ours, theirs)
    node = await foreign.peer()
    async with our_peer(ours, part_size_bytes=1024, reply_form=reply) as us, us.averaging() as receipt:
        group = await follow(us, {node: gather()})
        (after,) = await average(us, group, {node: theirs})
        assert (await receipt).dropped == ()
    assert same_bytes(after, mean)
    assert same_bytes(ours, mean)


@pytest.mark.parametrize("reply", list(ReplyForm))
@pytest.mark.parametrize("compression", CODES)
async def test_codes(foreign: Foreign, compression: CompressionType, reply: ReplyForm) -> None:
    generator = torch.Generator().manual_seed(int(compression))
    ours, theirs = ([torch.randn(shape, generator=generator) for shape in [(5000,), (10, 10), (5,)]] for _ in range(2))
    mean = mean_of(ours, theirs)
    node = await foreign.peer()
    async with (
        our_peer(ours, part_size_bytes=1024, compression=compression, reply_form=reply) as us,
        us.averaging() as receipt,
    ):
        group = await follow(us, {node: gather()})
        (after,) = await average(us, group, {node: theirs})
        assert (await receipt).dropped == ()
    if reply is ReplyForm.AVERAGE:
        assert same_bytes(ours, after)
    # Two roundings: of what is sent, and of the average; a bucket of 256 over six standard deviations is the widest.
    bound = 0.03 if compression in (CompressionType.UNIFORM_8BIT, CompressionType.QUANTILE_8BIT) else 0.002
    for ended in (ours, after):
        for tensor, wanted in zip(ended, mean, strict=True):
            assert (tensor - wanted).abs().mean() < bound


async def test_the_group_bits_after_a_round(foreign: Foreign) -> None:
    ours = [torch.ones(8)]
    first, second = await foreign.peer(), await foreign.peer()
    async with our_peer(ours, group_size=3, group_bits="01101") as us, us.averaging() as receipt:
        group = await follow(us, {first: gather(), second: gather()})
        await average(us, group, {first: ours, second: ours})
        assert (await receipt).averaged
        place = group["ordered_group_endpoints"].index(us.endpoint)
        bits = await foreign.call(
            "next_bits", bits="01101", group_id=group["group_id"], group_size=3, place=place, target=3
        )
        assert us.key == f"{RUN}.0b{bits}"


async def test_who_averages_the_same_tensors_without_top_k_is_refused_by_the_schema(foreign: Foreign) -> None:
    follower, other = await foreign.peer(), await foreign.peer()
    async with our_peer([torch.ones(8)], group_size=3) as us:
        changes = {"w": torch.ones(128, 256), "b": torch.ones(100)}
        topic = us.peer.topic("changes", changes, adopt="whole", compression="top_k", decay=1.0)
        dense = tuple(replace(spec, compression=CompressionType.NONE) for spec in topic.schema.tensors)
        others = [replace(topic.schema, sparse=None), replace(topic.schema, sparse=None, tensors=dense)]
        async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
            averaging = tasks.create_task(us.peer.average(topic))
            while (verdict := await us.asks_to_join(follower, schema_hash=topic.schema.hash)) != "ACCEPTED":
                assert verdict in ("NOT_LOOKING_FOR_GROUP", "NOT_DECLARED")
            for schema in others:
                assert await us.asks_to_join(other, schema_hash=schema.hash) == "BAD_SCHEMA_HASH"
            averaging.cancel()
