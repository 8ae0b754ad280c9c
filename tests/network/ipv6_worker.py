"""Parts of the package in processes of machines that have no IPv4; each prints JSON lines.

`python -m tests.network.ipv6_worker PART ARGUMENT…`; `PARTS` has them.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from averaging import BlockingPeer, WeightPublisher
from averaging.rl.synchronizer import WeightReceiver, WeightSender
from averaging.rpc import RpcServer, read_credentials
from tests.support.worker import tell

VALUE = 3.0


async def publish(listen: str) -> None:
    """A publisher of one version."""
    publisher = WeightPublisher()
    async with RpcServer(listen, [publisher], credentials=read_credentials(insecure=True)) as server:
        await publisher.publish({"w": torch.full((3,), VALUE)}, 1)
        tell("ready", endpoint=server.endpoint)
        await asyncio.Event().wait()


async def send(host: str) -> None:
    """The trainer of a weight sync group of two."""
    sender = WeightSender(lambda: {"w": torch.full((3,), VALUE)}, host=host or None)
    address, port, meta = sender.get_weight_sync_info()
    tell("meets", address=address, port=port, meta=meta)
    await sender.setup_weight_sync_group(address, port, 2, "group", 60.0, 0)
    await sender.send(1)
    await sender.teardown_weight_sync_group()
    tell("done")


async def receive(address: str, port: str, meta: str) -> None:
    """Its explorer."""
    receiver = WeightReceiver()
    await receiver.set_state_dict_meta([(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(meta)])
    await receiver.setup_weight_sync_group(address, int(port), 2, "group", 60.0, 1)
    state = await receiver.receive(1)
    await receiver.teardown_weight_sync_group()
    tell("received", w=state["w"].tolist())


async def defaults() -> None:
    """Two peers that listen where they do without the option."""

    def work() -> None:
        with BlockingPeer({"w": torch.zeros(2)}, run_id="run", group_size=2) as first:
            tell("listens", endpoint=first.endpoint)
            with BlockingPeer({"w": torch.ones(2)}, run_id="run", group_size=2, join=[first.endpoint]) as second:
                tell("joined", endpoint=second.endpoint)

    await asyncio.to_thread(work)


PARTS: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "publish": publish,
    "send": send,
    "receive": receive,
    "defaults": defaults,
}

if __name__ == "__main__":
    asyncio.run(PARTS[sys.argv[1]](*sys.argv[2:]))
