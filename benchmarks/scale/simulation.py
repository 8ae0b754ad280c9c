"""Simulates whole peers on the in-memory network in virtual time: matchmaking and gossip with many peers.

Part of `benchmarks.scale`, which runs each simulation in its own process. A message takes 20 to 80 ms. Nothing is
encoded or signed, and a record at many peers is one object, so that memory per peer is that of its tables.
"""

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import torch

from averaging import Peer, Receipt
from averaging.discovery.gossip.gossip_discovery import GossipDiscovery
from averaging.discovery.gossip.membership import GossipSettings
from averaging.discovery.gossip.record import UnsignedIdentity
from averaging.peer import PeerContext
from averaging.protocol.messages import Record
from averaging.testing import virtual_time
from averaging.testing.transport import MemoryNetwork
from averaging.transport.base import Transport
from benchmarks.scale.worker import resident_bytes
from benchmarks.workers import ROOT, say, without_interrupts

RUN = "scale"

LATENCY = (0.02, 0.08)
"""Minimum and maximum seconds that a message takes."""

SETTLING = 5.0
"""Seconds until heartbeats are no longer synchronous."""


class SizedIdentity(UnsignedIdentity):
    """Signatures of the right length without the computation."""

    def sign(self, run_id: str, record: Record) -> bytes:
        return bytes(64)


def first_bits(number: int, peers: int, group_size: int) -> str:
    """Returns group bits with which every key has `group_size` of `peers`, both powers of two, in every round."""
    digits = (peers // group_size).bit_length() - 1
    return format(number // group_size, f"0{digits}b") if digits > 0 else ""


async def simulate(peers: int, group_size: int, rounds: int, one_key: bool) -> dict[str, Any]:
    """Simulates peers that all call `average` at the same moment, `rounds` times.

    Args:
        one_key: whether all look for groups under one key; else group bits give each key as many peers as a group has.
    """
    rng = random.Random(peers)
    network = MemoryNetwork(rng, latency=LATENCY)
    real, before = time.perf_counter(), resident_bytes()

    def discovery(endpoint: str, transport: Transport) -> GossipDiscovery:
        return GossipDiscovery(
            RUN,
            endpoint,
            transport,
            identity=SizedIdentity(rng),
            clock=virtual_time.clock,
            rng=random.Random(rng.getrandbits(64)),
            settings=GossipSettings(leave_timeout=0.001),
        )

    swarm = [
        Peer(
            [torch.full((16,), float(number))],
            run_id=RUN,
            context=PeerContext(
                transport=network.transport(f"peer-{number}.example.net:4222"),
                discovery=discovery,
                clock=virtual_time.clock,
                rng=random.Random(rng.getrandbits(64)),
            ),
            group_size=group_size,
            group_bits="" if one_key else first_bits(number, peers, group_size),
            group_wait=30.0,
            round_timeout=60.0,
        )
        for number in range(peers)
    ]
    async with AsyncExitStack() as stack:
        for peer in swarm:
            await stack.enter_async_context(peer)
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
        network._serving.clear()  # without saying goodbye, which would take most of the time
    if network.errors:
        raise RuntimeError(f"a service raised {network.errors[0]!r}")
    return {
        "peers": peers,
        "group_size": group_size,
        "keys": 1 if one_key else max(1, peers // group_size),
        "rounds": done,
        "idle_calls_per_peer_and_second": {name: n / peers / SETTLING for name, n in sorted(idle.items())},
        "bytes_per_peer": held / peers,
        "real_seconds": time.perf_counter() - real,
    }


def summary(receipts: Sequence[Receipt], calls: Mapping[str, int]) -> dict[str, Any]:
    """Summarizes one round of all peers."""
    seconds = sorted(one.seconds - one.allreduce_seconds for one in receipts if one.members)
    return {
        "seconds_median": statistics.median(seconds) if seconds else None,
        "seconds_max": seconds[-1] if seconds else None,
        "full": sum(len(one.members) == max(len(other.members) for other in receipts) for one in receipts),
        "calls_per_peer": {name: count / len(receipts) for name, count in sorted(calls.items())},
    }


def _acquaint(discoveries: Sequence[Any]) -> None:
    """Gives all peers the records of all, because joining one by one would take most of the time."""
    everything = [record for one in discoveries for record in one.list_records("")]
    for one in discoveries:
        for record in everything:
            one._merge(record, "the start")


def in_child(**arguments: Any) -> dict[str, Any]:
    """Runs a simulation in its own process, so that the memory of others does not count."""
    command = [sys.executable, "-m", "benchmarks.scale.simulation", json.dumps(arguments)]
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


if __name__ == "__main__":
    print(json.dumps(virtual_time.run(simulate(**json.loads(sys.argv[1])))))
