"""A publisher in a process of its own. Its weights follow from the version, so that tests know them.

`python -m tests.weights.weights_worker PORT FIRST` publishes version FIRST, and the next for each line on stdin.
"""

import asyncio
import json
import sys

import torch

from averaging import WeightPublisher
from averaging.rpc import RpcServer


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """6 MiB of float32, of which each version changes a part or a bit of everything."""
    torch.manual_seed(0)
    state = {"first": torch.randn(1 << 20), "second": torch.randn(1 << 19), "version": torch.tensor(0)}
    state["first"] += 1e-4 * (version // 2) * torch.randn(1 << 20)
    state["second"] += 1e-4 * version * torch.randn(1 << 19)
    state["version"] += version
    return state


async def main(port: int, version: int) -> None:
    publisher = WeightPublisher()
    loop = asyncio.get_running_loop()
    async with RpcServer(f"127.0.0.1:{port}", [publisher]) as server:
        print(json.dumps({"event": "started", "endpoint": server.endpoint}), flush=True)
        while True:
            await publisher.publish(weights_of(version), version)
            print(json.dumps({"event": "published", "version": version}), flush=True)
            if not await loop.run_in_executor(None, sys.stdin.readline):
                return
            version += 1


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
