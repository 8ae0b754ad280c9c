"""What a newcomer takes over, with real strategies on virtual time: each local step is in the run's average once."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from averaging import DecentralizedAverager, DiLoCo, LocalSGD, Strategy
from tests.support.counted_steps import PARTS, Averages, Counts, first_of_changes
from tests.support.selection import one_in
from tests.support.training_run import Run, Site, agree

PEERS = 3
PLAIN = partial(torch.optim.SGD, lr=1.0)


Tensors = list[list[float]]


def states_of(averages: Averages) -> list[Tensors]:
    """The state of the run after each round: the averages, or what `DiLoCo` makes of those of changes."""
    state = [torch.zeros(PEERS, dtype=torch.float64) for _ in range(PARTS)]
    states = [_listed(state)]
    for receipt, tensors in averages.of_rounds():
        first = first_of_changes(receipt)
        if first is None:
            state = tensors
        else:
            for place, change in enumerate(tensors, first):
                state[place] = state[place] - change
        states.append(_listed(state))
    return states


def _listed(tensors: Iterable[torch.Tensor]) -> Tensors:
    return [[round(value, 9) for value in tensor.tolist()] for tensor in tensors]


STRATEGIES: list[tuple[type[Strategy], dict[str, Any]]] = [
    *(
        (DiLoCo, {"outer": PLAIN, "sync_every": every, "fragments": fragments, "delay": delay, **more})
        for fragments, delay, more, every in itertools.product(
            (3, 1), (2, 0), ({"quorum": 2, "staleness_discount": 1.0}, {}, {"alpha": 0.5}), (12, "1.2s")
        )
    ),
    *((LocalSGD, {"sync_every": every, "overlap": overlap}) for overlap in (True, False) for every in (7, "0.7s")),
    *((LocalSGD, {"sync_every": every, "quorum": 2, "staleness_discount": 1.0}) for every in (7, "0.7s")),
]


def trained(
    monkeypatch: pytest.MonkeyPatch, strategy: Callable[[], Strategy], seed: int
) -> tuple[Averages, Tensors, Mapping[str, int], list[Site]]:
    """Two peers train, and a third comes somewhen; returns the averages, what it took over, steps and survivors."""
    averages, stepped = Averages(monkeypatch), Counter[str]()
    taken: Tensors = []
    learners: dict[str, Counts] = {}
    comes = random.Random(seed).uniform(5.0, 9.0)

    def learner(number: int, rng: random.Random) -> Counts:
        learners[f"peer-{number}:1"] = made = Counts(number, PEERS)
        return made

    def before_step(number: int, averager: DecentralizedAverager, step: int) -> None:
        name = f"peer-{number}:1"
        if number == 2 and not stepped[name]:
            taken.extend(_listed(learners[name].parameters))
        stepped[name] += 1

    sites = [
        Site(
            f"peer-{number}:1",
            ["peer-0:1"] if number else [],
            comes if number == 2 else 0.0,
            step_seconds=(0.1, 0.11, 0.12)[number],
            strategy=strategy,
            tamper=partial(before_step, number),
            learner=partial(learner, number),
        )
        for number in range(PEERS)
    ]
    survivors = Run(seed, "diloco", sites, until=16.0, group_wait=2.0).simulate()
    return averages, taken, stepped, survivors


@pytest.mark.parametrize(("kind", "options"), one_in(5, STRATEGIES))
def test_a_newcomer_takes_over_what_is_in_the_average_only(
    kind: type[Strategy], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its donor sends the steps that it has made since then itself."""
    strategy = partial(kind, **options)
    averages, taken, stepped, survivors = trained(monkeypatch, strategy, 1)
    assert len(survivors) == PEERS
    assert agree(survivors)
    states = states_of(averages)
    assert taken in states
    assert states.index(taken) > 0
    if kind is DiLoCo:
        assert [round(value, 9) for value in survivors[0].parameters] == list(itertools.chain(*states[-1]))
    if not options.get("alpha") and ("quorum" in options or not options.get("delay")):
        # The steps of a delay are mixed with the average, or replaced by it.
        assert all(
            averages.steps(f"peer-{place}:1", place) == [stepped[f"peer-{place}:1"]] * PARTS for place in range(PEERS)
        )
    if kind is DiLoCo and "quorum" in options:
        gathered: Counter[str] = Counter()
        for receipt, _ in averages.of_rounds():
            gathered.update({name: user.get("steps", 0) for name, user in receipt.gathered.items()})
        assert gathered == {name: options["fragments"] * steps for name, steps in stepped.items()}
