"""Peers on real gRPC and gossip, in one process."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import torch

from averaging import Peer, Receipt
from tests.support.tuned import tuned


async def enter(stack: AsyncExitStack, tensors: Mapping[str, torch.Tensor], **options: Any) -> Peer:
    options.setdefault("run_id", "run")
    options.setdefault("group_wait", 20.0)
    return await stack.enter_async_context(Peer(tensors, **tuned(options)))


async def swarm(stack: AsyncExitStack, all_tensors: Sequence[Mapping[str, torch.Tensor]], **options: Any) -> list[Peer]:
    """Peers that average all together."""
    options.setdefault("group_size", len(all_tensors))
    founder = await enter(stack, all_tensors[0], **options)
    return [founder] + [await enter(stack, tensors, join=[founder.endpoint], **options) for tensors in all_tensors[1:]]


async def told(peer: Peer, key: str, subkey: str) -> None:
    """Waits until a record has reached `peer`."""
    async with asyncio.timeout(60), aclosing(peer.discovery.watch(key)) as changes:
        async for entries in changes:
            if subkey in entries:
                return


async def average(*peers: Peer, **options: Any) -> list[Receipt]:
    async with asyncio.timeout(60):
        return list(await asyncio.gather(*(peer.average(**options) for peer in peers)))
