"""An `average` that is cancelled at any step of the event loop: the others go on, and the next round is one of all."""

import asyncio

import pytest
import torch

from averaging import Outcome, Peer, Receipt
from tests.support import leaks
from tests.support.swarm import Swarm, entered, together

STRIDE = 11
"""Every so many steps of the loop are tried: neighbouring ones mostly find the attempt at the same await."""


class Steps:
    """Cancels `task` before the step of the event loop that has that number, counted from its own first one."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.task: asyncio.Task[Receipt] | None = None
        self.begun = False

    async def average(self, peer: Peer) -> Receipt:
        self.begun = True
        return await peer.average()

    def step(self) -> None:
        if self.begun and self.task is not None and not self.task.done():
            self.left -= 1
            if self.left == 0:
                self.task.cancel()


@pytest.mark.parametrize("victim", [0, 2])  # who leads, and who follows
def test_an_average_can_be_cancelled_anywhere(
    victim: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_handle = asyncio.Handle._run

    def attempt(number: int) -> bool:
        """Whether the attempt of the victim was cancelled before it ended."""
        swarm, steps = Swarm(8), Steps(number)
        tensors = [torch.full((600,), float(n)) for n in range(3)]
        peers = [
            swarm.peer(f"peer:{n + 1}", [tensors[n]], group_size=3, group_wait=1.0 + n / 4, part_size_bytes=1024)
            for n in range(3)
        ]
        others = [peer for n, peer in enumerate(peers) if n != victim]

        def run(handle: asyncio.Handle) -> None:
            steps.step()
            run_handle(handle)

        async def main() -> bool:
            before = leaks.tasks()
            async with entered(peers):
                await asyncio.sleep(0.5)
                steps.task = asyncio.create_task(steps.average(peers[victim]))
                receipts = await together(others)
                await asyncio.wait([steps.task])
                name = peers[victim].endpoint
                assert all(receipt.averaged for receipt in receipts)
                assert {lost.endpoint for receipt in receipts for lost in receipt.dropped} <= {name}
                if steps.task.cancelled():
                    assert tensors[victim].tolist() == [float(victim)] * 600
                    last = peers[victim].status.last_round
                    assert last is not None
                    assert last.outcome is Outcome.CANCELLED
                for n, tensor in enumerate(tensors):
                    tensor.fill_(float(n))
                for receipt in await together(peers):
                    assert (receipt.averaged, len(receipt.members), receipt.dropped) == (True, 3, ())
                assert all(tensor.tolist() == [1.0] * 600 for tensor in tensors)
            await asyncio.sleep(0.5)
            assert leaks.tasks() == before
            return steps.task.cancelled()

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.Handle, "_run", run)
            return bool(swarm.simulate(main()))

    cancelled = [attempt(number) for number in range(1, 10 * STRIDE, STRIDE)]
    assert all(cancelled)
    number = 10 * STRIDE + 1
    while attempt(number):
        number += STRIDE
    assert number > 100
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
