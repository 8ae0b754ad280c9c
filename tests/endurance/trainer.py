"""A process that trains in one of the runs: a peer, a client, or one rank of a site.

Its model is made so that gradients and parameters show what was averaged. `ledger` has two rows for each trainer of the
run; the gradient of a trainer's rows is (1, the mean number of its samples), so that their average times the samples of
the step says how many samples of that trainer are in it, and which. `body` is longer than a part, so that every reducer
has some of it, and all its elements have one gradient, which differs from trainer to trainer. The strategy `local`
trains the body alone, with one random value for all its elements.

Run as `python -m tests.endurance.trainer '{"slot": 0, "slots": 4, "life": 1, "run": …}'`. It prints JSON lines:

- `ready`: endpoint; `dropped`: the samples that were not averaged, as the peer takes over another state; `stepped`: a
  global step, with its receipt and what the average holds;
- `before`: value before a round of `local`; `round`: every receipt; `after`: the values after it;
- `wrong`: a check of this process itself has failed.
"""

from tests.endurance import hooked  # isort: skip  # before everything that reads the clock

import hashlib
import json
import os
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from averaging import DecentralizedAverager, GradientAveraging, LocalSGD, Receipt, WeightPublisher
from averaging.config import PeerConfig
from averaging.receipts import to_json
from averaging.rpc import RpcService

BODY = 20_000
"""Elements: 160 kB, which is ten parts."""

BATCH = 4
"""Samples that one rank gives to a step."""

LIFE = 1_000_000
"""Samples of one life of a trainer; those of the next have higher numbers."""

LOCAL_STEPS = 2

STEP_SECONDS = 0.4
"""What a training step takes without the averaging."""


def tell(event: str, **fields: Any) -> None:
    """Prints an event, with the time at which it happened: this clock is the same in all processes of a machine."""
    print(json.dumps({"event": event, "moment": time.monotonic(), **fields}), flush=True)


class Model(nn.Module):
    """See the module."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.ledger = nn.Parameter(torch.zeros(2 * slots, 2, dtype=torch.float64))
        self.body = nn.Parameter(torch.zeros(BODY, dtype=torch.float64))

    def forward(self, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        return (self.ledger * gradient).sum() + self.body.sum() * factor


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    """This rank's part of a tensor."""
    assert tensor is not None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class Trainer:
    """The training loop, and what it reports."""

    def __init__(self, options: dict[str, Any]) -> None:
        PeerConfig.part_size_bytes = 1 << 14
        self.options = options
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.model: nn.Module = Model(options["slots"])
        grouped: dict[str, Any] = {}
        if self.ranks > 1:
            dist.init_process_group("gloo")
            fully_shard(self.model, mesh=init_device_mesh("cpu", (self.ranks,)))
            grouped = {"process_group": dist.group.WORLD}
        self.parts = dict(self.model.named_parameters())
        inner = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.counts = options["strategy"] == "gradients"
        self.pending: tuple[int, int] | None = None
        self.receipt: Receipt | None = None
        self.average: dict[str, Any] | None = None
        services: list[RpcService] = [WeightPublisher(self.model)] if options.get("publishes") else []
        strategy = GradientAveraging(options["target"]) if self.counts else LocalSGD(LOCAL_STEPS)
        self.opt = DecentralizedAverager(
            inner,
            model=self.model,
            run_id=options["run"],
            strategy=strategy,
            services=services,
            on_round=self.note_round,
            **grouped,
            **options["averager"],
        )
        if self.counts:
            inner.register_step_pre_hook(self.note_average)
        else:
            inner.register_step_post_hook(self.note_before)

    def run(self) -> None:
        """Trains without end."""
        opt, rng = self.opt, random.Random(self.options["life"] * 100 + self.options["slot"])
        tell("ready", endpoint=opt.own_endpoint, site=opt.endpoint, step=opt.global_step)
        next_sample = self.options["life"] * LIFE
        while True:
            time.sleep(STEP_SECONDS)
            opt.zero_grad()
            mine = next_sample + self.rank * BATCH
            numbers = range(mine, mine + BATCH)
            self.backward(sum(numbers) / BATCH, rng.randrange(1000))
            if self.counts:
                last = next_sample + self.ranks * BATCH - 1
                self.pending = (self.pending or (next_sample, 0))[0], last
                self.step()
            else:
                opt.step()
                values = sorted(set(local(self.parts["body"]).tolist()))
                if (receipt := self.receipt) is not None:
                    self.receipt = None
                    tell("after", group=receipt.group_id.hex(), values=values[:8])
                local(self.parts["body"]).fill_(values[0])  # they differ where a reducer was dropped, and by rounding
            next_sample += self.ranks * BATCH

    def backward(self, mean_number: float, value: int) -> None:
        """Computes the gradients of one batch."""
        slot, slots = self.options["slot"], self.options["slots"]
        gradient = torch.zeros(2 * slots, 2, dtype=torch.float64)
        if self.counts:
            gradient[[slot, slots + slot]] = torch.tensor([1.0, mean_number], dtype=torch.float64)
            value = slot + 1
        self.model(gradient, float(value)).backward()

    def step(self) -> None:
        """Makes a step, and checks that the strategy holds exactly the samples that it was given."""
        before = self.history()
        self.average = None
        self.opt.step(batch_size=BATCH)
        first, last = self.pending or (0, -1)
        held = self.opt.strategy.samples
        if self.average is not None:
            self.pending = None
            receipt = to_json(self.receipt) if self.receipt is not None and self.receipt.averaged else None
            tell(
                "stepped",
                first=first,
                last=last,
                before=before,
                after=self.history(),
                digest=self.digest(),
                step=self.opt.global_step,
                receipt=receipt,
                **self.average,
            )
        elif held == 0:
            self.pending = None
            tell("dropped", first=first, last=last, step=self.opt.global_step)
        self.receipt = None
        expected = 0 if self.pending is None else last - first + 1
        if held != expected:
            tell("wrong", message=f"the strategy holds {held} samples, not {expected}")

    def note_average(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        """Notes the averaged gradients, before the step of the inner optimizer.

        After it has taken over a state, an averager also makes steps with gradients and a rate of zero.
        """
        if inner.param_groups[0]["lr"] == 0:
            return
        ledger, body = (local(self.parts[name].grad) for name in ("ledger", "body"))
        slots = self.options["slots"]
        copies = ledger.reshape(-1, slots, 2) if len(ledger) % slots == 0 else ledger[None]
        self.average = {"copies": copies.tolist(), "body": sorted(set(body.tolist()))[:16]}

    def note_before(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        """Notes the value that is averaged next, after the step of the inner optimizer."""
        if self.rank == 0 and inner.param_groups[0]["lr"] != 0:
            tell("before", value=local(self.parts["body"])[0].item())

    def note_round(self, receipt: Receipt) -> None:
        self.receipt = receipt
        if self.rank == 0:
            tell("round", receipt=to_json(receipt))

    def history(self) -> str:
        """The name of the state: peers with equal names must hold equal bytes."""
        history = self.opt.strategy.history
        return f"{history.origin.id[:8]}-{history.phase}"

    def digest(self) -> str:
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            found.update(local(parameter).numpy().tobytes())
        return found.hexdigest()[:16]


def main() -> None:
    hooked.obey()
    torch.set_num_threads(1)
    Trainer(json.loads(sys.argv[1])).run()


if __name__ == "__main__":
    main()
