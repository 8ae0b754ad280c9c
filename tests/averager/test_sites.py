"""Sites of several ranks: they equal peers of one process, and all their ranks go the same way."""

import signal
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
import torch

from averaging import Receipt
from tests.support.selection import rest_is_long
from tests.support.site_worker import SAMPLES, model_of, strategy_of
from tests.support.sites import PATIENCE, Site, alike, single_processes
from tests.support.training import Run, backward, batch_of

STEPS = 20
"""Ten rounds of two steps each."""


def two_sites(stack: ExitStack, ranks: int, **options: Any) -> list[dict[str, Any]]:
    """What all ranks of two sites tell at the end of the training."""
    first = Site(stack, ranks, number=0, seed=0, **options)
    second = Site(stack, ranks, number=1, seed=1, join=[first.endpoint], **options)
    told = first.expect("done") + second.expect("done")
    assert first.end() == second.end() == [0] * ranks
    return told


def check_equals_single_processes(stack: ExitStack, strategy: str, inside: str, ranks: int, steps: int = STEPS) -> None:
    told = two_sites(stack, ranks, strategy=strategy, inside=inside, steps=steps)
    expected = single_processes(strategy, steps, ranks)
    for one in told:
        for ours, theirs in zip(one["weights"], expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-6, atol=1e-12)
    for site in (told[:ranks], told[ranks:]):
        alike(site, "rounds", "status", "text")
    assert all(one["alike"] for one in told)
    assert all(text.startswith("averaged") for one in told for text in one["rounds"])
    assert len(told[0]["rounds"]) >= (10 if steps == STEPS else 2)


@pytest.mark.parametrize("inside", rest_is_long(["fsdp", "ddp"]))
def test_two_sites_equal_two_processes_after_a_few_steps(stack: ExitStack, inside: str) -> None:
    check_equals_single_processes(stack, "diloco", inside, ranks=2, steps=6)


@pytest.mark.long
def test_shards_that_send_their_largest_elements_lose_nothing(stack: ExitStack) -> None:
    """Each rank has the residual of its shard, whose blocks are those of the shard."""
    check_nothing_is_lost(two_sites(stack, 2, strategy="top_k", inside="fsdp", steps=7))


def test_a_site_weighs_as_many_samples_as_its_ranks_have_together(stack: ExitStack) -> None:
    """Beside a single process with the same batch as one rank; the average has the samples of three."""
    site = Site(stack, 2, number=0, strategy="local", inside="ddp", steps=4, options={"weight": "samples"})
    single = stack.enter_context(closing(Run()))
    seen: list[Receipt] = []
    options: dict[str, Any] = {"run_id": "run", "join": [site.endpoint], "weight": "samples", "on_round": seen.append}
    opt = single.add(strategy_of("local", 2, 2), partial(torch.optim.AdamW, lr=0.01), model_of(1), **options)
    assert opt.wait_for_peers(2, PATIENCE)
    for seed in range(4):
        backward(single.models[0], batch_of(seed, SAMPLES, torch.float64))
        opt.step(batch_size=SAMPLES)
    assert opt.finish(PATIENCE).alike
    told = site.expect("done")
    assert all(one["alike"] for one in told)
    assert len([receipt for receipt in seen if receipt.averaged]) >= 2
    for receipt in seen[:2]:  # of two steps each
        weights = {account.endpoint == opt.endpoint: account.weight for account in receipt.accounts}
        assert weights == {True: 2 * SAMPLES, False: 2 * 2 * SAMPLES}
        assert {account.weight_unit for account in receipt.accounts} == {"samples"}


def check_nothing_is_lost(told: list[dict[str, Any]]) -> None:
    assert all(one["alike"] for one in told)
    assert all(one["weights"] == told[0]["weights"] for one in told)
    assert all(text.startswith("averaged") for one in told for text in one["rounds"])
    assert max(one["lost"] for one in told) < 2e-6


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["diloco", "local", "gradients", "streaming", "clipped", "statistics", "seldom"])
@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
def test_two_sites_equal_two_processes(stack: ExitStack, strategy: str, inside: str) -> None:
    check_equals_single_processes(stack, strategy, inside, ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["diloco", "gradients"])
def test_replicas_of_shards_equal_two_processes(stack: ExitStack, strategy: str) -> None:
    """HSDP: two replicas of two shards in each site."""
    check_equals_single_processes(stack, strategy, "hsdp", ranks=4)


def check_goes_on(stack: ExitStack, strategy: str, inside: str, death: str, dies: int) -> None:
    """A rank of a site dies at that moment: the site ends by itself, starts again, and both end with the same model."""
    options: dict[str, Any] = {"strategy": strategy, "inside": inside, "steps": 24, "group_wait": 10.0}
    first = Site(stack, 2, number=0, hold=12, **options)
    join = [first.endpoint]
    doomed = Site(stack, 2, number=1, join=join, death=death, dies=dies, at=6, **options)
    codes = doomed.end()
    assert codes[dies] == -signal.SIGKILL
    assert codes[1 - dies] > 0, "the other rank has not noticed"
    if death != "in the download":  # then the first site still waits for the second
        first.ranks[0].expect("held", PATIENCE)
    again = Site(stack, 2, number=2, join=join, **options)
    joined = again.endpoint
    if death in ("before the round", "before adopting"):
        assert all(rank.events("ready")[0]["local_step"] >= 4 for rank in again.ranks)
    first.ranks[0].send(joined)
    told = first.expect("done") + again.expect("done")
    assert first.end() == again.end() == [0, 0]
    alike(told, "weights")
    assert sum(text.startswith("averaged") for text in told[2]["rounds"]) > 2, told[2]["rounds"]
    held: dict[tuple[int, str], set[str]] = {}
    for site in (first, doomed, again):
        for rank, process in enumerate(site.ranks):
            for step in process.events("step"):
                if step["averaged"]:
                    held.setdefault((rank, step["averaged"]), set()).add(step["digest"])
    assert all(len(digests) == 1 for digests in held.values()), "sites hold parts of different versions"


@pytest.mark.long
@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("death", ["before the round", "in the round", "before adopting", "in the download"])
@pytest.mark.parametrize("strategy", ["diloco", "local", "top_k"])
def test_a_divided_site_that_dies_comes_back(stack: ExitStack, strategy: str, death: str, dies: int) -> None:
    check_goes_on(stack, strategy, "fsdp", death, dies)


@pytest.mark.long
@pytest.mark.parametrize(
    ("death", "dies"), [("before the round", 0), ("before the round", 1), ("in the round", 0), ("in the download", 0)]
)
def test_a_site_with_ddp_that_dies_comes_back(stack: ExitStack, death: str, dies: int) -> None:
    check_goes_on(stack, "diloco", "ddp", death, dies)
