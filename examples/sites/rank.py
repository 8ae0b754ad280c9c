"""One process of a site, which torchrun starts for `examples.sites`: it trains a part of a divided model.

The two processes of a node hold the model in two shards (FSDP2). A second node holds it once more (HSDP), so a site
that loses a node goes on with the same shards.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from averaging import DecentralizedAverager, DiLoCo
from examples.digits import Digits

SHARDS, SITES = 2, 2
"""Shards of the model, which are the processes of a node; and sites."""

BATCH = 64
"""Samples of a site in one step, over all of its processes."""

PACE = 0.2
"""Seconds that a step takes at least: as if the model were larger, so that a restart is seen in the curves."""


def model_of(seed: int) -> nn.Sequential:
    """A classifier of images of 8 x 8 pixels."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def data_of(digits: Digits, site: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a site has to learn from: the first one has the digits below 5, the second one the others."""
    own = (digits.labels >= 5) == bool(site)
    return digits.images[own], digits.labels[own]


def batch_of(data: tuple[torch.Tensor, torch.Tensor], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random batch of a site."""
    images, labels = data
    chosen = torch.randint(len(labels), (BATCH,), generator=torch.Generator().manual_seed(seed))
    return images[chosen], labels[chosen]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The inner optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def main(arguments: list[str]) -> None:
    """Trains until the site has made its steps."""
    directory, number, listen, join, steps = Path(arguments[0]), int(arguments[1]), *arguments[2:4], int(arguments[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = Digits.load()
    data = data_of(digits, number)
    model = model_of(0)
    mesh = init_device_mesh("cpu", (size // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = DecentralizedAverager(
        optimizer_of(model),
        model=model,
        run_id="sites",
        listen=listen,
        join=[listen, join],  # whichever is there
        strategy=DiLoCo(sync_every=10, outer=partial(torch.optim.SGD, lr=0.8, momentum=0.3, nesterov=True)),
        process_group=dist.group.WORLD,
        group_wait=60.0,
    )
    whole = model_of(0)
    with opt, (directory / f"site-{number + 1}.jsonl").open("a", buffering=1) as events:

        def report(event: str, **values: object) -> None:
            if rank == 0:
                events.write(json.dumps({"at": time.time(), "event": event, "processes": size} | values) + "\n")

        def accuracy() -> float:
            whole.load_state_dict(
                {n: one.full_tensor() if isinstance(one, DTensor) else one for n, one in model.state_dict().items()}
            )
            return digits.accuracy(whole)

        report("start", step=opt.local_step)
        if opt.local_step == 0:
            opt.wait_for_peers(SITES, 60.0)
        while opt.local_step < steps:
            began = time.monotonic()
            images, labels = (part.chunk(size)[rank] for part in batch_of(data, steps * number + opt.local_step))
            opt.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            torch.autograd.backward(loss)
            opt.step()
            if opt.local_step % 10 == 0:
                receipt = opt.last_receipt
                others = len(receipt.members) - 1 if receipt is not None and receipt.averaged else 0
                report("step", step=opt.local_step, accuracy=accuracy(), others=others)
            time.sleep(max(0.0, began + PACE - time.monotonic()))
        finish = opt.finish(60.0)
        report("done", step=opt.local_step, accuracy=accuracy(), digest=finish.digest, text=str(finish))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
