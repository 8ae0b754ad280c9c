"""The convergence benchmark: the library ends where its plain reference does; cells are trained, recorded and shown."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import benchmarks.convergence.__main__ as convergence
from benchmarks.convergence import plain
from benchmarks.convergence.cases import CASES, Case, Cell, diloco, local_adam, top_k
from benchmarks.convergence.library import train_with_library
from benchmarks.convergence.train import Recipe, new_model
from examples.language_model import Size

SMALL = Recipe(steps=8, batch=2, size=Size(layers=1, width=16, heads=2, context=16), snapshots=2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the benchmark trains; more threads than cores would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("case", "apart"),
    [
        (diloco(4, "int8"), 1e-5),
        (top_k(4, 16, 2), 0.0),
        (replace(CASES["muon-top-k-32-2bit-h15"], every=4), 0.0),
        (local_adam(4, (2, 1)), 1e-5),
    ],
    ids=["int8", "top-k", "Muon, top-k", "Local Adam"],
)
def test_the_library_and_the_reference_end_alike_if_the_members_have_the_same_order(case: Case, apart: float) -> None:
    """With top-k to the last bit; dense values are summed in the order in which they arrive."""
    model = new_model(SMALL, 0)
    library = train_with_library(SMALL, case, model, 8, 3, 0, lambda _: None)
    mine = plain.train_replicas(SMALL, case, model, 8, 3, 0, lambda _: None, library.orders)
    assert library.loss == pytest.approx(mine.loss, rel=apart, abs=0)
    assert library.curve == pytest.approx(mine.curve, rel=apart, abs=0)
    assert (library.rounds, library.samples) == (mine.rounds, mine.samples) == (2, 48)
    assert [sorted(order) for order in library.orders] == [[0, 1, 2]] * 2
    assert library.sent > 0


@pytest.mark.parametrize("name", ["unequal-h30", "quorum-h15"])
def test_the_library_trains_with_unequal_speeds(name: str) -> None:
    """With a quorum nobody waits for the slow peer, so plain torch is only near."""
    case, model = replace(CASES[name], every=10), new_model(SMALL, 0)
    library = train_with_library(SMALL, case, model, 16, 3, 0, lambda _: None)
    orders = () if case.quorum else library.orders
    mine = plain.train_replicas(SMALL, case, model, 16, 3, 0, lambda _: None, orders)
    assert library.samples == mine.samples
    assert library.loss == pytest.approx(mine.loss, rel=0.1 if case.quorum else 1e-5)
    assert bool(library.incomplete) is case.quorum


def test_cells_are_recorded_merged_and_shown(tmp_path: Path) -> None:
    here = {"loss": 2.0, "date": "2026-11-02"}
    mine = convergence.Results(tmp_path / "mine.json", SMALL, "text")
    for start, seed in (("trained", 0), ("random", 1)):
        mine.add(Cell(start, 4, "plain", "joined", seed), here)
    theirs = convergence.Results(tmp_path / "theirs.json", SMALL, "text")
    theirs.add(Cell("trained", 4, "plain", "joined", 0), here | {"loss": 1.0, "date": "2026-11-01"})
    theirs.add(Cell("trained", 4, "plain", "int8-h30", 0), here | {"loss": 2.04})
    assert mine.merge(tmp_path / "theirs.json") == 1
    assert [cell["loss"] for cell in mine.cells.values()] == [2.0, 2.04, 2.0]
    page = convergence.page(mine.cells)
    assert "| DiLoCo, H=30, int8 | 0.002 | 2.0400 | +2.00% | 1/120 | - | 2.0400 |" in page
    assert "| +2.00% (DiLoCo, H=30, int8, 1/120) | met |" in page
    with pytest.raises(ValueError, match="results of another text"):
        convergence.Results(tmp_path / "mine.json", SMALL, "another")
