"""A rank that trains with FSDP2, saves with torch.distributed.checkpoint and goes on; or loads and goes on from there.

Run by torchrun as `-m tests.averager.checkpoint_rank DIRECTORY save|load`. Rank 0 prints one line of JSON: the steps,
the parameters in the end, and what was not sent of its shard.
"""

import json
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from averaging import DecentralizedAverager, DiLoCo, DistributedCheckpoint

SAVED, FURTHER = 5, 4
"""Steps before the checkpoint, and after it; an outer step is made in every second one."""


def main(directory: str, action: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0 if action == "save" else 1)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    strategy = DiLoCo(sync_every=2, outer=outer, compression="top_k", decay=0.9)
    with DecentralizedAverager(
        inner, model=model, run_id="run", strategy=strategy, process_group=dist.group.WORLD
    ) as opt:

        def step() -> None:
            torch.manual_seed(100 * opt.local_step + dist.get_rank())
            opt.zero_grad()
            torch.autograd.backward(model(torch.randn(8, 4)).square().mean())
            opt.step()

        state = {"training": DistributedCheckpoint(model, opt)}
        if action == "save":
            strategy.load_own({name: torch.randn(tensor.shape) for name, tensor in strategy._anchors.items()})
            for _ in range(SAVED):
                step()
            save(state, checkpoint_id=directory)
        else:
            load(state, checkpoint_id=directory)
        begun = opt.local_step, opt.global_step
        for _ in range(FURTHER):
            step()
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
        if dist.get_rank() == 0:
            values = [one.double().flatten().tolist() for one in whole]
            unsent = {name: tensor.tolist() for name, tensor in strategy.own_state().items()}
            steps = {"begun": begun, "local": opt.local_step, "global": opt.global_step}
            print(json.dumps({**steps, "values": values, "unsent": unsent}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
