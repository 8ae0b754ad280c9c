"""Mixes the tensors of side³ simulated peers in groups of `side`, with discovery in a model of etcd, in virtual time.

Whole peers: matchmaking, all-reduce, receipts. Without failures all hold the mean of all after 3 rounds. With
`--dying 0.01` that share of the peers dies in each round, at a random moment of its first second. A line of JSON a
round: how far the survivors are from the mean of all initial values, mean square and largest.

    python -m benchmarks.scale.mixing --side 16 --rounds 3                 # 4,096 peers
    python -m benchmarks.scale.mixing --side 16 --rounds 5 --dying 0.01
    python -m benchmarks.scale.mixing --side 16 --rounds 1 --one-key       # all under one key, groups of 8
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from averaging import Peer, Receipt
from averaging.errors import AveragingError
from averaging.testing import virtual_time
from tests.support.etcd_swarm import EtcdSwarm

ONE_KEY_GROUP = 8


def distances(values: Sequence[float], mean: float) -> tuple[float, float]:
    """The mean square and the largest distance of `values` from `mean`."""
    apart = torch.tensor(values, dtype=torch.float64) - mean
    return float(apart.square().mean()), float(apart.abs().max())


async def one_average(peer: Peer, dies_after: float | None) -> Receipt | None:
    """One average of a peer; None if it dies in it."""
    if dies_after is None:
        return await peer.average()
    search = asyncio.create_task(peer.average())
    await asyncio.sleep(dies_after)
    search.cancel()
    with suppress(asyncio.CancelledError, AveragingError):
        await search
    return None


async def mix(swarm: EtcdSwarm, side: int, rounds: int, dying: float, *, one_key: bool) -> None:
    """Runs the rounds and prints a line for each."""
    count, digits = side**3, (side * side - 1).bit_length()
    size = ONE_KEY_GROUP if one_key else side
    options: dict[str, Any] = {"group_size": size, "round_timeout": 20.0}
    async with swarm.peers(
        count, lambda n: "" if one_key else format(n // side, f"0{digits}b"), seconds=2.0, **options
    ) as peers:
        rng, alive = random.Random(side), list(range(count))
        values = torch.randn(count, generator=torch.Generator().manual_seed(side), dtype=torch.float64)
        for peer, value in zip(peers, values, strict=True):
            peer.own_tensors[0].fill_(float(value))
        for number in range(rounds):
            began = time.monotonic()
            swarm.network.calls.clear()
            lost = set(rng.sample(alive, round(dying * len(alive))))
            moments = [rng.uniform(0.0, 1.0) if each in lost else None for each in alive]
            done = await asyncio.gather(*map(one_average, [peers[each] for each in alive], moments))
            receipts = [receipt for receipt in done if receipt is not None]
            alive = [each for each in alive if each not in lost]
            square, largest = distances([float(peers[each].own_tensors[0]) for each in alive], float(values.mean()))
            line = {
                "round": number + 1,
                "alive": len(alive),
                "averaged": sum(receipt.averaged for receipt in receipts),
                "mean_square": square,
                "largest": largest,
                "requests_per_peer": swarm.network.calls["join_group"] / len(done),
                "last_group_seconds": max(receipt.phases.get("looking", 0.0) for receipt in receipts),
                "records_held": sum(len(peers[each].discovery.endpoints()) for each in alive) / len(alive),
                "real_seconds": round(time.monotonic() - began, 1),
            }
            print(json.dumps(line), flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=8, choices=(4, 8, 16), help="members of a group; side³ peers (8)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--dying", type=float, default=0.0, help="share of the peers that dies in each round (0)")
    parser.add_argument("--one-key", action="store_true", help="all under one key, in groups of 8")
    options = parser.parse_args()
    if options.rounds < 1 or not 0 <= options.dying < 0.5:
        parser.error("there must be at least 1 round, and fewer than half of the peers may die in it")
    gc.disable()  # nothing is garbage before the end, and looking for it takes longer than the simulation
    virtual_time.run(mix(EtcdSwarm(0), options.side, options.rounds, options.dying, one_key=options.one_key))


if __name__ == "__main__":
    main()
