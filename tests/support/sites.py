"""Sites whose ranks are processes of this machine, without torchrun; and the same training between single processes."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from tests.support.ports import free_port
from tests.support.processes import JsonProcess
from tests.support.site_worker import SAMPLES, model_of, strategy_of
from tests.support.training import Run, batch_of

PATIENCE = 120.0
"""Seconds for a site to do what is expected: its ranks share two cores with others."""


class Site:
    """The ranks of one site.

    Args:
        stack: ends them.
        ranks: number of ranks.
        options: of `site_worker`; a list has those of each rank.
        environment: further variables of a rank, given its number.
    """

    def __init__(
        self,
        stack: ExitStack,
        ranks: int,
        *,
        environment: Callable[[int], Mapping[str, str]] = lambda _: {},
        **options: Any,
    ) -> None:
        port = str(free_port())
        self.ranks: list[JsonProcess] = []
        for rank in range(ranks):
            own = {name: value[rank] if name == "options_of" else value for name, value in options.items()}
            own["options"] = own.pop("options_of", {}) | own.get("options", {})
            where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port}
            env = os.environ | where | {"MASTER_ADDR": "127.0.0.1"} | dict(environment(rank))
            process = JsonProcess("python", "-m", "tests.support.site_worker", json.dumps(own), env=env)
            self.ranks.append(stack.enter_context(process))

    def expect(self, event: str) -> list[dict[str, Any]]:
        return [rank.expect(event, PATIENCE) for rank in self.ranks]

    @property
    def endpoint(self) -> str:
        """Where others join the site, once it is ready."""
        endpoints = {found["endpoint"] for found in self.expect("ready")}
        assert len(endpoints) == 1, "the ranks tell different addresses"
        return str(endpoints.pop())

    def end(self) -> list[int]:
        return [rank.wait(PATIENCE) for rank in self.ranks]


def alike(told: Sequence[dict[str, Any]], *names: str) -> None:
    """All ranks have told the same under these names."""
    for name in names:
        assert len({json.dumps(one[name]) for one in told}) == 1, f"the ranks have different {name}"


def single_processes(strategy: str, steps: int, ranks: int, samples: int = SAMPLES) -> list[list[float]]:
    """The weights of two peers of one process each, trained on the batches of two sites of `ranks` ranks."""
    run = Run()
    try:
        for number in range(2):
            run.add(strategy_of(strategy, ranks, 2), lambda p: torch.optim.AdamW(p, lr=0.01), model_of(number))
        run.meet()

        def train(number: int) -> None:
            model, opt = run.models[number], run.averagers[number]
            for step in range(steps):
                seeds = [number * 1000 + 100 * step + rank for rank in range(ranks)]
                batches = [batch_of(seed, samples, torch.float64) for seed in seeds]
                inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
                model.zero_grad()
                (model(inputs) - targets).pow(2).mean().backward()
                opt.step(batch_size=len(inputs))
            opt.finish(30.0)

        run.each(train)
        weights = [[parameter.flatten().tolist() for parameter in model.parameters()] for model in run.models]
        assert weights[0] == weights[1]
        return weights[0]
    finally:
        run.close()
