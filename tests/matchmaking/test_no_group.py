"""The reason of a receipt without a group, with whole peers that gossip in virtual time: four causes, four messages."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import pytest
import torch

from averaging import Peer
from averaging.discovery.gossip import GossipDiscovery
from averaging.discovery.gossip.record import UnsignedIdentity
from averaging.peer import PeerContext
from averaging.receipts.receipt import Outcome
from averaging.testing import virtual_time
from averaging.testing.transport import MemoryNetwork
from tests.support.simulated import in_virtual_time

SINCE = "2023-11-14 22:13:20 UTC"  # when virtual time begins


class Run:
    """Peers of one run, some of which may be entered and do nothing."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(self.rng)
        self._stack = AsyncExitStack()

    async def peer(self, name: str, join: Sequence[str] = (), ahead: float = 0.0, timeout: float = 10.0) -> Peer:
        def clock() -> float:
            return virtual_time.clock() + ahead

        def discovery(endpoint: str, transport: Any) -> GossipDiscovery:
            rng = random.Random(self.rng.getrandbits(64))
            identity = UnsignedIdentity(self.rng)
            return GossipDiscovery("run", endpoint, transport, join=join, clock=clock, rng=rng, identity=identity)

        peer = Peer(
            {"w": torch.zeros(2)},
            run_id="run",
            context=PeerContext(
                transport=self.network.transport(name),
                discovery=discovery,
                clock=clock,
                rng=random.Random(self.rng.getrandbits(64)),
            ),
            group_wait=2.0,
            round_timeout=timeout,
        )
        return await self._stack.enter_async_context(peer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        await self._stack.aclose()
        assert kind is not None or self.network.errors == []


async def why_alone(peer: Peer) -> str:
    """Why its round found no group."""
    receipt = await peer.average()
    assert receipt.outcome is Outcome.NO_GROUP
    return receipt.reason


@pytest.mark.parametrize(
    ("join", "why"), [([], "this peer was given no join"), (["a:1"], "the only join of this peer is its own address")]
)
@in_virtual_time
async def test_no_other_peer_is_in_the_run(join: list[str], why: str) -> None:
    async with Run() as run:
        peer = await run.peer("a:1", join)
        reason = await why_alone(peer)
        hint = f"{why}, so the others must join a:1, or this peer one of them"
        assert reason == f"no other peer is in the run: start more peers of it, or wait longer ({hint})"


@in_virtual_time
async def test_other_peers_are_in_the_run_and_none_is_ready() -> None:
    async with Run() as run:
        idle = await run.peer("a:1")
        elsewhere = await run.peer("b:1", ["a:1"], timeout=60.0)
        topic = elsewhere.topic("gradients", {"w": torch.zeros(2)})
        looking = asyncio.create_task(elsewhere.average(topic))
        peer = await run.peer("c:1", ["a:1"])
        reason = await why_alone(peer)
        assert reason == (
            "2 other peers in the run, none of them ready for a group under run.0b: "
            f"a:1 (in the run since {SINCE}, does not look for a group), "
            f"b:1 (in the run since {SINCE}, looks for a group under run/gradients.0b)"
            "; let all average at about the same time and with the same options, or wait longer"
        )
        looking.cancel()
        assert idle.endpoint == "a:1"


@pytest.mark.parametrize(("how", "why"), [("killed", "connection refused"), ("stuck", "no answer")])
@in_virtual_time
async def test_other_peers_do_not_answer(how: str, why: str) -> None:
    async with Run() as run:
        other = await run.peer("a:1")
        peer = await run.peer("b:1", ["a:1"], timeout=25.0)
        await asyncio.sleep(5)
        (run.network.kill if how == "killed" else run.network.freeze)("a:1")
        reason = await why_alone(peer)
        assert f"1 peer did not answer: a:1 ({why}); check that" in reason
        assert "in the run since" not in reason
        run.network.thaw("a:1")
        assert other.endpoint == "a:1"


@pytest.mark.parametrize("ahead", [5.0, 40.0, -40.0])
@in_virtual_time
async def test_clocks_that_differ_too_much_are_named_by_those_that_get_answers(ahead: float) -> None:
    """A peer whose clock is far behind is not in the table of the other: its records have expired already."""
    async with Run() as run:
        one = await run.peer("a:1")
        other = await run.peer("b:1", ["a:1"], ahead)
        await asyncio.sleep(20)
        reasons = [await why_alone(one), await why_alone(other)]  # not at once: a few seconds apart they may still meet
        seconds = f"{abs(ahead):.0f} s" if abs(ahead) > 10 else f"{abs(ahead):.1f} s"
        words = {True: "ahead of", False: "behind"}
        sides = [(reasons[0], "b:1", ahead > 0), (reasons[1], "a:1", ahead < 0)]
        for reason, name, is_ahead in sides[ahead < -10 :]:
            clocks = f"that of {name} is {seconds} {words[is_ahead]} this peer's; set them, for example with NTP"
            assert f"clocks are more than 3 s apart: {clocks}" in reason.replace("4.9 s", "5.0 s")
