"""One rank of a site that trains with a strategy, and can be made to die at a named moment.

Run as `python -m tests.integration.site_worker '{"strategy": "diloco", "inside": "ddp", "steps": 6, ...}'` with the
variables that torchrun sets, or without them as a peer of one process, which trains the batches of `ranks` ranks. It
prints JSON lines: `ready`, `step` after each step with a digest of the model, `done` with the whole model.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from averaging import DecentralizedAverager, DiLoCo, GradientAveraging, LocalSGD, Strategy
from tests.integration.training import batch_of

SAMPLES = 4
"""Samples in the batch of one rank."""


def report(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def model_of(seed: int) -> nn.Sequential:
    """A network whose parameters 2 and 4 ranks can divide."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(torch.float64)


def strategy_of(name: str, ranks: int, sites: int) -> Strategy:
    """The strategies, with two steps between the rounds of those that make local steps."""
    return {
        "diloco": lambda: DiLoCo(2),
        "streaming": lambda: DiLoCo(4, fragments=2, delay=1, alpha=0.5),
        "clipped": lambda: DiLoCo(2, max_norm=0.05),
        "local": lambda: LocalSGD(2),
        "statistics": lambda: LocalSGD(2, statistics=True),
        "overlap": lambda: LocalSGD(2, overlap=True),
        "gradients": lambda: GradientAveraging(ranks * sites * SAMPLES),
    }[name]()


def divided(model: nn.Module, inside: str) -> nn.Module:
    """The model as the ranks train it."""
    match inside:
        case "ddp":
            return DistributedDataParallel(model)  # type: ignore[no-untyped-call]
        case "fsdp" | "hsdp":
            size = dist.get_world_size()
            mesh = init_device_mesh("cpu", (2, size // 2) if inside == "hsdp" else (size,))
            for layer in model.children():
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def local_digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        part = parameter.detach()
        found.update((part.to_local() if isinstance(part, DTensor) else part).numpy().tobytes())
    return found.hexdigest()[:16]


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", 0)), options.get("ranks", int(os.environ.get("WORLD_SIZE", 1)))
    inside, sites = options.get("inside", ""), options.get("sites", 2)
    grouped: dict[str, Any] = {}
    if inside:
        dist.init_process_group("gloo")
        grouped = {"process_group": dist.group.WORLD}
    plain = model_of(options.get("seed", 0))
    model = divided(plain, inside)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: list[str] = []
    opt = DecentralizedAverager(
        optimizer,
        run_id="run",
        strategy=strategy_of(options["strategy"], ranks, sites),
        join=options.get("join", []),
        group_wait=options.get("group_wait", 30.0),
        stall_timeout=5.0,
        on_round=lambda receipt: seen.append(f"{receipt.outcome.value} {receipt.group_id.hex()[:8]}"),
        **grouped,
        **options.get("options", {}),
    )
    report("ready", rank=rank, endpoint=opt.endpoint, local_step=opt.local_step, global_step=opt.global_step)
    if sites > 1:
        assert opt.wait_for_peers(sites, 100.0)
    for step in range(opt.local_step, options["steps"]):
        if options.get("death") == "before the round" and rank == options["dies"] and step == options["at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        model.zero_grad()
        mine = [rank] if inside else range(ranks)
        batches = [batch_of(options["number"] * 1000 + 100 * step + one, SAMPLES, torch.float64) for one in mine]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        (model(inputs) - targets).pow(2).mean().backward()
        opt.step(batch_size=len(inputs))
        report("step", rank=rank, step=opt.local_step, global_step=opt.global_step, digest=local_digest(model))
    finish = opt.finish(30.0) if options.get("finish", True) else None
    status = str(opt.status.peers), opt.status.local_step, opt.status.peer.rounds, opt.model_version
    weights = [whole(parameter).flatten().tolist() for parameter in model.parameters()]
    report(
        "done", rank=rank, weights=weights, rounds=seen, status=status, alike=finish and finish.alike, text=str(finish)
    )
    opt.close()
    if inside:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
