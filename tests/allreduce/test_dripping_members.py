"""Members whose parts, replies or reading of replies are just fast enough for each deadline: the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import pytest
import torch

from averaging import Outcome, Peer, Receipt
from averaging.receipts import DropCode
from averaging.timing.learned_deadlines import FIRST_SECONDS, FORGET_SECONDS, MAX_SECONDS, Probation
from tests.support.selection import rest_is_long
from tests.support.swarm import Swarm

TIMEOUT, SHORTEST, PAUSE = 6.0, 1.0, 0.9
SIZE = 3 << 12
AT_SLOW_LINKS = 0.1
"""Seconds that the bytes of one member take at 10 Mbit/s, at most."""
OPTIONS: dict[str, Any] = {
    "group_wait": 2.0,
    "round_timeout": TIMEOUT,
    "stall_timeout": 4.0,
    "min_stall_timeout": SHORTEST,
    "part_size_bytes": 1024,
}

Message = TypeVar("Message")


class Dripper:
    """Lets a peer wait before each of its messages, for as long as it is `on`."""

    def __init__(self, peer: Peer, where: str) -> None:
        self.on = False
        transport: Any = peer._transport
        serve, send = transport.serve, transport.aggregate_part

        async def serve_slowly(service: Any, gossip: Any) -> None:
            answer = service.aggregate_part
            service.aggregate_part = lambda messages: self._drip(answer(messages))
            await serve(service, gossip)

        if where in ("parts", "both"):
            transport.aggregate_part = lambda endpoint, messages: send(endpoint, self._drip(messages))
        if where == "reading":
            transport.aggregate_part = lambda endpoint, messages: self._drip(send(endpoint, messages))
        if where in ("replies", "both"):
            transport.serve = serve_slowly

    async def _drip(self, messages: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        async for message in messages:
            if self.on:
                await asyncio.sleep(PAUSE)
            yield message


class Run:
    """Four honest peers, and others that drip."""

    def __init__(self, where: str, drippers: int) -> None:
        self.swarm, count = Swarm(1), 4 + drippers
        self.tensors = [torch.empty(SIZE) for _ in range(count)]
        self.peers = [
            self.swarm.peer(f"peer:{number}", [tensor], group_size=count, **OPTIONS)
            for number, tensor in enumerate(self.tensors, 1)
        ]
        self.drippers = [Dripper(peer, where) for peer in self.peers[4:]]
        self.bad = {f"peer:{number}" for number in range(5, count + 1)}

    async def round(self) -> list[Receipt]:
        """A round of all; the receipts of the honest ones."""
        for number, tensor in enumerate(self.tensors):
            tensor.fill_(float(number))
        return list(await asyncio.gather(*(peer.average() for peer in self.peers)))[:4]

    def check(self, receipts: list[Receipt], seconds: float) -> None:
        """The honest ones are in time, have dropped no honest one, and have the averages of all honest reducers."""
        all_mean = sum(range(len(self.peers))) / len(self.peers)
        shares = {account.endpoint: account.share for account in receipts[0].accounts}
        for number, receipt in enumerate(receipts):
            assert receipt.outcome is Outcome.AVERAGED, receipt
            assert receipt.allreduce_seconds <= seconds, receipt
            assert {lost.endpoint for lost in receipt.dropped} <= self.bad, receipt
            assert receipt.kept_local / SIZE <= sum(shares[name] for name in self.bad) + 1e-6
            got = self.tensors[number]
            assert bool(((got >= 1.5 - 1e-5) & (got <= all_mean + 1e-5) | (got == number)).all())


@pytest.mark.parametrize(
    ("where", "drippers"), rest_is_long([("both", 1), ("reading", 1), ("parts", 2), ("replies", 2)], 2)
)
def test_each_member_that_drips_costs_a_long_round_or_two_and_no_average_of_others(where: str, drippers: int) -> None:
    run = Run(where, drippers)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for peer in run.peers:
                await stack.enter_async_context(peer)
            usual = max([max(receipt.seconds for receipt in await run.round()) for _ in range(3)])
            for dripper in run.drippers:
                dripper.on = True
            rounds = [await run.round() for _ in range(drippers + 1)]
            for receipts in rounds:
                run.check(receipts, TIMEOUT * 3 / 4 + SHORTEST + AT_SLOW_LINKS + usual)
            dropped = [lost for receipts in rounds for receipt in receipts for lost in receipt.dropped]
            assert DropCode.ROUND_DEADLINE in {lost.code for lost in dropped}
            for _ in range(5):
                run.check(await run.round(), 2 * usual + 2 * SHORTEST)
            for dripper in run.drippers:
                dripper.on = False
            for _ in range(3):  # who keeps up again is not left out, though it is still on probation
                receipts = await run.round()
            assert [receipt.dropped for receipt in receipts] == [()] * 4
            assert max(receipt.seconds for receipt in receipts) <= 2 * usual

    run.swarm.simulate(main())


def test_a_member_that_drips_again_after_its_probation_has_a_longer_one() -> None:
    probation = Probation()
    probation.add("a:1", 0.0)
    probation.add("a:1", 1.0)  # while it is on probation
    assert probation.includes("a:1", FIRST_SECONDS - 1)
    assert not probation.includes("a:1", FIRST_SECONDS)
    assert not probation.includes("b:1", 1.0)
    probation.add("a:1", FIRST_SECONDS)
    assert probation.includes("a:1", 3 * FIRST_SECONDS - 1)
    now = 3 * FIRST_SECONDS
    for _ in range(20):
        probation.add("a:1", now)
        now += MAX_SECONDS
        assert not probation.includes("a:1", now)
    probation.add("a:1", now + FORGET_SECONDS)
    assert not probation.includes("a:1", now + FORGET_SECONDS + FIRST_SECONDS)
