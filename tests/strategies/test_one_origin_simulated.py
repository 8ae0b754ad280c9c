"""However the peers of a run start, all end with the same parameters: a run has one origin."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from tests.support.selection import rest_is_long
from tests.support.training_run import STRATEGIES, Run, Site, agree


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_peers_that_start_at_the_same_moment_with_the_same_list(strategy: str) -> None:
    """As with Kubernetes, compose and Slurm, all peers have one `join` list that also names themselves."""
    names = [f"peer-{number}:1" for number in range(3)]
    run = Run(1, strategy, [Site(name, names, 0.0) for name in names], until=10.0)
    survivors = run.simulate()
    assert len(survivors) == 3
    assert agree(survivors), survivors
    assert all(site.finish is not None and site.finish.alike for site in survivors)


def scenario(seed: int) -> tuple[Run, Callable[[], Coroutine[Any, Any, object]]]:
    """Any strategy, number of peers, `join` lists and start times; some kill a peer or cut the network."""
    rng = random.Random(seed)
    count = rng.choice([2, 3, 3, 4])
    names = [f"peer-{number}:1" for number in range(count)]
    stagger = rng.choice([0.0, 0.05, 1.0, 5.0, 20.0])
    sites = [Site(name, join, stagger * rng.random()) for name, join in zip(names, _lists(names, rng), strict=True)]
    ends = stagger + 12.0
    expendable = [site for site in sites if _is_connected([other for other in sites if other is not site])]
    if count > 2 and expendable and rng.random() < 0.6:
        rng.choice(expendable).lives = rng.uniform(0.0, ends - 5.0)
    strategy = rng.choice(list(STRATEGIES))
    cut = rng.random() < 0.3
    heals = stagger + rng.uniform(0.5, 15.0)
    run = Run(seed, strategy, sites, until=(heals + 25.0) if cut else ends)

    async def disturb() -> None:
        if cut:
            half = rng.randrange(1, count)
            run.network.cut(frozenset(names[:half]), frozenset(names[half:]))
            await asyncio.sleep(heals)
            run.network.heal()

    return run, disturb


def _lists(names: Sequence[str], rng: random.Random) -> list[list[str]]:
    """The `join` list of each: the same for all, only the first peer, or some other peer."""
    kind = rng.choice(["same", "first", "any"])
    if kind == "same":
        return [list(names) for _ in names]
    if kind == "first":
        return [[], *([names[0]] for _ in names[1:])]
    lists = [{rng.choice(names[:number])} for number in range(1, len(names))]  # connected
    lists.insert(0, {rng.choice(names[1:])})
    for name, known in zip(names, lists, strict=True):
        known.update(rng.sample(names, rng.randrange(len(names))))
        if known == {name}:
            known.add(rng.choice([other for other in names if other != name]))
    return [sorted(known) for known in lists]


def _is_connected(sites: Sequence[Site]) -> bool:
    """Whether each peer can join another one, so that all find each other."""
    names = {site.name for site in sites}
    reached, new = set(), {sites[0].name}
    while new:
        reached |= new
        new = {site.name for site in sites if reached.intersection(site.join)}
        new = (new | {name for site in sites if site.name in reached for name in site.join}) & names - reached
    return reached == names and all(not site.join or names.intersection(site.join) - {site.name} for site in sites)


@pytest.mark.parametrize("seed", rest_is_long(range(1000), 8))
def test_however_peers_start_all_end_with_the_same_parameters(seed: int) -> None:
    run, disturb = scenario(seed)
    survivors = run.simulate(disturb)
    assert len(survivors) == sum(site.lives == float("inf") for site in run.sites)
    assert agree(survivors), survivors
