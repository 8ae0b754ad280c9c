"""A site that learns a sine with the others of its run: put your own training in its place.

    torchrun … train.py peer.toml

All processes of a torchrun job are one peer. The first site saves a checkpoint in the directory $CHECKPOINT every now
and then, and when the job is warned; after a requeue all sites begin with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from averaging import ClosedError, DecentralizedAverager, DistributedCheckpoint, LocalSGD, PeerConfig

STEPS = int(os.environ.get("STEPS", "1000000"))
SAVE_EVERY = 500
WARNED: list[int] = []


def save(state: dict[str, Any], directory: Path) -> None:
    """Replaces the checkpoint. All ranks of the site call it; a job that is killed meanwhile leaves the old one."""
    fresh = directory.with_suffix(".new")
    dcp.save(state, checkpoint_id=str(fresh))
    if dist.get_rank() == 0:
        old = directory.with_suffix(".old")
        shutil.rmtree(old, ignore_errors=True)
        if directory.exists():
            directory.rename(old)
        fresh.rename(directory)
    dist.barrier()


def newest(directory: Path) -> Path | None:
    """The checkpoint, or the one before if the job was killed while it was replaced."""
    return next((path for path in (directory, directory.with_suffix(".old")) if path.exists()), None)


def is_last(step: int) -> bool:
    """Whether training ends here. All ranks decide alike: a rank that went on would wait for the others for ever."""
    warned = torch.tensor([float(bool(WARNED))])
    dist.all_reduce(warned, op=dist.ReduceOp.MAX)
    return bool(warned) or step >= STEPS


def others_of(opt: DecentralizedAverager) -> int:
    """The number of other sites; 0 once this one has left."""
    try:
        return len(opt.peers) - 1
    except ClosedError:
        return 0


def train(config: PeerConfig, directory: Path, *, saves: bool) -> None:
    """Trains to the last step, or until the job is warned."""
    # Before the averager, which calls this handler when it has left the run.
    signal.signal(signal.SIGUSR1, lambda number, _: WARNED.append(number))
    dist.init_process_group("gloo")
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with DecentralizedAverager(
        adamw,
        model=model,
        config=config,
        strategy=LocalSGD(sync_every=50),
        process_group=dist.group.WORLD,
    ) as opt:
        state = {"training": DistributedCheckpoint(model, opt)}
        if (checkpoint := newest(directory)) is not None and opt.local_step == 0:  # else other sites have gone on
            dcp.load(state, checkpoint_id=str(checkpoint))
        ddp = DistributedDataParallel(model)  # after the averager, which may have taken over the run's state
        leads = dist.get_rank() == 0
        if leads:
            print(f"{opt.endpoint} trains from step {opt.local_step}", flush=True)
        while not is_last(opt.local_step):
            x = 8 * torch.rand(64, 1) - 4
            loss = torch.nn.functional.mse_loss(ddp(x), torch.sin(x))
            opt.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            opt.step()
            if opt.local_step % 100 == 0:
                text = f"step {opt.local_step}: loss {loss.item():.4f}, {others_of(opt)} other sites"
                if leads:
                    print(text, flush=True)
            if saves and opt.local_step % SAVE_EVERY == 0:
                save(state, directory)
            time.sleep(0.01)  # a larger model takes longer for its step
        if saves:
            save(state, directory)
        if leads:
            print(f"ends at step {opt.local_step}{', warned' if WARNED else ''}", flush=True)
        if not WARNED:
            print(opt.finish(), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    first = os.environ.get("SITE", "0") == "0"
    train(PeerConfig.from_toml(sys.argv[1]), Path(os.environ.get("CHECKPOINT", "checkpoint")), saves=first)
