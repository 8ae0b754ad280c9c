"""A peer in a process of its own that trains what a `RunSampler` deals to it.

Run as `python -m tests.data.data_worker JSON`. It prints `imported` and waits for a line; then `ready`, `trained`
with the samples after each step, `done` with the statistics, and `finished`. After step `pause_after` it waits for a
line.
"""

import json
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from averaging import DecentralizedAverager, LocalSGD
from averaging.data import RunSampler
from tests.support.training import backward, batch_of, model_of
from tests.support.worker import tell


class Numbers(Dataset[int]):
    """Samples that are their own indices."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    tell("imported")
    sys.stdin.readline()
    model: torch.nn.Module = model_of(0)
    group: dict[str, Any] = {}
    if options.get("ranks", 1) > 1:
        store, rank = f"file://{options['store']}", options["rank"]
        dist.init_process_group("gloo", store, rank=rank, world_size=options["ranks"])
        model, group = DistributedDataParallel(model), {"process_group": dist.group.WORLD}
    numbers, batch = Numbers(options["length"]), options["batch"]
    with DecentralizedAverager(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model=model,
        run_id="run",
        strategy=LocalSGD(20),
        listen=options["listen"],
        join=options.get("join", []),
        group_wait=2.0,
        **group,
    ) as opt:
        sampler = RunSampler(numbers, opt, block_size=options["block"])
        loader = DataLoader(numbers, batch_size=batch, sampler=sampler, num_workers=options.get("workers", 0))
        tell("ready", epoch=sampler.epoch, together=opt.wait_for_peers(options["peers"], 60.0))
        for epoch in sampler.epochs(options["epochs"]):
            for samples in loader:
                backward(model, batch_of(int(samples[0]), len(samples)))
                opt.step(batch_size=len(samples))
                tell("trained", epoch=epoch, samples=samples.tolist())
                time.sleep(options["seconds"])  # computes, while the others go on
                if opt.local_step == options.get("pause_after"):
                    sys.stdin.readline()
        tell("done", **asdict(sampler.statistics))
        finish = opt.finish()
        tell("finished", digest=finish.digest, text=str(finish))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
