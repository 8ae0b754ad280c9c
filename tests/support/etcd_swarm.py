"""Whole peers on the memory network whose discovery is in the model of etcd, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch

from averaging import Peer
from averaging.discovery.etcd import EtcdDiscovery
from averaging.discovery.gossip import UnsignedIdentity
from averaging.testing import virtual_time
from averaging.testing.transport import MemoryNetwork
from averaging.transport.base import Transport
from tests.support.memory_etcd import MemoryEtcd


class EtcdSwarm:
    """Peers of one run. Everything random comes from `seed`.

    Args:
        latency: bounds of the seconds that a message takes, to other peers and to etcd.
    """

    def __init__(self, seed: int, latency: tuple[float, float] = (0.02, 0.08)) -> None:
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(self.rng, latency=latency)
        self.etcd = MemoryEtcd(latency, self.rng)

    @asynccontextmanager
    async def peers(
        self,
        count: int,
        bits: Callable[[int], str] = lambda _: "",
        *,
        first: int = 0,
        seconds: float = 40.0,
        **options: Any,
    ) -> AsyncIterator[Sequence[Peer]]:
        """Peers that are entered; each has its number as its tensor.

        Args:
            count: number of peers.
            bits: returns the group bits of each.
            first: number of the first.
            seconds: time until they average; after 30 s all have looked again who else is in the run.
            options: of each.
        """
        async with AsyncExitStack() as stack:
            peers = [
                Peer(
                    {"w": torch.full((1,), float(number), dtype=torch.float64)},
                    run_id="run",
                    transport=self.network.transport(f"p{number}:1"),
                    discovery=self._discovery,
                    clock=virtual_time.clock,
                    rng=random.Random(self.rng.getrandbits(64)),
                    group_bits=bits(number),
                    share_state=False,
                    **options,
                )
                for number in range(first, first + count)
            ]
            await asyncio.gather(*(stack.enter_async_context(peer) for peer in peers))
            await asyncio.sleep(seconds)
            yield peers

    def _discovery(self, endpoint: str, transport: Transport) -> EtcdDiscovery:
        return EtcdDiscovery(
            *("run", endpoint, self.etcd.client()),
            identity=UnsignedIdentity(self.rng),
            clock=virtual_time.clock,
            rng=random.Random(self.rng.getrandbits(64)),
        )
