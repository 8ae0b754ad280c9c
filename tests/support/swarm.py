"""Whole peers on the memory network and memory discovery, in virtual time."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch

from averaging import Peer, Receipt
from averaging.peer import PeerContext
from averaging.protocol.group import Mode
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry
from averaging.testing.transport import MemoryNetwork
from tests.support.tuned import tuned


class Swarm:
    """Peers of one run. Everything random comes from `seed`.

    Args:
        delay: seconds until a record is at the other peers.
    """

    def __init__(
        self, seed: int, *, latency: tuple[float, float] = (0.001, 0.02), loss: float = 0.0, delay: float = 0.02
    ) -> None:
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(self.rng, latency=latency, loss=loss)
        self.registry = MemoryRegistry(clock=virtual_time.clock, delay=delay, rng=self.rng)
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def peer(self, name: str, tensors: Sequence[torch.Tensor] | Mapping[str, torch.Tensor], **options: Any) -> Peer:
        """A peer that is not entered yet; `name` is its endpoint, unless it is a client."""
        client = options.get("mode") is Mode.CLIENT
        return Peer(
            tensors,
            context=PeerContext(
                transport=self.network.transport(None if client else name),
                discovery=lambda endpoint, transport: MemoryDiscovery(self.registry),
                clock=virtual_time.clock,
                rng=random.Random(self.rng.getrandbits(64)),
            ),
            **tuned({"run_id": "run", **options}),
        )

    async def average_together(self, peers: Sequence[Peer], rounds: int = 1) -> list[list[Receipt]]:
        """All peers average `rounds` times, each round beginning when the last is over everywhere; receipts by peer."""
        receipts: list[list[Receipt]] = [[] for _ in peers]
        async with entered(peers):
            for _ in range(rounds):
                for own, receipt in zip(receipts, await together(peers), strict=True):
                    own.append(receipt)
        return receipts

    def simulate(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Runs to the end, and checks that no service raised what it must not."""
        result = virtual_time.run(main)
        assert self.network.errors == []
        return result


@asynccontextmanager
async def entered(peers: Iterable[Peer]) -> AsyncIterator[None]:
    """All of these are entered, one after the other."""
    async with AsyncExitStack() as stack:
        for peer in peers:
            await stack.enter_async_context(peer)
        yield


async def together(peers: Iterable[Peer]) -> list[Receipt]:
    """The receipts of one attempt of each of these."""
    return await asyncio.gather(*(peer.average() for peer in peers))


def change_messages(peer: Peer, change: Callable[[Any], AsyncGenerator[Any, None]], where: str) -> None:
    """Changes what a peer sends as a sender (where "parts"), answers as a reducer ("replies"), or "both"."""
    transport: Any = peer._transport
    serve, send = transport.serve, transport.aggregate_part

    async def serve_changed(service: Any, gossip: Any) -> None:
        answer = service.aggregate_part
        service.aggregate_part = lambda messages: change(answer(messages))
        await serve(service, gossip)

    if where != "replies":
        transport.aggregate_part = lambda endpoint, messages: send(endpoint, change(messages))
    if where != "parts":
        transport.serve = serve_changed


def scalars(count: int, seed: int) -> list[torch.Tensor]:
    """One small float64 tensor per peer."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(count)]


def spread(tensors: Sequence[torch.Tensor]) -> float:
    """The largest distance of any element from the mean over all peers."""
    stacked = torch.stack(list(tensors))
    return float((stacked - stacked.mean(dim=0)).abs().max())
