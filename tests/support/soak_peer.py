"""A peer of the soak test: averages repeatedly, and reports its values after each round.

Run as `python -m tests.support.soak_peer '{"run_id": ..., "listen": ..., "advertise": ..., "join": [...], ...}'`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import psutil
import torch

from averaging import AveragingError, Peer
from tests.support.worker import tell

SIZE = 100_000


async def main(options: dict[str, Any], seed: int, *, spoilt: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.zeros(SIZE)
    async with Peer([tensor], part_size_bytes=1 << 14, **options) as peer:
        tell("ready", endpoint=peer.endpoint)
        while True:
            with peer.tensors() as tensors:
                # All elements of a peer have one value, so that a mixture of two averages is visible.
                tensors[0][:] = float(torch.randint(0, 1000, (), generator=generator))
                mine = tensors[0][0].item()
            try:
                receipt = await peer.average(gather=mine)
            except AveragingError as error:
                tell("failure", message=str(error))
                continue
            with peer.tensors() as tensors:
                if spoilt:
                    tensors[0][SIZE // 2] += 0.5
                found = sorted(set(tensors[0].tolist()))
            tell(
                "round",
                outcome=receipt.outcome,
                reason=receipt.reason,
                group=receipt.group_id.hex(),
                values=found,
                gathered=dict(receipt.gathered),
                lanes=[one.lane for one in receipt.accounts if one.lane],
                dropped=[f"{lost.endpoint}: {lost.reason}" for lost in receipt.dropped],
                kept_local=receipt.kept_local,
                digest=receipt.digest,
                rss=psutil.Process().memory_info().rss,
            )


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asyncio.run(main(given, given.pop("seed"), spoilt=given.pop("spoilt", False)))
