"""A peer that learns a sine with the others of its run, until it is stopped: put your own training in its place.

    python train.py peer.toml
    torchrun --nproc-per-node=2 … train.py peer.toml

The options are read from peer.toml and from variables such as AVERAGING_ADVERTISE, which win. All processes of a
torchrun job are one peer.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from averaging import DecentralizedAverager, LocalSGD, PeerConfig

STEPS = 1_000_000


def train(config: PeerConfig) -> None:
    """Trains to the last step. On SIGTERM the averager leaves its run, and the process ends."""
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    site: dict[str, Any] = {}
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        site = {"process_group": dist.group.WORLD}
    with DecentralizedAverager(adamw, model=model, config=config, strategy=LocalSGD(sync_every=50), **site) as opt:
        if site:
            model = DistributedDataParallel(model)  # after the averager, which may have taken over the run's state
        print(f"{opt.endpoint} trains from step {opt.local_step}", flush=True)
        while opt.local_step < STEPS:
            x = 8 * torch.rand(64, 1) - 4
            loss = torch.nn.functional.mse_loss(model(x), torch.sin(x))
            opt.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            opt.step()
            if opt.local_step % 500 == 0:
                print(f"step {opt.local_step}: loss {loss.item():.6f}, {len(opt.peers) - 1} other peers", flush=True)
            time.sleep(0.02)  # a larger model takes longer for its step
        print(opt.finish(), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    train(PeerConfig.from_toml(sys.argv[1]))
