"""One rank of a model that FSDP2 divides: it publishes its part, or follows its part.

Run as `python -m tests.weights.shard_worker '{"role": "publish", "endpoint": "127.0.0.1:7000"}'` with the variables
that torchrun sets. It obeys lines on stdin: the number of a version, `bias` and that number, or `die`. After `bias`
only the last layer's bias has changed. With the role `train` it trains until the global step of that number. It prints
JSON lines: `ready`, `published`, `has`.
"""

import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from averaging import DecentralizedAverager, DiLoCo, WeightFollower, WeightPublisher
from averaging.rpc import EventLoopThread, RpcServer
from tests.support.worker import tell


def model_of(seed: int) -> nn.Sequential:
    """With tensors whose rows 2 and 3 ranks divide unevenly, one of a single row, and a buffer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))


def divided(seed: int) -> nn.Sequential:
    """The model of this rank."""
    model = model_of(seed)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def whole(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).tolist() for name, one in state.items()}


def load(model: nn.Module, seed: int, only: str) -> None:
    """Gives the model the values of `model_of(seed)`; with `only` just those of its last tensor of that name."""
    values = model_of(seed).state_dict()
    with torch.no_grad():
        for name, one in model.state_dict().items():
            if only and name != f"2.{only}":
                continue
            if isinstance(one, DTensor):
                rows = values[name].chunk(dist.get_world_size())
                rank = dist.get_rank()
                if rank < len(rows):
                    one.to_local().copy_(rows[rank])
            else:
                one.copy_(values[name])


def publish(endpoint: str) -> None:
    model = divided(0)
    publisher = WeightPublisher(model, process_group=dist.group.WORLD, endpoint=endpoint)
    serving = EventLoopThread(RpcServer(endpoint, [publisher]), "the publisher")
    tell("ready", endpoint=endpoint)
    for line in sys.stdin:
        if line.strip() == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        *only, version = line.split()
        load(model, int(version), only[0] if only else "")
        tell("published", version=publisher.publish_now(version=int(version)), sent=publisher.bytes_sent)
    serving.close()


def follow(join: str) -> None:
    model = divided(0)
    with WeightFollower(model, join=[join], join_timeout=60.0) as weights:
        tell("ready")
        for line in sys.stdin:
            while weights.version != int(line):
                weights.update(timeout=60.0)
            tell("has", version=weights.version, weights=whole(model), received=weights.bytes_received)


def train() -> None:
    model = divided(0)
    publisher = WeightPublisher(model, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DecentralizedAverager(
        optimizer, run_id="run", strategy=DiLoCo(sync_every=1), process_group=dist.group.WORLD, services=[publisher]
    ) as opt:
        tell("ready", endpoint=opt.endpoint)
        for line in sys.stdin:
            while (opt.global_step or 0) < int(line):
                torch.manual_seed(opt.local_step)
                opt.zero_grad()
                torch.autograd.backward(model(torch.randn(4, 6)).square().mean())
                opt.step()
            tell("published", version=publisher.version, weights=whole(model))


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if options["role"] == "publish":
        publish(options["endpoint"])
    elif options["role"] == "train":
        train()
    else:
        follow(options["join"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
