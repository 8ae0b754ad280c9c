"""One rank of a site that trains with a strategy, and can be made to die at a named moment.

Run as `python -m tests.support.site_worker '{"strategy": "diloco", "inside": "ddp", "steps": 6, ...}'` with the
variables that torchrun sets, or without them as a peer of one process, which trains the batches of `ranks` ranks. It
prints JSON lines: `ready`, `step` after each step with a digest of the model, `done` with the whole model.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from averaging import DecentralizedAverager, DiLoCo, GradientAveraging, LocalSGD, Strategy
from averaging.common.event_loop_thread import EventLoopThread
from averaging.training.history import Others
from averaging.training.takeover import PendingRound
from averaging.training.training_state import TrainingState
from tests.support.conservation import TrainingLedger
from tests.support.trainer import die
from tests.support.training import batch_of
from tests.support.worker import FatalTransport, tell

SAMPLES = 4
"""Samples in the batch of one rank."""


class PatientGradients(GradientAveraging):
    """Waits for the other sites in each step, so that every batch is made of the same parts whoever is faster."""

    @property
    def _batch_began(self) -> float:
        """So long ago that only `group_wait` bounds the wait."""
        return 0.0

    @_batch_began.setter
    def _batch_began(self, _: float) -> None: ...

    def _is_worth_waiting(self, others: Others) -> bool:
        return not self._is_complete(others)


def model_of(seed: int) -> nn.Sequential:
    """A network whose parameters 2 and 4 ranks can divide."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(torch.float64)


def strategy_of(name: str, ranks: int, sites: int) -> Strategy:
    """The strategies, with two steps between the rounds of those that make local steps."""
    made: dict[str, Callable[[], Strategy]] = {
        "diloco": lambda: DiLoCo(2),
        "streaming": lambda: DiLoCo(4, fragments=2, delay=1, alpha=0.5),
        "clipped": lambda: DiLoCo(2, max_norm=0.05),
        "top_k": lambda: DiLoCo(2, compression="top_k", density=1 / 8, decay=1.0),
        "local": lambda: LocalSGD(2),
        "statistics": lambda: LocalSGD(2, statistics=True),
        "seldom": lambda: LocalSGD(2, statistics=True, statistics_every=(2, 3)),
        "overlap": lambda: LocalSGD(2, overlap=True),
        "gradients": lambda: PatientGradients(ranks * sites * SAMPLES),
    }
    return made[name]()


def divided(model: nn.Module, inside: str, device: str = "cpu") -> nn.Module:
    """The model as the ranks train it."""
    match inside:
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp" | "hsdp":
            size = dist.get_world_size()
            shape, names = ((2, size // 2), ("replicate", "shard")) if inside == "hsdp" else ((size,), ("shard",))
            mesh = init_device_mesh(device, shape, mesh_dim_names=names)
            for layer in model.children():
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if tensor.device.type == "cpu" or dist.get_backend() == "nccl":
        return tensor.full_tensor()
    # Over gloo, full_tensor() of what is on a GPU ends the process in torch 2.11.
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor.to_local().detach().cpu())
    return torch.cat(parts)


def local_digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        part = parameter.detach()
        found.update((part.to_local() if isinstance(part, DTensor) else part).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def contains(endpoint: str, announcements: dict[str, bytes]) -> bool:
    return endpoint in announcements


def doomed(death: str, at: int) -> dict[str, Any]:
    """Prepares the death of this rank; returns options of its averager."""
    match death:
        case "in the round":
            return {
                "transport": FatalTransport(
                    "127.0.0.1:0", None, max_message_bytes=64 << 20, fatal_step="sending", after=at // 3
                )
            }
        case "before adopting":
            decide, rounds = PendingRound.decide, count()

            def decide_or_die(pending: PendingRound, thread: EventLoopThread, reason: str) -> None:
                if next(rounds) == at // 2:
                    die()
                decide(pending, thread, reason)

            PendingRound.decide = decide_or_die  # type: ignore[method-assign, assignment]
        case "in the download":
            TrainingState.check = die  # type: ignore[method-assign, assignment]
    return {}


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", 0)), options.get("ranks", int(os.environ.get("WORLD_SIZE", 1)))
    inside, sites = options.get("inside", ""), options.get("sites", 2)
    grouped: dict[str, Any] = {}
    if inside:
        dist.init_process_group(options.get("backend", "gloo"))
        grouped = {"process_group": dist.group.WORLD}
    device = options.get("device", "cpu")  # ranks on a GPU share the first one
    plain = model_of(options.get("seed", 0)).to(device)
    model = divided(plain, inside, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: list[str] = []
    if options.get("dies") == rank:
        grouped |= doomed(options["death"], options["at"])
    opt = DecentralizedAverager(
        optimizer,
        model=model,
        run_id="run",
        strategy=strategy_of(options["strategy"], ranks, sites),
        join=options.get("join", []),
        group_wait=options.get("group_wait", 30.0),
        stall_timeout=5.0,
        on_round=lambda receipt: seen.append(f"{receipt.outcome.value} {receipt.group_id.hex()[:8]} {receipt.reason}"),
        **grouped,
        **options.get("options", {}),
    )
    ledger = TrainingLedger(opt) if options["strategy"] == "top_k" and opt._site.owns else None
    tell("ready", rank=rank, endpoint=opt.endpoint, local_step=opt.local_step, global_step=opt.global_step)
    if sites > 1:
        assert opt.wait_for_peers(sites, 100.0)
    rounds = 0
    while (step := opt.local_step) < options["steps"]:
        if options.get("death") == "before the round" and rank == options["dies"] and step == options["at"]:
            die()
        if step == options.get("hold"):
            tell("held")
            joined = opt._training.site.broadcast_from_leader(lambda: sys.stdin.readline().strip())
            assert joined in opt._training.announcements.wait_for(partial(contains, joined), 100.0)
            opt._training.announcements.refresh()
            options["hold"] = None
        model.zero_grad()
        mine = [rank] if inside else range(ranks)
        batches = [batch_of(options["number"] * 1000 + 100 * step + one, SAMPLES, torch.float64) for one in mine]
        inputs, targets = (torch.cat(parts).to(device) for parts in zip(*batches, strict=True))
        (model(inputs) - targets).pow(2).mean().backward()
        opt.step(batch_size=len(inputs))
        averaged = seen[-1] if len(seen) > rounds and seen[-1].startswith("averaged") else ""
        rounds = len(seen)
        tell("step", rank=rank, step=opt.local_step, averaged=averaged, digest=local_digest(model))
    finish = opt.finish(30.0) if options.get("finish", True) else None
    status = str(opt.status.peers), opt.status.local_step, opt.status.peer.rounds, opt.model_version
    weights = [whole(parameter).flatten().tolist() for parameter in model.parameters()]
    tell(
        "done",
        rank=rank,
        weights=weights,
        rounds=seen,
        status=status,
        alike=finish and finish.alike,
        text=str(finish),
        lost=ledger.error() if ledger else 0.0,
    )
    opt.close()
    if inside:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
