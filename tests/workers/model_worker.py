"""A model worker in a process of its own, which can be made to hang in a step; or the master of such workers.

Run as `python -m tests.workers.model_worker '{"name": "a0", "model": "actor", …}'`, or with `{"endpoints": …}` as
the master. It prints JSON lines.
"""

import json
import logging
import sys
import threading
from typing import Any

import torch

from averaging.errors import WorkerError
from averaging.rl.workers import MasterWorker, Model, ModelWorker, Plan, SampleBatch
from tests.workers.backends import Actor, Log, Reward, dataset, ppo

LOCK = threading.Lock()


def tell(event: str, **what: Any) -> None:
    with LOCK:
        print(json.dumps({"event": event, **what}), flush=True)


class HangingActor(Actor):
    """Does not return from `generate` in the step `hang_at`."""

    hang_at = 0

    def generate(self, batch: SampleBatch, step: int) -> dict[str, list[torch.Tensor]]:
        tell("generate", step=step, samples=list(batch.ids))
        if step == self.hang_at:
            threading.Event().wait()
        return super().generate(batch, step)

    def train_step(self, batch: SampleBatch, step: int) -> dict[str, float]:
        tell("train_step", step=step, samples=list(batch.ids))
        return super().train_step(batch, step) | {"weight": float(self.weight[0])}


def plan_of(endpoints: dict[str, str], **options: Any) -> Plan:
    """Actors a0, a1, … with the same parameters, and the reward r0."""
    actors = tuple(name for name in endpoints if name.startswith("a"))
    plan = ppo(endpoints, actors, ("r0",), **options)
    models = (Model("actor", actors, replicated=True), Model("reward", ("r0",)))
    return Plan(endpoints, models, plan.calls, plan.batch_size, plan.data_keys)


def run_worker(name: str, model: str, listen: str, hang_at: int = 0) -> None:
    log = Log()
    backend = HangingActor(name, log) if model == "actor" else Reward(name, log)
    if isinstance(backend, HangingActor):
        backend.hang_at = hang_at
    worker = ModelWorker(name, {model: backend}, listen=listen, dataset=dataset(400))
    worker.run(on_ready=lambda endpoint: tell("ready", endpoint=endpoint))


def run_master(endpoints: dict[str, str], steps: int) -> None:
    try:
        with MasterWorker(plan_of(endpoints), attach_timeout=20.0) as master:
            tell("attached")
            for result in master.run(steps):
                tell("step", step=result.step, samples=result.samples)
    except WorkerError as error:
        tell("refused", error=str(error))


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    options = json.loads(sys.argv[1])
    if "endpoints" in options:
        run_master(**options)
    else:
        run_worker(**options)


if __name__ == "__main__":
    main()
