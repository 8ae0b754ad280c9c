"""Backends of model workers whose results can be computed by hand, and the graph of PPO over them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from averaging.rl.workers import Backend, Call, ListDataset, Model, Plan, Sample, SampleBatch
from averaging.rl.workers.plan import Hook

PPO = ("actor_gen", "rew_inf", "actor_train")


def prompts(count: int, first: int = 0) -> list[Sample]:
    """Prompts of one to five tokens: sample n has tokens n, n + 1, …"""
    return [Sample(f"sample-{n}", {"prompt": torch.arange(n, n + 1 + n % 5)}) for n in range(first, first + count)]


def ppo(
    workers: dict[str, str],
    actors: Sequence[str],
    rewards: Sequence[str],
    batch_size: int = 8,
    train_hooks: tuple[Hook, ...] = (),
    models: tuple[Model, ...] = (),
    **options: Any,
) -> Plan:
    """actor_gen → rew_inf → actor_train."""
    return Plan(
        workers=workers,
        models=(Model("actor", tuple(actors)), Model("reward", tuple(rewards)), *models),
        calls=(
            Call("actor_train", "actor", "train_step", ("answer", "reward"), post_hooks=train_hooks),
            Call("rew_inf", "reward", "inference", ("answer",), ("reward",)),
            Call("actor_gen", "actor", "generate", ("prompt",), ("answer",)),
        ),
        batch_size=batch_size,
        data_keys=("prompt",),
        **options,
    )


@dataclass
class Log:
    """What the backends of a test have done, in order."""

    lines: list[tuple[str, ...]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def add(self, *line: str) -> None:
        self.lines.append(line)
        self.threads.add(threading.current_thread().name)

    def kinds(self, worker: str) -> list[str]:
        return [line[1] for line in self.lines if line[0] == worker]


class Recorded(Backend):
    """Writes each method that is called to a log."""

    def __init__(self, worker: str, log: Log) -> None:
        self.worker, self.log = worker, log
        self.weight = torch.zeros(3)

    def note(self, method: str, *more: str) -> None:
        self.log.add(self.worker, f"{self.shard.model}.{method}", *more)

    def initialize(self) -> None:
        self.note("initialize")

    def evaluate(self, step: int) -> dict[str, float]:
        self.note("evaluate")
        return {"step": step}

    def offload(self) -> None:
        self.note("offload")

    def save(self, path: str) -> None:
        self.note("save", path)

    def average(self) -> dict[str, float]:
        self.note("average")
        return {"members": 2}

    def parameters(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}


class Actor(Recorded):
    """The answer is the prompt plus the weight's first element; a step adds the mean reward to the weight."""

    def model_config(self) -> dict[str, Any]:
        return {"hidden": 3, "rank": self.shard.dp_rank}

    def generate(self, batch: SampleBatch, step: int) -> dict[str, list[torch.Tensor]]:
        self.note("generate", *batch.ids)
        return {"answer": [prompt + self.weight[0].long() for prompt in batch["prompt"]]}

    def train_step(self, batch: SampleBatch, step: int) -> dict[str, float]:
        self.note("train_step", *batch.ids)
        for answer, reward in zip(batch["answer"], batch["reward"], strict=True):
            assert float(reward) == float(answer.sum())
        self.weight += 1
        return {"reward": float(batch.stacked("reward").mean()), "samples": len(batch)}


class Reward(Recorded):
    """The reward is the sum of the answer."""

    def inference(self, batch: SampleBatch, step: int) -> dict[str, list[torch.Tensor]]:
        self.note("inference", *batch.ids)
        return {"reward": [answer.sum().float() for answer in batch["answer"]]}


def dataset(count: int = 64) -> ListDataset:
    return ListDataset(prompts(count))
