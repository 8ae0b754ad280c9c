"""A peer in a process of its own that trains with a strategy, and can be made to die at a named moment.

Run as `python -m tests.support.strategy_worker '{"strategy": "gradients", "steps": 6, ...}'`. It prints JSON lines:
`ready`, `step` after each global step with a digest of the model, `done`; then it serves until stdin ends. With
`together` it neither waits for a line to begin nor serves at the end: it waits for the others, trains, and finishes.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from functools import partial
from typing import Any, NoReturn

import torch

from averaging import DecentralizedAverager, DiLoCo, GradientAveraging, LocalSGD, Mode, Receipt
from averaging.training import StrategyContext
from tests.support.conservation import TrainingLedger
from tests.support.training import backward, batch_of, model_of
from tests.support.worker import FatalTransport

BATCH = 4


def report(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


class _Mortal:
    """Mixed into a strategy: dies between a round and the step with its result."""

    dies_at: int | None = None

    def _advance(self, training: StrategyContext, receipt: Receipt | None, samples: float) -> None:
        if self.dies_at is not None and self.history.step == self.dies_at:  # type: ignore[attr-defined]
            die()
        super()._advance(training, receipt, samples)  # type: ignore[misc]


class MortalGradients(_Mortal, GradientAveraging):
    pass


class MortalDiLoCo(_Mortal, DiLoCo):
    pass


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    model = model_of(options.get("seed", 0))
    death, at = options.get("death"), options.get("at", 2)
    top_k = MortalDiLoCo(3, compression="top_k", density=1 / 8, decay=1.0)
    strategies = {
        "gradients": MortalGradients(3 * BATCH),
        "diloco": MortalDiLoCo(3),
        "local": LocalSGD(3),
        "top_k": top_k,
    }
    strategy = strategies[options["strategy"]]
    if isinstance(strategy, _Mortal):
        strategy.dies_at = at if death == "between round and step" else None
    transport = FatalTransport(
        options.get("listen", "127.0.0.1:0"),
        None,
        max_message_bytes=64 << 20,
        fatal_step="sending" if death == "in the round" else "",
        after=at * 2,
    )
    opt = DecentralizedAverager(
        partial(torch.optim.AdamW, lr=0.01)(model.parameters()),
        model=model,
        run_id="run",
        strategy=strategy,
        join=options.get("join", []),
        transport=transport,
        group_wait=options.get("group_wait", 3.0),
        stall_timeout=5.0,
        receipts=options.get("receipts"),
        mode=options.get("mode", Mode.NODE),
    )
    ledger = TrainingLedger(opt) if strategy is top_k else None
    report("ready", endpoint=opt.endpoint, global_step=opt.global_step, loss=loss_of(model))
    if options.get("together"):
        train_together(opt, model, options)
        return
    sys.stdin.readline()
    opt.wait_for_peers(options.get("peers", 1), 60.0)
    drawn, reported = 0, opt.global_step
    while (opt.global_step or 0) < options["steps"]:
        if death == "before the round" and opt.global_step == at:
            die()
        backward(model, batch_of(options["number"] * 1000 + drawn, BATCH))
        drawn += 1
        opt.step(batch_size=BATCH)
        if opt.global_step != reported:
            reported = opt.global_step
            anchors = opt.state_dict()["averaging"]["strategy"]["tensors"]
            shown = [tensor for name, tensor in anchors.items() if name.startswith("anchor/")]
            members = len(opt.last_receipt.members) if opt.last_receipt else 1
            report("step", step=reported, digest=digest(shown or list(model.parameters())), members=members)
            if reported == options.get("pauses_at"):
                sys.stdin.readline()
                opt.wait_for_peers(options["peers"], 60.0)
    report("done", step=opt.global_step, loss=loss_of(model), lost=ledger.error() if ledger else 0.0)
    sys.stdin.readline()
    opt.close()


def loss_of(model: torch.nn.Module) -> float:
    """The loss on batches on which nobody trains."""
    with torch.no_grad():
        batches = [batch_of(-1 - seed, 64) for seed in range(8)]
        return sum(float((model(inputs) - targets).pow(2).mean()) for inputs, targets in batches) / len(batches)


def train_together(opt: DecentralizedAverager, model: torch.nn.Module, options: dict[str, Any]) -> None:
    """Waits for the other peers, makes local steps, and finishes together with them."""
    with opt:
        report("found", peers=opt.wait_for_peers(options["peers"], 60.0), digest=digest(list(model.parameters())))
        for drawn in range(options["steps"]):
            backward(model, batch_of(options["number"] * 1000 + drawn, BATCH))
            opt.step(batch_size=BATCH)
        finish = opt.finish()
        report("finished", alike=finish.alike, text=str(finish), digest=digest(list(model.parameters())))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
