"""Peers that should be equal and are not are named in their next round; others are not named."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from averaging import DecentralizedAverager
from averaging.receipts import Drift
from tests.strategies.test_one_origin_simulated import scenario
from tests.support.selection import rest_is_long
from tests.support.training_run import Run, Site

ODD = "peer-2:1"


def run_of(strategy: str, *, count: int = 4, **odd: Any) -> Run:
    """Peers that start at the same moment and join the first; the last but one is another one."""
    names = [f"peer-{number}:1" for number in range(count)]
    sites = [Site(name, names[:1] if name != names[0] else [], 0.0, **(odd if name == ODD else {})) for name in names]
    return Run(1, strategy, sites, until=8.0)


def drift_in(run: Run) -> set[tuple[str, str, str]]:
    """What the receipts say: who says of whom that what differs."""
    return {
        (site.name, drift.endpoint, drift.name)
        for site in run.sites
        for receipt in site.receipts
        for drift in receipt.drift
    }


def write(opt: DecentralizedAverager, step: int, *, at: Callable[[int], bool] = lambda step: step > 8) -> None:
    """A loop that writes parameters at one peer."""
    if at(step):
        with torch.no_grad():
            for group in opt.param_groups:
                for parameter in group["params"]:
                    parameter.add_(0.5)


def change_decay(opt: DecentralizedAverager, step: int) -> None:
    """A loop that changes a hyperparameter at one peer."""
    opt.param_groups[0]["weight_decay"] = min(0.5, step / 40)


FAULTS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "weight decay": ({"hyperparameters": {"weight_decay": 0.5}}, {"weight_decay"}),
    "a loop that changes the decay": ({"tamper": change_decay}, {"weight_decay"}),
    "a loop that writes parameters": ({"tamper": write}, {"'group0.param0'"}),
    "another scheduler": ({"scheduler": partial(StepLR, step_size=5)}, {"lr"}),
}


# With DiLoCo what is written at one peer counts as its local steps, and all peers get the average of it.
@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        ("another scheduler", "diloco"),
        ("a loop that writes parameters", "gradients"),
        ("a loop that writes parameters", "local"),
        ("weight decay", "local"),
        ("a loop that changes the decay", "gradients"),
    ],
)
def test_all_members_name_the_peer_that_differs_and_the_first_difference(fault: str, strategy: str) -> None:
    options, first = FAULTS[fault]
    run = run_of(strategy, **options)
    run.simulate()
    found = drift_in(run)
    assert {site.name for site in run.sites} == {sayer for sayer, _, _ in found}
    assert {of_whom for _, of_whom, _ in found} == {ODD}
    assert first <= {name for _, _, name in found} <= first | {"'group0.param0'"}
    for site in run.sites:
        drifts = next(receipt.drift for receipt in site.receipts if receipt.drift)
        assert drifts[0].name in first


@pytest.mark.parametrize("strategy", ["gradients", "local"])
def test_peers_of_unequal_speed_with_one_schedule_are_equal(strategy: str) -> None:
    """The schedule counts local steps, of which the peers have made different numbers; some come later."""
    names = [f"peer-{number}:1" for number in range(4)]
    schedule = partial(CosineAnnealingLR, T_max=60)
    sites = [
        Site(name, names[:1] if place else [], starts, step_seconds=seconds, scheduler=schedule)
        for place, (name, starts, seconds) in enumerate(zip(names, (0, 0, 5, 9), (0.5, 0.2, 1.7, 0.3), strict=True))
    ]
    run = Run(3, strategy, sites, until=24.0)
    assert len(run.simulate()) == 4
    assert drift_in(run) == set()
    assert any(receipt.averaged and len(receipt.members) == 4 for receipt in sites[3].receipts)


@pytest.mark.parametrize("seed", rest_is_long(range(1000), 3))
def test_no_peer_is_named_whatever_happens_to_a_run_of_equal_peers(seed: int) -> None:
    """Deaths, late peers, cut networks and catching up leave no drift."""
    run, disturb = scenario(seed)
    rng = random.Random(seed)
    schedule = rng.choice([None, partial(CosineAnnealingLR, T_max=50), partial(StepLR, step_size=7)])
    for site in run.sites:
        site.scheduler, site.step_seconds = schedule, rng.choice([0.5, 0.5, 0.3, 1.0])
    run.simulate(disturb)
    assert drift_in(run) == set()


def test_two_peers_name_the_one_that_came_later() -> None:
    run = run_of("gradients", count=2)
    run.sites[1].hyperparameters = {"weight_decay": 0.5}
    run.simulate()
    assert {(of_whom, name) for _, of_whom, name in drift_in(run)} == {
        ("peer-1:1", "weight_decay"),
        ("peer-1:1", "'group0.param0'"),
    }
    first: Drift = next(drift for receipt in run.sites[0].receipts for drift in receipt.drift)
    assert (first.value, first.expected) == ("0.5", "0" if first.expected == "0" else "0.0")
