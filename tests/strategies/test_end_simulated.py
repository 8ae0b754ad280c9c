"""The end of runs whose peers end their loops at different times, on virtual time: all hold one set of weights."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from averaging import DiLoCo, GradientAveraging, LocalSGD, Strategy
from averaging.errors import PeerUnreachableError
from averaging.testing.transport import MemoryTransport
from tests.support.selection import rest_is_long
from tests.support.training_run import STEP_SECONDS, Noise, Run, Site, agree

INTERVAL = 4
STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "diloco": lambda count: DiLoCo(INTERVAL),
    "top_k": lambda count: DiLoCo(INTERVAL, compression="top_k"),
    "delay": lambda count: DiLoCo(INTERVAL, delay=2),
    "local": lambda count: LocalSGD(INTERVAL),
    "overlap": lambda count: LocalSGD(INTERVAL, overlap=True),
    "fragments": lambda count: DiLoCo(INTERVAL, fragments=2),
    "quorum": lambda count: DiLoCo(INTERVAL, quorum=min(2, count)),
    "gradients": lambda count: GradientAveraging(4 * count),
}


def run_of(strategy: str, seed: int) -> tuple[Run, int]:
    """A run of 2 to 8 peers, of which one may die, if it has not ended before. Also how many survive at least.

    One or two of them are up to two intervals behind: their loops are longer, or they join so late.
    """
    rng = random.Random(seed)
    count = rng.randint(2, 8)
    dies = count > 2 and rng.random() < 0.7
    late = range(count - rng.randint(1, min(2, count - 1 - dies)), count)
    steps = 10 * INTERVAL + rng.choice((0, rng.randint(1, INTERVAL - 1)))
    names = [f"peer-{number}:1" for number in range(count)]
    sites = []
    for number, name in enumerate(names):
        behind = rng.randint(0, 2) * INTERVAL if number in late else 0
        joins = rng.random() < 0.5
        sites.append(
            Site(
                name,
                [names[0]] if number else [],
                0.05 * number + (behind * STEP_SECONDS if joins else 0),
                lives=rng.uniform(2, 11) * INTERVAL * STEP_SECONDS if dies and number == 1 else float("inf"),
                strategy=lambda: STRATEGIES[strategy](count),
                steps=steps if joins else steps + behind,
                learner=lambda rng: Noise(rng, {}, tensors=2),
                options={"group_size": count},
            )
        )
    return Run(seed, "diloco", sites, until=200.0), count - dies


@pytest.mark.parametrize("seed", rest_is_long([9, *range(9), *range(10, 500)]))  # five peers, of which one dies
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peers_whose_loops_end_at_different_times_hold_one_set_of_weights(strategy: str, seed: int) -> None:
    run, surviving = run_of(strategy, seed)
    survivors = run.simulate()
    assert len(survivors) >= surviving
    assert agree(survivors), [(site.name, site.global_step, str(site.finish)) for site in survivors]
    assert all(site.finish is not None and site.finish.alike for site in survivors), [
        (site.name, str(site.finish)) for site in survivors
    ]


@pytest.mark.parametrize("seed", rest_is_long(range(4)))
def test_a_peer_that_is_killed_while_all_compare_their_weights_holds_nobody_up(seed: int) -> None:
    def simulate(lives: float) -> list[Site]:
        names = [f"peer-{number}:1" for number in range(3)]
        sites = [
            Site(name, [names[0]] if number else [], 0.05 * number, strategy=lambda: DiLoCo(INTERVAL), steps=41)
            for number, name in enumerate(names)
        ]
        sites[1].lives = lives
        return Run(seed, "diloco", sites, until=200.0).simulate()

    ends = max(site.finished for site in simulate(float("inf")))
    for before in (0.06, 0.04, 0.02, 0.01):
        survivors = [site for site in simulate(ends - before) if site.name != "peer-1:1"]
        assert all(site.finish is not None and site.finish.alike for site in survivors)
        assert max(site.finished for site in survivors) < ends + 8.0


def run_of_loops(strategy: Callable[[], Strategy]) -> list[Site]:
    names = [f"peer-{number}:1" for number in range(3)]
    sites = [
        Site(name, [names[0]] if number else [], 0.05 * number, strategy=strategy, steps=(95, 95, 103)[number])
        for number, name in enumerate(names)
    ]
    return Run(1, "diloco", sites, until=200.0).simulate()


def test_the_steps_of_unequal_loops_go_into_the_last_average() -> None:
    """The longest loop has a step in which a round is due, while the others wait in `finish`."""
    survivors = run_of_loops(lambda: DiLoCo(20))
    assert [site.global_step for site in survivors] == [5, 5, 5]
    assert all(site.finish is not None and site.finish.alike and not site.finish.dropped for site in survivors)
    assert max(site.finished for site in survivors) < 60.0


@pytest.mark.parametrize("target", [16, 40])
def test_a_joint_batch_that_is_complete_at_the_end_is_not_dropped_and_the_rest_is_counted(target: int) -> None:
    survivors = run_of_loops(lambda: GradientAveraging(target))
    assert agree(survivors)
    finishes = [site.finish for site in survivors if site.finish is not None]
    assert len(finishes) == 3
    assert all(finish.alike for finish in finishes)
    for finish in finishes:
        assert (f"the last {finish.dropped:g} local steps or samples" in str(finish)) is (finish.dropped > 0)
    assert any(finish.dropped for finish in finishes) or target == 16
    assert sum(finish.dropped for finish in finishes) < target


def test_local_steps_whose_last_round_fails_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    join_group, fails_from = MemoryTransport.join_group, 23 * STEP_SECONDS

    async def fail(self: MemoryTransport, endpoint: str, request: Any) -> AsyncGenerator[Any, None]:
        if asyncio.get_running_loop().time() >= fails_from:
            raise PeerUnreachableError(endpoint, "no way to it")
        async with aclosing(join_group(self, endpoint, request)) as messages:
            async for message in messages:
                yield message

    monkeypatch.setattr(MemoryTransport, "join_group", fail)
    sites = [
        Site(name, join, 0.05, strategy=lambda: DiLoCo(20), steps=25)
        for name, join in (("peer-0:1", []), ("peer-1:1", ["peer-0:1"]))
    ]
    for site in Run(1, "diloco", sites, until=300.0).simulate():
        assert site.global_step == 1
        assert site.finish is not None
        assert site.finish.dropped == 5
