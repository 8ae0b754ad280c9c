"""Members whose parts or replies are just fast enough for each deadline: the others go on."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

import pytest
import torch

from averaging import Outcome, Peer, Receipt
from averaging.receipts import DropCode
from tests.support.swarm import Swarm, change_messages, entered, together

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
        change_messages(peer, self._drip, where)

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
        return (await together(self.peers))[:4]

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


@pytest.mark.parametrize(("where", "drippers"), [("both", 1), ("parts", 2)])
def test_members_that_drip_cost_a_long_round_and_no_average_of_others(where: str, drippers: int) -> None:
    run = Run(where, drippers)

    async def main() -> None:
        async with entered(run.peers):
            usual = max([max(receipt.seconds for receipt in await run.round()) for _ in range(3)])
            for dripper in run.drippers:
                dripper.on = True
            receipts = await run.round()
            run.check(receipts, TIMEOUT + AT_SLOW_LINKS + usual)
            assert DropCode.ROUND_DEADLINE in {lost.code for receipt in receipts for lost in receipt.dropped}
            for dripper in run.drippers:
                dripper.on = False
            for _ in range(3):  # who keeps up again is not left out
                receipts = await run.round()
            assert [receipt.dropped for receipt in receipts] == [()] * 4
            assert max(receipt.seconds for receipt in receipts) <= 2 * usual

    run.swarm.simulate(main())
