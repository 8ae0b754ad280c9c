"""A peer alone among liars: its round ends in time, it adopts nothing malformed, and then averages as before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from averaging import Peer
from averaging.protocol.messages import AveragingData, WireTensor
from tests.support.swarm import Swarm

SIZE, TIMEOUT = 3 << 10, 6.0
OPTIONS: dict[str, Any] = {
    "group_size": 4,
    "group_wait": 2.0,
    "round_timeout": TIMEOUT,
    "stall_timeout": 4.0,
    "part_size_bytes": 1024,
}


def wrong_shape(wire: WireTensor) -> WireTensor:
    return replace(wire, size=(1,), buffer=bytes(wire.buffer)[:4])


def infinite(wire: WireTensor) -> WireTensor:
    return replace(wire, buffer=b"\x00\x00\x80\x7f" * (len(wire.buffer) // 4))


def let_lie(peer: Peer, how: str) -> None:
    """Lets all parts and averages of a peer be nonsense, or drip, or stop after the first."""
    transport: Any = peer._transport
    serve, send = transport.serve, transport.aggregate_part

    async def lie(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        number = 0
        async for message in messages:
            if how == "drip":
                await asyncio.sleep(0.9)
            if how == "silence" and number:
                await asyncio.get_running_loop().create_future()
            number += 1
            if message.tensor_part is not None and how in ("wrong shape", "infinity"):
                change = wrong_shape if how == "wrong shape" else infinite
                message = replace(message, tensor_part=change(message.tensor_part), encoded=[])
            yield message

    async def serve_lies(service: Any, gossip: Any) -> None:
        answer = service.aggregate_part
        service.aggregate_part = lambda messages: lie(answer(messages))
        await serve(service, gossip)

    transport.serve = serve_lies
    transport.aggregate_part = lambda endpoint, messages: send(endpoint, lie(messages))


@pytest.mark.parametrize("how", ["wrong shape", "infinity", "drip", "silence"])
def test_its_round_ends_in_time_and_the_next_one_with_honest_peers_is_whole(how: str) -> None:
    swarm = Swarm(1)
    tensors = [torch.full((SIZE,), float(number)) for number in range(7)]
    victim, *others = [swarm.peer(f"peer:{number}", [tensor], **OPTIONS) for number, tensor in enumerate(tensors, 1)]
    liars, honest = others[:3], others[3:]
    for liar in liars:
        let_lie(liar, how)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for peer in (victim, *honest):
                await stack.enter_async_context(peer)
            async with AsyncExitStack() as lying:
                for liar in liars:
                    await lying.enter_async_context(liar)
                receipt, *_ = await asyncio.gather(victim.average(), *(liar.average() for liar in liars))
                assert len(receipt.members) == 4
                assert receipt.allreduce_seconds < 2 * 4.0 + 0.5  # twice stall_timeout
                assert receipt.allreduce_seconds < TIMEOUT + 0.1
                assert bool(torch.isfinite(tensors[0]).all())
                assert bool((tensors[0] <= 3.0).all())
            receipts = await asyncio.gather(victim.average(), *(peer.average() for peer in honest))
            for receipt in receipts:
                assert len(receipt.members) == 4
                assert receipt.dropped == ()
                assert receipt.allreduce_seconds < 1.0
            for tensor in tensors[4:]:
                assert torch.equal(tensor, tensors[0])

    swarm.simulate(main())
