"""Whole peers on the memory network in virtual time: matchmaking and discovery in runs larger than a machine can hold.

Part of `benchmarks.scale`, which runs each simulation in a process of its own. A message takes 20 to 80 ms. Nothing is
encoded or signed, and a record that many peers hold is one object, so that memory per peer is what its tables take.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import torch

from averaging import Peer, Receipt
from averaging.discovery.base import Discovery
from averaging.discovery.gossip.broadcast_tree import peer_hash
from averaging.discovery.gossip.record import Limits
from averaging.discovery.gossip.settings import GossipSettings
from averaging.discovery.memory import MemoryDiscovery, MemoryRegistry
from averaging.transport import virtual_time
from averaging.transport.base import Transport
from averaging.transport.memory import MemoryNetwork
from benchmarks.gossip import Host, sees, simulated
from benchmarks.scale_worker import resident_bytes
from benchmarks.workers import ROOT, say, without_interrupts

RUN = "scale"

LATENCY = (0.02, 0.08)
"""Seconds that a message takes, least and most."""

SHARED_DELAY = 0.5
"""Seconds until a record is at the others where discovery is one shared table; gossip takes 0.4 s among 1,024 peers."""

SETTLING = 5.0
"""Seconds until the signs of life have lost their common rhythm, somewhat."""

QUIET = GossipSettings(leave_timeout=0.001, peer_refresh=3000.0, peer_lifetime=3500.0, exchange_interval=6000.0)
"""Rumours alone: no sign of life and no exchange within the simulated time."""


def first_bits(number: int, peers: int, group_size: int) -> str:
    """Group bits with which every key has `group_size` of `peers`, both powers of two, in this round and all others."""
    digits = (peers // group_size).bit_length() - 1
    return format(number // group_size, f"0{digits}b") if digits > 0 else ""


async def matchmaking(peers: int, group_size: int, rounds: int, *, gossip: bool, one_key: bool) -> dict[str, Any]:
    """Peers that all call `average` at the same moment, `rounds` times.

    Args:
        gossip: discovery is gossip, in full; else one table that all share, with a delay.
        one_key: all look for each other under one key; else the group bits give each key as many as a group has.
    """
    rng = random.Random(peers)
    network = MemoryNetwork(rng, latency=LATENCY)
    registry = MemoryRegistry(clock=virtual_time.clock, delay=SHARED_DELAY, rng=rng, limits=Limits(records=1 << 20))
    real, before = time.perf_counter(), resident_bytes()

    def discovery(endpoint: str, transport: Transport) -> AbstractAsyncContextManager[Discovery]:
        if not gossip:
            return MemoryDiscovery(registry)
        return simulated(RUN, endpoint, transport, rng, GossipSettings(leave_timeout=0.001))

    swarm = [
        Peer(
            [torch.full((16,), float(number))],
            run_id=RUN,
            transport=network.transport(f"peer-{number}.example.net:4222"),
            discovery=discovery,
            clock=virtual_time.clock,
            rng=random.Random(rng.getrandbits(64)),
            group_size=group_size,
            group_bits="" if one_key else first_bits(number, peers, group_size),
            matchmaking_time=30.0,
            timeout=60.0,
        )
        for number in range(peers)
    ]
    async with AsyncExitStack() as stack:
        for peer in swarm:
            await stack.enter_async_context(peer)
        if gossip:
            _acquaint([peer.discovery for peer in swarm])
        say(f"    all entered after {time.perf_counter() - real:.0f} s")
        await asyncio.sleep(SETTLING)
        idle = Counter(network.calls)
        await asyncio.sleep(SETTLING)
        idle = network.calls - idle
        done = []
        for number in range(rounds):
            calls = Counter(network.calls)
            receipts = await asyncio.gather(*(peer.average() for peer in swarm))
            done.append(summary(receipts, network.calls - calls))
            say(f"    round {number + 1} after {time.perf_counter() - real:.0f} s")
            await asyncio.sleep(1.0)
        held = resident_bytes() - before
        network._serving.clear()  # they need not tell each other that they leave: that would take most of the time
    if network.errors:
        raise RuntimeError(f"a service raised {network.errors[0]!r}")
    return {
        "peers": peers,
        "group_size": group_size,
        "discovery": "gossip" if gossip else "shared table",
        "keys": 1 if one_key else max(1, peers // group_size),
        "rounds": done,
        "idle_calls_per_peer_and_second": {name: n / peers / SETTLING for name, n in sorted(idle.items())},
        "bytes_per_peer": held / peers,
        "real_seconds": time.perf_counter() - real,
    }


def summary(receipts: Sequence[Receipt], calls: Mapping[str, int]) -> dict[str, Any]:
    """What one round of all peers comes to."""
    seconds = sorted(one.seconds - one.allreduce_seconds for one in receipts if one.members)
    return {
        "seconds_median": statistics.median(seconds) if seconds else None,
        "seconds_max": seconds[-1] if seconds else None,
        "groups": len({one.group_id for one in receipts if one.members}),
        "full": sum(len(one.members) == max(len(other.members) for other in receipts) for one in receipts),
        "alone": sum(not one.members for one in receipts),
        "calls_per_peer": {name: count / len(receipts) for name, count in sorted(calls.items())},
    }


def _acquaint(discoveries: Sequence[Any]) -> None:
    """Gives all peers the records of all: joining one by one would take most of the time."""
    everything = [record for one in discoveries for record in one.list_records("")]
    for one in discoveries:
        for record in everything:
            one._take(record, "the start")


async def rumours(peers: int, records: int) -> dict[str, Any]:
    """How long a fresh record takes to all members, and how many messages.

    All peers know all members, but hold no other records than the fresh ones, since those of N peers at N peers are N²;
    nobody compares tables meanwhile.
    """
    rng = random.Random(peers)
    network = MemoryNetwork(rng, latency=LATENCY)
    real, before = time.perf_counter(), resident_bytes()

    def start(number: int) -> Host:
        transport = network.transport(f"peer-{number}.example.net:4222")

        return Host(transport, lambda endpoint: simulated(RUN, endpoint, transport, rng, QUIET))

    hosts = [start(number) for number in range(peers)]
    await asyncio.gather(*(host.ready() for host in hosts))
    await asyncio.sleep(1.0)  # the signs of life with which they entered are told, to nobody
    places = sorted((peer_hash(host.endpoint), host.endpoint) for host in hosts)
    for host in hosts:
        ring = host.discovery._members._ring
        ring._places = [place for place in places if place[1] != host.endpoint]
        ring._names = {name for _, name in ring._places}
    say(f"    all entered after {time.perf_counter() - real:.0f} s")
    times, pushes = [], []
    for number in range(records):
        key, pushed = f"{RUN}.fresh{number}", network.calls["push"]
        begun = asyncio.get_running_loop().time()
        await rng.choice(hosts).discovery.store(key, "fresh:1", bytes(64), virtual_time.clock() + 3000.0)
        times.append(max(await asyncio.gather(*(sees(host.discovery, key, bool) for host in hosts))) - begun)
        pushes.append(network.calls["push"] - pushed)
    held = resident_bytes() - before
    network._serving.clear()
    for host in hosts:
        host.leave.set()
    await asyncio.gather(*(host.task for host in hosts))
    return {
        "peers": peers,
        "seconds": times,
        "pushes": pushes,
        "bytes_per_peer": held / peers,
        "real_seconds": time.perf_counter() - real,
    }


def in_child(name: str, **arguments: Any) -> dict[str, Any]:
    """Runs the simulation of that name in a process of its own, so that no other one's memory is counted."""
    command = [sys.executable, "-m", "benchmarks.scale_simulation", json.dumps({"name": name, **arguments})]
    with without_interrupts():
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            out, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    found: dict[str, Any] = json.loads(out)
    return found


def main() -> None:
    arguments = json.loads(sys.argv[1])
    name = arguments.pop("name")
    found = virtual_time.run(matchmaking(**arguments) if name == "matchmaking" else rumours(**arguments))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
