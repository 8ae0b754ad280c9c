"""A worker of torchrun that checkpoints: it sums ones over gloo step by step, and tells each step as a line of JSON.

It ends when there is a file named `stop` beside the checkpoint, or after so many steps. Arguments: the checkpoint, the
number of steps, and the seconds of one step.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def tell(event: str, **fields: Any) -> None:
    # In one write: the workers of a node share its stdout.
    os.write(1, (json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n").encode())


def train(checkpoint: str, steps: int, pace: float) -> int:
    """Returns the step at which it ended."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world, path = dist.get_rank(), dist.get_world_size(), Path(checkpoint)
    step = int(path.read_text()) if path.exists() else 0
    names = ("LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    told = {name: int(os.environ[name]) for name in names}
    restarts, most = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    run_id = os.environ["TORCHELASTIC_RUN_ID"]
    tell("start", rank=rank, world=world, step=step, restarts=restarts, most=most, run_id=run_id, **told)
    while step < steps:
        # What rank 0 sees all must know: whether to stop.
        sums = torch.tensor([1.0, float(rank == 0 and path.with_name("stop").exists())])
        dist.all_reduce(sums)
        if int(sums[0]) != world:
            raise RuntimeError(f"{int(sums[0])} ones in a world of {world}")
        if sums[1]:
            break
        step += 1
        if rank == 0:
            fresh = path.with_suffix(".new")
            fresh.write_text(str(step))
            fresh.replace(path)
        tell("step", rank=rank, world=world, step=step)
        time.sleep(pace)
    tell("end", rank=rank, world=world, step=step)
    dist.destroy_process_group()
    return step


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
