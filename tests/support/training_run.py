"""Sites that train: real averagers with real strategies and gossip, on the memory network in virtual time."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from averaging import DecentralizedAverager, DiLoCo, GradientAveraging, LocalSGD, Strategy
from averaging.discovery.gossip import GossipDiscovery
from averaging.discovery.gossip.record import UnsignedIdentity
from averaging.errors import JoinError, RoundError, StateError
from averaging.receipts.receipt import Receipt
from averaging.receipts.status import Finish
from averaging.testing import virtual_time
from averaging.testing.transport import MemoryNetwork, MemoryTransport
from averaging.transport.base import Transport
from tests.support import simulated_processes as processes
from tests.support.scripts import run_script, scripted, sleep

STEP_SECONDS = 0.5


class Learner(Protocol):
    """What a site trains.

    Attributes:
        batch_size: samples of each step.
        optimizer: of its parameters.
    """

    @property
    def batch_size(self) -> int: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def backward(self) -> None:
        """Sets the gradients of the next step."""


class Noise:
    """Tensors of three parameters with random gradients; usually one."""

    batch_size = 4

    def __init__(self, rng: random.Random, hyperparameters: Mapping[str, Any], tensors: int = 1) -> None:
        self._rng = rng
        self._parameters = [torch.nn.Parameter(self._random()) for _ in range(tensors)]
        self.optimizer = torch.optim.SGD(self._parameters, **{"lr": 0.1, "momentum": 0.9, **hyperparameters})

    def _random(self) -> torch.Tensor:
        return torch.tensor([self._rng.gauss(0, 1) for _ in range(3)])

    def backward(self) -> None:
        """See `Learner.backward`."""
        for parameter in self._parameters:
            parameter.grad = self._random()


@dataclass
class Site:
    """One peer of a run: how it starts, and its result."""

    name: str
    join: Sequence[str]
    starts: float
    lives: float = float("inf")  # seconds from the start of the simulation until it is killed
    step_seconds: float = STEP_SECONDS
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)  # besides those of all sites
    tamper: Callable[[DecentralizedAverager, int], None] | None = None  # called before each step with its number
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    strategy: Callable[[], Strategy] | None = None  # instead of the run's
    learner: Callable[[random.Random], Learner] | None = None  # instead of noise
    options: Mapping[str, Any] = field(default_factory=dict)  # of the averager
    steps: float = float("inf")  # local steps at which it ends its training, if the run has not ended before
    error: Exception | None = None  # that has ended the training
    receipts: list[Receipt] = field(default_factory=list)  # of the training, without those of its end
    last_receipts: list[Receipt] = field(default_factory=list)  # of its end
    finish: Finish | None = None
    finished: float = 0.0  # seconds from the start of the simulation until `finish` had returned
    parameters: list[float] = field(default_factory=list)
    global_step: int | None = None


STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "gradients": lambda count: GradientAveraging(4 * count),
    "diloco": lambda count: DiLoCo(4),
    "local": lambda count: LocalSGD(4),
}


class Run:
    """A run with its network; everything random comes from `seed`."""

    clock = staticmethod(virtual_time.clock)

    def __init__(
        self, seed: int, strategy: str, sites: Sequence[Site], *, until: float, group_wait: float = 1.0
    ) -> None:
        self.seed, self.strategy, self.sites, self.until = seed, strategy, sites, until
        self.group_wait, self.stall_timeout = group_wait, 2.0
        self.network = MemoryNetwork(random.Random(seed))

    def train(self, site: Site, rng: random.Random) -> None:
        """The script of one site: starts again when it cannot start, trains, finishes."""
        sleep(site.starts)
        while True:
            learner = Noise(rng, site.hyperparameters) if site.learner is None else site.learner(rng)
            try:
                opt = self._averager(site, learner.optimizer, rng)
                break
            except (JoinError, StateError):
                sleep(1.0)
        now = asyncio.get_running_loop().time
        while now() < self.until and opt.local_step < site.steps:
            sleep(site.step_seconds * rng.uniform(0.8, 1.2))
            learner.backward()
            if site.tamper is not None:
                site.tamper(opt, opt.local_step)
            try:
                opt.step(batch_size=learner.batch_size)
            except RoundError as error:
                site.error = error
                opt.close()
                return
        trained = len(site.receipts)
        site.finish = opt.finish(timeout=30.0)
        site.finished = now()
        site.last_receipts = site.receipts[trained:]
        del site.receipts[trained:]
        parameters = [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]
        site.parameters = torch.cat([parameter.detach().flatten() for parameter in parameters]).tolist()
        site.global_step = opt.global_step
        opt.close()

    def _transport(self, name: str) -> MemoryTransport:
        return self.network.transport(name)

    def _averager(self, site: Site, optimizer: torch.optim.Optimizer, rng: random.Random) -> DecentralizedAverager:
        def discovery(endpoint: str, transport: Transport) -> GossipDiscovery:
            return GossipDiscovery(
                "run",
                endpoint,
                transport,
                join=site.join,
                identity=UnsignedIdentity(rng),
                clock=self.clock,
                rng=random.Random(rng.getrandbits(64)),
            )

        return DecentralizedAverager(
            optimizer,
            run_id="run",
            join=site.join,
            strategy=site.strategy() if site.strategy is not None else STRATEGIES[self.strategy](len(self.sites)),
            transport=self._transport(site.name),
            discovery=discovery,
            on_round=site.receipts.append,
            group_wait=self.group_wait,
            round_timeout=5.0 * self.group_wait,
            stall_timeout=self.stall_timeout,
            scheduler=site.scheduler,
            **site.options,
        )

    async def _live(self, site: Site, rng: random.Random) -> None:
        with processes.process(site.name):
            task = asyncio.create_task(run_script(lambda: self.train(site, rng)))
        if site.lives == float("inf"):
            await task
            return
        await asyncio.sleep(site.lives)
        if not task.done():
            self.kill(site)

    def kill(self, site: Site) -> None:
        """Kills a site, which must have an end of its life."""
        self._loop().stop_process(site.name)
        self.network.kill(site.name)

    def _loop(self) -> processes.ProcessLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, processes.ProcessLoop)
        return loop

    def simulate(self, disturb: Callable[[], Coroutine[Any, Any, object]] | None = None) -> list[Site]:
        """Runs all sites to their end; returns those that were not killed. What disturbs them is cancelled then."""
        with scripted(self.seed) as rng:

            async def main() -> None:
                disturbing = None if disturb is None else asyncio.create_task(disturb())
                await asyncio.gather(*(self._live(site, rng) for site in self.sites))
                if disturbing is not None:
                    disturbing.cancel()
                    await asyncio.wait([disturbing])
                for site in self.sites:
                    self._loop().continue_process(site.name)  # or its tasks could not be cancelled

            processes.run(main())
        assert self.network.errors == []
        return [site for site in self.sites if site.finish is not None]


def agree(survivors: Sequence[Site]) -> bool:
    return len({tuple(site.parameters) for site in survivors}) == 1
