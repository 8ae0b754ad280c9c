"""A rank that trains with FSDP2, saves with torch.distributed.checkpoint and goes on; or loads and goes on from there.

Run by torchrun as `-m tests.averager.checkpoint_rank STRATEGY MESH ACTION FROM TO`, with a mesh such as 4 or 2x2. The
ranks share each batch, so any number of them trains alike. Rank 0 prints one line of JSON: the steps, the samples, the
parameters in the end, and what was not sent.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from averaging import DecentralizedAverager, DiLoCo, DistributedCheckpoint, LocalSGD, Strategy
from averaging.data import RunSampler
from averaging.training.layout import as_divided
from tests.support.site_worker import whole

SAVED, FURTHER = 5, 3
"""Steps before the checkpoint, and after it; an outer step is made in every second one."""

BATCH = 8
"""Samples of all ranks in a step, and of a block of the sampler."""

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "local": lambda: LocalSGD(2),
    "diloco": lambda: DiLoCo(2),
    "adam": lambda: DiLoCo(2, outer=partial(torch.optim.Adam, lr=0.1), fragments=2),
    "top_k": lambda: DiLoCo(2, outer=NESTEROV, compression="top_k", decay=0.9),
}


def divided_model(mesh: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 8)).double()
    shape = tuple(map(int, mesh.split("x")))
    devices = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=devices)
    fully_shard(model, mesh=devices)
    return model


def main(strategy: str, mesh: str, action: str, source: str, target: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = divided_model(mesh, seed=int(action != "save"))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = STRATEGIES[strategy]()
    with DecentralizedAverager(
        inner, model=model, run_id="run", strategy=made, weight="samples", process_group=dist.group.WORLD
    ) as opt:
        sampler = RunSampler(BATCH * (SAVED + FURTHER), opt, block_size=BATCH, batch_size=BATCH // ranks)
        samples: list[list[int]] = []

        def train(steps: int) -> None:
            indices = iter(sampler)
            for _ in range(steps):
                samples.append([next(indices) for _ in range(BATCH // ranks)])
                generator = torch.Generator().manual_seed(opt.local_step)
                batch = torch.randn(BATCH, 4, generator=generator, dtype=torch.float64).chunk(ranks)[rank]
                opt.zero_grad()
                torch.autograd.backward(model(batch).square().mean())
                opt.step(batch_size=len(batch))

        state = {"training": DistributedCheckpoint(model, opt, sampler)}
        if action == "save":
            if isinstance(made, DiLoCo) and made.top_k:
                made.load_own({name: torch.randn(part.shape) for name, part in made._anchors.items()})
            train(SAVED)
            save(state, checkpoint_id=target)
        else:
            try:
                load(state, checkpoint_id=source)
            except CheckpointException as error:
                samples.append([-1])
                print(f"refused: {error}", file=sys.stderr, flush=True)
        begun = [opt.local_step, opt.global_step]
        waiting = sum(opt.site.all_gather(lambda: opt._training.weights.made))
        if action == "copy":
            save(state, checkpoint_id=target)
        elif samples[-1:] != [[-1]]:
            train(FURTHER)
        values = [whole(parameter).flatten().tolist() for parameter in model.parameters()]
        unsent: dict[str, Any] = {
            name: as_divided(t, opt._training.trained[name]) for name, t in made.own_state().items()
        }
        rests = {name: whole(tensor).flatten().tolist() for name, tensor in unsent.items()} if "x" not in mesh else {}
        of_ranks = opt.site.all_gather(lambda: samples)
        told = [[index for samples in of_ranks for index in samples[step]] for step in range(len(samples))]
        if rank == 0:
            steps = {"begun": begun, "local": opt.local_step, "global": opt.global_step, "samples": told}
            print(json.dumps({**steps, "waiting": waiting, "values": values, "unsent": rests}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
