"""Whole peers that average a topic in TOP_K: clients and auxiliaries, real sockets, TLS, and other software."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import Outcome, Peer, Receipt
from averaging.peer import SparseFeedback, Topic
from averaging.protocol import CompressionType, TopK
from tests.foreign.driver import DEADLINE, Foreign, our_peer
from tests.support.certificates import HERE, write
from tests.support.peers import swarm

WAITS = {"NOT_LOOKING_FOR_GROUP", "NOT_DECLARED"}

SHAPES: dict[str, tuple[int, ...]] = {"w": (128, 256), "b": (100,), "n": (3, 3)}


def change(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def topic_of(peer: Peer, tensors: dict[str, torch.Tensor], **options: Any) -> Topic:
    return peer.topic("changes", tensors, adopt="whole", compression="top_k", top_k=TopK(**options), decay=1.0)


def feedback_of(topic: Topic) -> SparseFeedback:
    assert isinstance(topic.feedback, SparseFeedback)
    return topic.feedback


async def average(peers: list[Peer], topics: list[Topic], **options: Any) -> list[Receipt]:
    """One round, whose result each peer applies."""
    pairs = zip(peers, topics, strict=True)
    receipts = await asyncio.gather(*(peer.average(topic, **options) for peer, topic in pairs))
    for receipt, topic in zip(receipts, topics, strict=True):
        assert receipt.outcome is Outcome.AVERAGED, str(receipt)
        assert receipt.dropped == ()
        feedback_of(topic).applied()
    return list(receipts)


def check_conserved(topics: list[Topic], given: list[dict[str, torch.Tensor]], rounds: list[dict[str, Any]]) -> None:
    """The averages of all rounds, what the peers have not sent and what reducers have lost are the mean change."""
    for number, name in enumerate(SHAPES):
        whole = sum((one[name].double() for one in rounds), torch.zeros(SHAPES[name]).double())
        for topic in topics:
            feedback = feedback_of(topic)
            residual = feedback.state().get(name)
            whole += 0 if residual is None else residual.double() / len(given)
            lost = feedback.replies.tensors.get(number)
            whole += 0 if lost is None else feedback.layouts[number].from_blocks(lost).double()
        expected = torch.stack([one[name] for one in given]).double().mean(dim=0)
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)


@pytest.mark.asyncio
async def test_three_peers_on_real_sockets_hold_the_same(tmp_path: Path) -> None:
    # Equal changes have equal norms, so nothing is limited and everything must add up.
    given = [change(5)] * 3
    tensors = [{name: tensor.clone() for name, tensor in one.items()} for one in given]
    async with AsyncExitStack() as stack:
        peers = await swarm(stack, tensors, **write(tmp_path, *HERE))
        topics = [topic_of(peer, one, density=1 / 32) for peer, one in zip(peers, tensors, strict=True)]
        rounds = []
        for _ in range(3):
            receipts = await average(peers, topics)
            assert len({receipt.digest for receipt in receipts} - {""}) == 1
            for name in SHAPES:
                assert torch.equal(tensors[0][name], tensors[1][name])
                assert torch.equal(tensors[0][name], tensors[2][name])
            rounds.append({name: tensor.clone() for name, tensor in tensors[0].items()})
            for one in tensors:
                for tensor in one.values():
                    tensor.zero_()
        check_conserved(topics, given, rounds)
        elements = 128 * 256 // 32 + 3 + 1
        sent = sum(receipt.part_bytes_sent for receipt in receipts)
        assert sent == pytest.approx(2 * elements * 14 / 8, rel=0.05)
        assert sent == sum(receipt.part_bytes_received for receipt in receipts)


@pytest.mark.asyncio(loop_scope="session")
async def test_other_software_that_averages_the_same_tensors_is_refused_by_the_schema(foreign: Foreign) -> None:
    follower = await foreign.peer()
    async with our_peer(change(1), group_size=3) as us:
        topic = topic_of(us.peer, change(1))
        dense = tuple(replace(spec, compression=CompressionType.NONE) for spec in topic.schema.tensors)
        others = [replace(topic.schema, sparse=None), replace(topic.schema, sparse=None, tensors=dense)]
        async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
            averaging = tasks.create_task(us.peer.average(topic))
            verdict = ""
            while verdict != "ACCEPTED":  # as soon as it looks for a group
                for schema in others:
                    assert await us.asks_to_join(follower, schema_hash=schema.hash) in WAITS | {"BAD_SCHEMA_HASH"}
                verdict = await us.asks_to_join(follower, schema_hash=topic.schema.hash)
            other = await foreign.peer()
            for schema in others:
                assert await us.asks_to_join(other, schema_hash=schema.hash) == "BAD_SCHEMA_HASH"
            averaging.cancel()
