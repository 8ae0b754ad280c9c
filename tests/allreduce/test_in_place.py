"""Averages that are written as they arrive, and the state that newcomers download meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
import torch

from averaging import Outcome, Peer
from averaging.protocol.group import Mode
from tests.support.swarm import Swarm

SIZE = 4096  # 16 parts of 1 KiB
TICK = 0.002


async def watch(peer: Peer, averaging: asyncio.Task[object]) -> list[int]:
    """The number of averaged elements after each change during the round."""
    seen = [0]
    while not averaging.done():
        await asyncio.sleep(TICK)
        with_average = int((peer._tensors.tensors[0] == 0.5).sum())
        if not averaging.done() and with_average != seen[-1]:
            seen.append(with_average)
    return seen


@pytest.mark.parametrize(
    ("shared", "written", "asked", "early"),
    [(False, False, False, True), (True, True, True, True), (True, False, True, True), (True, False, False, False)],
)
def test_it_is_written_early_unless_it_is_the_only_copy_of_a_state(
    shared: bool, written: bool, asked: bool, early: bool
) -> None:
    """The state is copied before the application has `written`, and when a newcomer has `asked` for it."""
    swarm = Swarm(3)

    async def main() -> None:
        tensors = [torch.zeros(SIZE), torch.ones(SIZE)]
        async with AsyncExitStack() as stack:

            async def enter(name: str, tensor: torch.Tensor) -> Peer:
                options = {"group_size": 2, "part_size_bytes": 1024, "in_place": True, "share_state": shared}
                return await stack.enter_async_context(swarm.peer(name, [tensor], **options))

            first, second = [await enter(f"peer:{number}", one) for number, one in enumerate(tensors, start=1)]
            newcomer = await enter("newcomer:1", torch.full((SIZE,), -1.0))
            if written:
                with first.tensors() as mine:
                    mine[0].copy_(torch.zeros(SIZE))
            averaging, other = asyncio.create_task(first.average()), asyncio.create_task(second.average())
            watching = asyncio.create_task(watch(first, averaging))
            states = []
            while asked and not averaging.done():
                state = await newcomer.download_state(lambda _: None, donors=["peer:1"])
                states.append((state.version, set(state.tensors["tensor_0"].tolist())))
            assert (await averaging).averaged
            assert (await other).averaged
            assert (len(await watching) > 1) is early
            assert tensors[0].tolist() == tensors[1].tolist() == [0.5] * SIZE
            # Whole, whenever it was asked for: what was committed before the round, or after it.
            assert all(state in [(0, {0.0}), (1, {0.5})] for state in states)
            assert not asked or (0, {0.0}) in states

    swarm.simulate(main())


@pytest.mark.parametrize("seconds", [0.13, 0.15, 0.17, 0.19])
def test_nothing_is_written_once_a_round_was_cancelled(seconds: float) -> None:
    """Senders leave one after the other, so parts that waited only for them could be averaged."""
    swarm = Swarm(5)

    async def main() -> None:
        tensor = torch.zeros(8192)
        async with AsyncExitStack() as stack:

            async def enter(name: str, own: torch.Tensor, mode: Mode) -> Peer:
                options = {"group_size": 3, "part_size_bytes": 1024, "in_place": True, "share_state": False}
                return await stack.enter_async_context(swarm.peer(name, [own], mode=mode, **options))

            reducer = await enter("peer:1", tensor, Mode.NODE)
            clients = [await enter("", torch.full((8192,), value), Mode.CLIENT) for value in (1.0, 2.0)]
            averaging = asyncio.create_task(reducer.average())
            others = [asyncio.create_task(client.average()) for client in clients]
            await asyncio.sleep(seconds)
            assert reducer.status.members
            averaging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await averaging
            tensor.fill_(-5.0)  # training goes on
            await asyncio.gather(*others)
            assert torch.equal(tensor, torch.full((8192,), -5.0))

    swarm.simulate(main())


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_nothing_is_written_where_nobody_else_is_heard(compression: str) -> None:
    """A reduction of this peer's own values alone is no average; with a lossy codec it even changes them."""
    swarm = Swarm(3)

    async def main() -> None:
        tensors = [torch.randn(SIZE), torch.randn(SIZE)]
        before = tensors[0].clone()
        async with AsyncExitStack() as stack:

            async def enter(name: str, tensor: torch.Tensor) -> Peer:
                options = {"group_size": 2, "part_size_bytes": 1024, "in_place": True, "share_state": False}
                return await stack.enter_async_context(swarm.peer(name, [tensor], compression=compression, **options))

            first, second = [await enter(f"peer:{number}", one) for number, one in enumerate(tensors, start=1)]
            averaging, other = asyncio.create_task(first.average()), asyncio.create_task(second.average())
            while not first.status.members:
                assert not averaging.done()
                await asyncio.sleep(TICK / 4)
            swarm.network.kill("peer:2")
            receipt = await averaging
            other.cancel()
            assert receipt.outcome is Outcome.FAILED
            assert receipt.accounts[receipt.members.index("peer:1")].share > 0
            assert torch.equal(tensors[0], before)

    swarm.simulate(main())
