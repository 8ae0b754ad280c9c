"""Measures how fast a fresh record spreads, and the cost of gossip.

`python -m benchmarks.gossip` runs peers on loopback gRPC, all in this process. `--simulate` runs them on the in-memory
network in virtual time, where a message takes 20 to 80 ms, and counts messages and bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import ClassVar, cast

from averaging.discovery.gossip.gossip_discovery import GossipDiscovery, peers_key
from averaging.discovery.gossip.identity import UnsignedIdentity
from averaging.discovery.gossip.record import GossipSettings
from averaging.protocol.messages import Digest, ExchangeReply, Record, Refusal, Rumour
from averaging.testing import virtual_time
from averaging.testing.transport import MemoryNetwork, MemoryTransport
from averaging.transport.base import AveragingService, Transport
from averaging.transport.grpc import GrpcTransport, methods

RUN = "bench"
KEY = f"{RUN}.0b"


class NoAveraging:
    """Refuses averaging calls, because this benchmark makes none."""

    def __getattr__(self, name: str) -> None:
        return None


NO_AVERAGING = cast(AveragingService, NoAveraging())


class Host:
    """One peer, in its own task."""

    def __init__(self, transport: Transport, make: Callable[[str], GossipDiscovery]) -> None:
        self.joined, self.leave = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._run(transport, make))

    async def _run(self, transport: Transport, make: Callable[[str], GossipDiscovery]) -> None:
        try:
            self.endpoint = await transport.bind()
            self.discovery = make(self.endpoint)
            await transport.serve(NO_AVERAGING, self.discovery)
            async with self.discovery:
                self.joined.set()
                await self.leave.wait()
        finally:
            await transport.close()

    async def ready(self) -> None:
        """Waits until it has joined, or raises the reason why it could not."""
        waiter = asyncio.create_task(self.joined.wait())
        await asyncio.wait([waiter, self.task], return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if not self.joined.is_set():
            await self.task


@asynccontextmanager
async def hosting() -> AsyncIterator[list[Host]]:
    """Yields an empty list of peers. Peers added inside have left the run on exit.

    This holds also after Ctrl+C: otherwise asyncio would cancel their tasks together with gRPC's own, whose calls then
    crash.
    """
    hosts: list[Host] = []
    try:
        yield hosts
        for host in hosts:
            host.leave.set()
        await asyncio.gather(*(host.task for host in hosts))
    finally:
        for host in hosts:
            host.task.cancel()
        await asyncio.gather(*(host.task for host in hosts), return_exceptions=True)


async def sees(peer: GossipDiscovery, key: str, wanted: Callable[[set[str]], bool]) -> float:
    """Waits until `peer` reads `wanted` under `key`; returns the time."""
    async with aclosing(peer.watch(key)) as changes:
        async for entries in changes:
            if wanted(set(entries)):
                return asyncio.get_running_loop().time()
    raise RuntimeError("the peer left")


async def spread_times(
    peers: Sequence[GossipDiscovery], names: Sequence[str], rng: random.Random, pause: float
) -> list[float]:
    """Stores records at random peers, one after the other; returns the seconds until each had reached all peers."""
    times = []
    for name in names:
        key = f"{KEY}{name}"
        watchers = [asyncio.create_task(sees(peer, key, bool)) for peer in peers]
        await asyncio.sleep(pause)
        start = asyncio.get_running_loop().time()
        await rng.choice(peers).store(key, name, bytes(64), time.time() + 600)
        times.append(max(await asyncio.gather(*watchers)) - start)
    return times


async def on_loopback(count: int, records: int) -> None:
    async with hosting() as hosts:
        await _on_loopback(hosts, count, records)


async def _on_loopback(hosts: list[Host], count: int, records: int) -> None:
    rng = random.Random(0)

    def start(join: Sequence[str]) -> Host:
        transport = GrpcTransport("127.0.0.1:0", max_message_bytes=4 << 20)
        return Host(transport, lambda endpoint: GossipDiscovery(RUN, endpoint, transport, join=join, join_timeout=60.0))

    begun = time.perf_counter()
    hosts.append(start([]))
    await hosts[0].ready()
    hosts += [start([hosts[0].endpoint]) for _ in range(count - 1)]
    await asyncio.gather(*(host.ready() for host in hosts))
    peers = [host.discovery for host in hosts]
    joined = time.perf_counter()
    await asyncio.gather(*(sees(peer, peers_key(RUN), lambda names: len(names) == count) for peer in peers))
    known = time.perf_counter()
    (cold,) = await spread_times(peers, ["first:1"], rng, 2.0)
    times = await spread_times(peers, [f"fresh-{number}:1" for number in range(records)], rng, 0.5)
    declared = time.perf_counter()
    for host in hosts:
        await host.discovery.store(KEY, host.endpoint, b"", time.time() + 600)
    await asyncio.gather(*(sees(peer, KEY, lambda names: len(names) == count) for peer in peers))
    declared = time.perf_counter() - declared
    cpu, idle = time.process_time(), 5.0
    await asyncio.sleep(idle)
    cpu = (time.process_time() - cpu) / idle
    print(
        f"{count:5d} {joined - begun:8.2f} {known - begun:8.2f} {cold * 1e3:8.0f} "
        f"{statistics.median(times) * 1e3:8.0f} {max(times) * 1e3:8.0f} {declared:8.2f} {cpu / count * 100:8.2f}"
    )


class CountingTransport(MemoryTransport):
    """Counts messages and their bytes on the wire."""

    sent: ClassVar[Counter[str]] = Counter()
    sizes: ClassVar[dict[Record, int]] = {}

    async def push(self, endpoint: str, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        self.sent["pushes"] += 1
        self.sent["rumours"] += any(rumour.range_end for rumour in rumours)
        self.sent["bytes"] += sum(self.size(rumour.record) + 18 for rumour in rumours)
        return await super().push(endpoint, run_id, rumours)

    async def exchange(self, endpoint: str, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        self.sent["exchanges"] += 1
        self.sent["bytes"] += 40 + 20 * len(digest.entries)
        async with aclosing(super().exchange(endpoint, digest)) as replies:
            async for reply in replies:
                self.sent["bytes"] += sum(map(self.size, reply.records)) + 8 * len(reply.wanted) + 4
                yield reply

    def size(self, record: Record) -> int:
        if record not in self.sizes:
            self.sizes[record] = len(methods.SUBSCRIBE.reply.SerializeToString((record,)))
        return self.sizes[record]


async def in_simulation(count: int, records: int, seconds: float) -> None:
    async with hosting() as hosts:
        await _in_simulation(hosts, count, records, seconds)


async def _in_simulation(hosts: list[Host], count: int, records: int, seconds: float) -> None:
    rng = random.Random(count)
    network = MemoryNetwork(rng, latency=(0.02, 0.08))
    CountingTransport.sizes.clear()
    sent = CountingTransport.sent
    real = time.perf_counter()

    def start(number: int) -> Host:
        transport = CountingTransport(network, f"peer-{number}.example.net:4222")

        return Host(transport, lambda endpoint: simulated(RUN, endpoint, transport, rng))

    hosts += [start(number) for number in range(count)]
    await asyncio.gather(*(host.ready() for host in hosts))
    for host in hosts:
        await host.discovery.store(KEY, host.endpoint, bytes(1), virtual_time.clock() + 3600)
    # All start with all records, because joining one by one would take most of the time.
    everything = [record for host in hosts for record in host.discovery.list_records("")]
    for host in hosts:
        for record in everything:
            host.discovery._merge(record, "the start")
    peers = [host.discovery for host in hosts]
    await asyncio.sleep(20.0)  # until heartbeats are no longer synchronous
    sent.clear()
    times, pushes = [], []
    for number in range(records):
        key, before = f"{KEY}{number}", sent["rumours"]
        begun = asyncio.get_running_loop().time()
        await rng.choice(peers).store(key, "fresh:1", bytes(64), virtual_time.clock() + 3600)
        times.append(max(await asyncio.gather(*(sees(peer, key, bool) for peer in peers))) - begun)
        await asyncio.sleep(1.0)
        pushes.append(sent["rumours"] - before)
    sent.clear()
    await asyncio.sleep(seconds)
    members = [len(peer.get(peers_key(RUN))) for peer in peers]
    print(
        f"{count:5d} {len(everything):8d} {statistics.median(times):8.2f} {max(times):8.2f} {max(pushes):8d} "
        f"{sent['bytes'] / seconds / count / 1e3:10.1f} {(sent['pushes'] + sent['exchanges']) / seconds / count:8.2f} "
        f"{count - min(members):8d} {time.perf_counter() - real:8.1f}",
        flush=True,
    )


class SizedIdentity(UnsignedIdentity):
    """Signatures of the right length without the computation."""

    def sign(self, run_id: str, record: Record) -> bytes:
        return bytes(64)


def simulated(
    run_id: str, endpoint: str, transport: Transport, rng: random.Random, settings: GossipSettings | None = None
) -> GossipDiscovery:
    """Runs in virtual time, with free signatures; all randomness comes from `rng`."""
    return GossipDiscovery(
        run_id,
        endpoint,
        transport,
        identity=SizedIdentity(rng),
        clock=virtual_time.clock,
        rng=random.Random(rng.getrandbits(64)),
        settings=settings,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="virtual time instead of real sockets")
    parser.add_argument("--peers", type=int, nargs="+", help="sizes of the run (8 64; simulated: 16 64 256 1024)")
    parser.add_argument(
        "--records", type=int, default=20, help="how many fresh records to time (20; simulated: 5 at most)"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to count bytes, in virtual time (20)")
    options = parser.parse_args()
    if min(options.peers or [2]) < 2 or options.records < 1 or not 0 < options.seconds < math.inf:
        parser.error("there must be at least 2 peers and 1 record, and --seconds above 0")
    if options.simulate:
        print("peers  records  s to reach all     rumours  kB/s sent  calls/s  members   real s")
        print("                  median      max per record  per peer per peer  missing")
        for count in options.peers or (16, 64, 256, 1024):
            virtual_time.run(in_simulation(count, min(options.records, 5), options.seconds))
    else:
        print("peers s until all   all know ms until a fresh record    s until  % of a")
        print("       joined        all      first   is at all peers   all read  core")
        print("                              median      max  all's  per peer")
        for count in options.peers or (8, 64):
            asyncio.run(on_loopback(count, options.records))


if __name__ == "__main__":
    main()
