"""A peer in a process of its own that trains with a strategy. It can be made to die at a named moment, or to leave.

Run as `python -m tests.support.trainer '{"strategy": "gradients", …}'`, see `main`. It prints JSON lines: `ready`, then
what its `way` says:

- `commanded` waits for a line, trains to a global step, prints `step` after each with a digest of the model, then
  `done`, and serves until another line comes;
- `until ended` trains until it gets a signal, and prints `round` for each receipt, and if it handles SIGTERM itself
  `handled`, and `left` when it has ended its loop.
"""

import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from averaging import DecentralizedAverager, DiLoCo, GradientAveraging, LocalSGD, Receipt
from averaging.discovery.gossip.gossip_discovery import GossipDiscovery
from averaging.discovery.gossip.membership import GossipSettings
from averaging.training import StrategyContext
from averaging.transport import Transport
from tests.support.conservation import TrainingLedger
from tests.support.training import FOR_EVER, backward, batch_of, model_of
from tests.support.worker import FatalTransport, tell

BATCH = 4


def die(*_: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


def digest(tensors: Iterable[torch.Tensor]) -> str:
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


def patient(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a peer that waits for one that has gone without end: for a group, and until its record expires."""

    def discovery(endpoint: str, transport: Transport) -> GossipDiscovery:
        settings = GossipSettings(peer_lifetime=FOR_EVER)
        return GossipDiscovery("run", endpoint, transport, join=options.get("join", []), settings=settings)

    return {"discovery": discovery, "group_wait": FOR_EVER, "round_timeout": 2 * FOR_EVER}


def main(options: dict[str, Any]) -> None:
    """Trains.

    Args:
        options: `strategy`, `way`, `number` and `seed` of this peer, `steps`, `peers` to wait for, `join`; `death` at
            step `at`; `every`, the steps between two rounds; `patient`; `options` of the averager.
    """
    torch.set_num_threads(1)
    handled: list[int] = []

    def handle(number: int, _: object) -> None:
        handled.append(number)
        tell("handled")

    if options.get("handles"):
        signal.signal(signal.SIGTERM, handle)
    model, every = model_of(options.get("seed", 0)), options.get("every", 3)
    death, at = options.get("death"), options.get("at", 2)
    top_k = MortalDiLoCo(every, compression="top_k", density=1 / 8, decay=1.0)
    strategies = {
        "gradients": MortalGradients(3 * BATCH),
        "diloco": MortalDiLoCo(every),
        "local": LocalSGD(every),
        "top_k": top_k,
    }
    strategy = strategies[options["strategy"]]
    if isinstance(strategy, _Mortal):
        strategy.dies_at = at if death == "between round and step" else None
    more: dict[str, Any] = {"group_wait": 3.0, "stall_timeout": 5.0} | options.get("options", {})
    if death == "in the round":
        fatal: dict[str, Any] = {"fatal_step": "sending", "after": at * 2}
        more["transport"] = FatalTransport("127.0.0.1:0", None, max_message_bytes=64 << 20, **fatal)
    more |= patient(options) if options.get("patient") else {"join": options.get("join", [])}
    if options.get("publishes"):
        from averaging import WeightPublisher  # the core has none

        more["services"] = [WeightPublisher(model)]
    opt = DecentralizedAverager(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        model=model,
        strategy=strategy,
        **{"run_id": "run", "on_round": tell_round, **more},
    )
    ledger = TrainingLedger(opt) if strategy is top_k else None
    where = {"endpoint": opt.endpoint, "metrics": opt.metrics_endpoint}
    tell("ready", **where, global_step=opt.global_step, loss=loss_of(model))
    match options.get("way"):
        case "until ended":
            train_until_ended(opt, model, options, handled)
        case _:
            train_as_commanded(opt, model, options, ledger)


def tell_round(receipt: Receipt) -> None:
    dropped = [str(each) for each in receipt.dropped]
    tell("round", members=receipt.members, outcome=receipt.outcome, left=receipt.left, dropped=dropped)


def train_as_commanded(
    opt: DecentralizedAverager, model: torch.nn.Module, options: dict[str, Any], ledger: TrainingLedger | None
) -> None:
    sys.stdin.readline()
    opt.wait_for_peers(options.get("peers", 1), 60.0)
    drawn, reported = 0, opt.global_step
    while (opt.global_step or 0) < options["steps"]:
        if options.get("death") == "before the round" and opt.global_step == options.get("at", 2):
            die()
        backward(model, batch_of(options["number"] * 1000 + drawn, BATCH))
        drawn += 1
        opt.step(batch_size=BATCH)
        if opt.global_step != reported:
            reported = opt.global_step
            anchors = opt.state_dict()["averaging"]["strategy"]["tensors"]
            shown = [tensor for name, tensor in anchors.items() if name.startswith("anchor/")]
            members = len(opt.last_receipt.members) if opt.last_receipt else 1
            tell("step", step=reported, digest=digest(shown or model.parameters()), members=members)
            if reported == options.get("pauses_at"):
                sys.stdin.readline()
                opt.wait_for_peers(options["peers"], 60.0)
    tell("done", step=opt.global_step, loss=loss_of(model), lost=ledger.error() if ledger else 0.0)
    sys.stdin.readline()
    opt.close()


def train_until_ended(
    opt: DecentralizedAverager, model: torch.nn.Module, options: dict[str, Any], handled: list[int]
) -> None:
    opt.wait_for_peers(options["peers"], 60.0)
    for drawn in itertools.count():
        last = bool(handled)
        before = opt.local_step
        backward(model, batch_of(drawn, BATCH))
        opt.step(batch_size=BATCH)
        if last:
            break
        time.sleep(options.get("seconds", 0.0))
    finish = opt.finish()
    opt.close()
    tell("left", steps=opt.local_step - before, finish=str(finish))


def loss_of(model: torch.nn.Module) -> float:
    """The loss on batches on which nobody trains."""
    with torch.no_grad():
        batches = [batch_of(-1 - seed, 64) for seed in range(8)]
        return sum(float((model(inputs) - targets).pow(2).mean()) for inputs, targets in batches) / len(batches)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
