"""Measures the loss after equally many samples with unequal machines, on virtual time. See `benchmarks.unequal`."""

from __future__ import annotations

import logging
import random
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from averaging import DecentralizedAverager, DiLoCo, Receipt, Strategy
from examples.digits import Digits
from tests.support.scripts import sleep
from tests.support.training_run import Run, Site

BATCH = 16
STEP, SYNC_EVERY = 0.1, 20
"""Seconds of a step of a fast peer, and its steps between two rounds."""

PAUSE, EVERY, STAYS, AWAY = 6.0, 60.0, 12.0, 12.0
"""Seconds of a pause, from the end of one to the next, for which a peer trains, and is away: a fifth of real ones."""

PLACES = 50
"""Numbers of samples at which two curves are compared, in the second half of the shorter one."""

DIGITS = Digits.load()


class DigitsLearner:
    """Trains a small classifier of handwritten digits."""

    batch_size = BATCH

    def __init__(self, rng: random.Random) -> None:
        self._draws = torch.Generator().manual_seed(rng.getrandbits(32))
        start = torch.Generator().manual_seed(0)
        self.model = classifier()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=start) * 0.1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)

    def backward(self) -> None:
        """Sets the gradients of random samples."""
        places = torch.randint(len(DIGITS.images), (BATCH,), generator=self._draws)
        self.optimizer.zero_grad()
        scores = self.model(DIGITS.images[places])
        torch.nn.functional.cross_entropy(scores, DIGITS.labels[places]).backward()  # type: ignore[no-untyped-call]


def classifier() -> torch.nn.Module:
    """A perceptron with one hidden layer."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


@torch.no_grad()
def held_out_loss(anchors: Sequence[torch.Tensor]) -> float:
    """The loss of the state after a global step on held-out digits."""
    model = classifier()
    for parameter, anchor in zip(model.parameters(), anchors, strict=True):
        parameter.copy_(anchor)
    return float(torch.nn.functional.cross_entropy(model(DIGITS.held_out_images), DIGITS.held_out_labels))


@dataclass(frozen=True, slots=True)
class Speed:
    """How one peer trains: seconds of a step, whether it pauses, and whether it comes and goes."""

    step: float = STEP
    pauses: bool = False
    comes_and_goes: bool = False


FAST, SLOW, PAUSES, COMES_AND_GOES = Speed(), Speed(10 * STEP), Speed(pauses=True), Speed(comes_and_goes=True)


@dataclass(slots=True)
class Curve:
    """The loss of a run by the samples in its averages.

    Attributes:
        samples: in the averages until each global step.
        losses: after each global step.
        share: of the time of the fast peers that they have spent in steps.
        lost: samples of peers that stayed alive which are in no average.
    """

    samples: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    share: float = 0.0
    lost: float = 0.0

    def loss(self, samples: float) -> float:
        """The loss after so many samples, interpolated."""
        place = min(max(1, bisect_left(self.samples, samples)), len(self.samples) - 1)
        before, after = self.samples[place - 1], self.samples[place]
        part = (samples - before) / (after - before)
        return self.losses[place - 1] * (1 - part) + self.losses[place] * part


class Simulation:
    """Peers that train on virtual time."""

    def __init__(
        self, speeds: Sequence[Speed], strategy: Callable[[], Strategy], seed: int, until: float, weight: float | str
    ) -> None:
        self._until, self._speeds = until, speeds
        self._gathered: dict[bytes, dict[str, float]] = {}
        self._made: dict[str, int] = {}
        self._global_step = 0
        self.curve = Curve()
        sites: list[Site] = []
        for number, speed in enumerate(speeds):
            starts = 0.05 * number
            lives = starts + STAYS if speed.comes_and_goes else float("inf")
            while starts < until - STAYS / 2 or not speed.comes_and_goes:
                name = f"peer-{len(sites)}:1"
                site = Site(
                    name,
                    ["peer-0:1"] if sites else [],
                    starts,
                    lives,
                    speed.step,
                    strategy=strategy,
                    learner=DigitsLearner,
                    options={"weight": weight},
                )
                site.tamper = partial(self._before_step, name, speed)
                site.receipts = Receipts(self._note)
                sites.append(site)
                if not speed.comes_and_goes:
                    break
                starts += STAYS + AWAY
                lives = starts + STAYS
        self._sites = sites
        self._run = Run(seed, "diloco", sites, until=until, group_wait=2.0)

    def _note(self, receipt: Receipt) -> None:
        if receipt.averaged:
            users = receipt.gathered.items()
            steps = {
                name: float(user["steps"] if "steps" in user else user["samples"] / BATCH)
                for name, user in users
                if isinstance(user, Mapping)
            }
            self._gathered[receipt.group_id] = steps

    def _before_step(self, name: str, speed: Speed, averager: DecentralizedAverager, step: int) -> None:
        made = self._made.get(name, 0)
        if speed.pauses and made % round(EVERY / STEP) == round(EVERY / STEP / 2):
            sleep(PAUSE)
        self._made[name] = made + 1
        if name == self._sites[0].name and averager.global_step != self._global_step:
            self._global_step = averager.global_step or 0
            state = averager.strategy.state().tensors
            anchors = [tensor for key, tensor in state.items() if key.startswith("anchor/")]
            samples = BATCH * sum(sum(steps.values()) for steps in self._gathered.values())
            if samples > (self.curve.samples[-1] if self.curve.samples else 0):
                self.curve.samples.append(samples)
                self.curve.losses.append(held_out_loss(anchors))

    def simulate(self) -> Curve:
        """Runs it to its end."""
        survivors = self._run.simulate()
        fast = [number for number, speed in enumerate(self._speeds) if speed == self._speeds[0]]
        made = self._made
        shares = [made[f"peer-{number}:1"] * self._speeds[0].step / (self._until - 0.05 * number) for number in fast]
        self.curve.share = statistics.mean(shares)
        gathered: dict[str, float] = {}
        for steps in self._gathered.values():
            for name, count in steps.items():
                gathered[name] = gathered.get(name, 0) + count
        self.curve.lost = sum(abs(made[site.name] - gathered.get(site.name, 0)) for site in survivors)
        return self.curve


class Receipts(list[Receipt]):
    """Hands on each receipt, those of the end of training included."""

    def __init__(self, note: Callable[[Receipt], None]) -> None:
        super().__init__()
        self._note = note

    def append(self, receipt: Receipt) -> None:
        super().append(receipt)
        self._note(receipt)


def same_rounds(curve: Curve, peers: int) -> int:
    """Local steps between two rounds with which so many equal machines have as many samples in an average."""
    per_average = curve.samples[-1] / (BATCH * len(curve.samples))
    return max(4, round(per_average / peers))


def excess(curve: Curve, reference: Curve) -> float:
    """By what share the loss is above that of a reference after as many samples, on average."""
    most = min(curve.samples[-1], reference.samples[-1])
    places = [most * (0.5 + 0.5 * number / PLACES) for number in range(1, PLACES + 1)]
    return statistics.mean(curve.loss(place) / reference.loss(place) for place in places) - 1


def strategy(sync_every: int = SYNC_EVERY, lr: float = 0.7, **options: Any) -> Callable[[], Strategy]:
    """A factory of strategies whose rounds are `sync_every` steps apart, a quarter of which are made in a round."""
    outer = partial(torch.optim.SGD, lr=lr, momentum=0.6, nesterov=True)
    return partial(DiLoCo, sync_every, delay=sync_every // 4, outer=outer, **options)


SCENARIOS: Mapping[str, tuple[Speed, ...]] = {
    "one slow": (FAST, FAST, SLOW),
    "one pauses": (FAST, FAST, PAUSES),
    "one comes and goes": (FAST, FAST, COMES_AND_GOES),
    "all": (FAST, FAST, SLOW, PAUSES, COMES_AND_GOES),
}

VARIANTS: Mapping[str, tuple[Mapping[str, Any], float | str]] = {
    "without a quorum": ({}, "samples"),
    "quorum=2": ({"quorum": 2}, "samples"),
    "quorum=2, staleness_discount=1": ({"quorum": 2, "staleness_discount": 1.0}, "samples"),
    "quorum=2, staleness_discount=0.5": ({"quorum": 2, "staleness_discount": 0.5}, "samples"),
    "quorum=2, weight=1": ({"quorum": 2}, 1.0),
}


USUAL = ("without a quorum", "quorum=2")
"""The variants that are measured with one unequal machine only."""


def measure(
    seeds: Sequence[int],
    seconds: float,
    show: Callable[[str, dict[str, Any]], None],
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Measures all rows.

    Args:
        seeds: of each row.
        seconds: of virtual time in each run.
        show: called with the name and the figures of each row when it is complete.
        note: called with what is measured next.
    """
    logging.getLogger("averaging").setLevel(logging.ERROR)

    @cache
    def equal_machines(count: int, sync_every: int, seed: int, quorum: bool = False) -> Curve:
        """A quorum of all waits for all, but keeps the local steps that are made during a round."""
        options = {"quorum": count} if quorum else {}
        return Simulation([FAST] * count, strategy(sync_every, **options), seed, seconds, "samples").simulate()

    for scenario, speeds in SCENARIOS.items():
        note(f"{scenario}: the references, {len(seeds)} seeds")
        count = len(speeds)
        equal = [equal_machines(count, SYNC_EVERY, seed) for seed in seeds]
        only = [equal_machines(2, SYNC_EVERY, seed) for seed in seeds]
        for name, (options, weight) in VARIANTS.items():
            if scenario != "all" and name not in USUAL:
                continue
            note(f"{scenario}, {name}")
            curves = [Simulation(speeds, strategy(**options), seed, seconds, weight).simulate() for seed in seeds]
            # The fair ones: as many samples in as many outer steps, and the same steps kept.
            alike = [
                equal_machines(count, same_rounds(curve, count), seed, bool(options))
                for curve, seed in zip(curves, seeds, strict=True)
            ]
            above_alike = [excess(curve, reference) for curve, reference in zip(curves, alike, strict=True)]
            above = [excess(curve, reference) for curve, reference in zip(curves, equal, strict=True)]
            above_only = [excess(curve, reference) for curve, reference in zip(curves, only, strict=True)]
            show(
                f"{scenario}, {name}",
                {
                    "share": statistics.mean(curve.share for curve in curves),
                    "lost": max(curve.lost for curve in curves),
                    "samples": statistics.mean(curve.samples[-1] for curve in curves),
                    "above_same_rounds": statistics.mean(above_alike),
                    "above_same_rounds_of_each": above_alike,
                    "steps_of_equal_machines": [same_rounds(curve, count) for curve in curves],
                    "above_equal": statistics.mean(above),
                    "above_equal_of_each": above,
                    "above_fast_alone": statistics.mean(above_only),
                    "above_fast_alone_of_each": above_only,
                    "loss": statistics.mean(curve.losses[-1] for curve in curves),
                },
            )
