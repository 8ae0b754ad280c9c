"""A process with one or several real peers, controlled by `benchmarks.scale`.

Moments are of the clock that all processes of a machine share (CLOCK_MONOTONIC).
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from averaging import Peer
from averaging.discovery.gossip.gossip_discovery import peers_key
from averaging.peer import PeerContext
from averaging.protocol.messages import Digest, ExchangeReply, JoinRequest, MessageFromLeader, Refusal, Rumour
from averaging.transport.grpc import GrpcTransport
from benchmarks.workers import serve

RUN = "scale"

LIMIT = 60.0
"""Timeout of one command in seconds."""


class CountingTransport(GrpcTransport):
    """A gRPC transport that counts its calls by method."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:0", max_message_bytes=34 << 20)
        self.calls: Counter[str] = Counter()

    def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        self.calls["join_group"] += 1
        return super().join_group(endpoint, request)

    def exchange(self, endpoint: str, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        self.calls["exchange"] += 1
        return super().exchange(endpoint, digest)

    async def push(self, endpoint: str, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        self.calls["push"] += 1
        return await super().push(endpoint, run_id, rumours)


def resident_bytes() -> int:
    """Memory of this process without file mappings."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Role:
    """The commands on the peers of this process, which had `before` bytes without them."""

    def __init__(self, peers: list[Peer], transports: list[CountingTransport], before: int) -> None:
        self._peers, self._transports, self._before = peers, transports, before

    async def settle(self, peers: int) -> dict[str, Any]:
        return {"at": await self._all_read(peers_key(RUN), peers)}

    async def average(self, at: list[float]) -> dict[str, Any]:
        """Each peer calls `average` at its moment."""
        async with asyncio.timeout(LIMIT + 10.0):
            return {"rounds": await asyncio.gather(*map(self._average_one, self._peers, at))}

    async def _average_one(self, peer: Peer, at: float) -> dict[str, Any]:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        called = time.monotonic()
        receipt = await peer.average()
        begun = time.monotonic() - receipt.allreduce_seconds
        return {"called": called, "begun": begun, "members": len(receipt.members), "group": receipt.group_id.hex()}

    async def store(self, key: str) -> dict[str, Any]:
        at = time.monotonic()
        await self._peers[0].discovery.store(key, self._peers[0].endpoint, bytes(64), time.time() + 600)
        return {"at": at}

    async def see(self, key: str) -> dict[str, Any]:
        return {"at": await self._all_read(key, 1)}

    async def _all_read(self, key: str, count: int) -> float:
        """Returns the moment at which all peers here read this number of records under `key`."""

        async def one(peer: Peer) -> float:
            async with aclosing(peer.discovery.watch(key)) as changes:
                async for entries in changes:
                    if len(entries) >= count:
                        return time.monotonic()
            raise RuntimeError("the peer left")

        async with asyncio.timeout(LIMIT):
            return max(await asyncio.gather(*map(one, self._peers)))

    async def rest(self, seconds: float) -> dict[str, Any]:
        """Idles; returns the calls of all peers here meanwhile, and the CPU time."""
        await self.count()
        cpu = time.process_time()
        await asyncio.sleep(seconds)
        return await self.count() | {"cpu_seconds": time.process_time() - cpu}

    async def count(self) -> dict[str, Any]:
        """Returns the calls of all peers here since the last count, and their memory."""
        calls: Counter[str] = Counter()
        for transport in self._transports:
            calls.update(transport.calls)
            transport.calls.clear()
        return {"calls": dict(calls), "bytes_per_peer": (resident_bytes() - self._before) / len(self._peers)}


@asynccontextmanager
async def playing(options: argparse.Namespace) -> AsyncIterator[tuple[Role, dict[str, Any]]]:
    transports = [CountingTransport() for _ in range(options.peers)]
    async with AsyncExitStack() as stack:
        peers: list[Peer] = []
        before = resident_bytes()
        for number, transport in enumerate(transports):
            peer = Peer(
                [torch.zeros(16)],
                run_id=RUN,
                context=PeerContext(transport=transport, rng=random.Random(f"{options.first + number}")),
                join=[options.join] if options.join else [peer.endpoint for peer in peers[:1]],
                join_timeout=LIMIT,
                group_size=options.group_size,
                group_wait=5.0,
                round_timeout=LIMIT,
            )
            peers.append(await stack.enter_async_context(peer))
        yield Role(peers, transports, before), {"endpoint": peers[0].endpoint}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, required=True, help="how many peers this process has")
    parser.add_argument("--first", type=int, required=True, help="number of the first of them")
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--join", default="", help="address of a peer of the run")
    torch.set_num_threads(1)
    serve(playing(parser.parse_args()))


if __name__ == "__main__":
    main()
