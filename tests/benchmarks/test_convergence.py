"""The convergence benchmark: its plain reference beside the library, its cells, and what counts as met."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from averaging import Peer
from averaging.protocol import TopK
from averaging.tensors import BlockLayout, Contribution, SparseTensor, encode_union
from benchmarks.convergence import plain, runner, train
from benchmarks.convergence.cases import Case, Cell, all_cases, all_cells, diloco, page_cells, top_k
from benchmarks.convergence.library import train_with_library
from benchmarks.convergence.report import Recorded, page, verdicts
from benchmarks.convergence.runner import Job, Results, Runner, estimate, minutes, orders_for, this_machine
from benchmarks.convergence.train import Recipe, Text, new_model, start_model
from examples.language_model import Size

SMALL = Recipe(steps=8, batch=2, size=Size(layers=1, width=16, heads=2, context=16), snapshots=2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the benchmark trains; more threads than cores would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SHAPES = [(), (1,), (4096,), (5000,), (64, 64), (256, 64), (70, 130), (100, 20), (3, 5, 40), (0, 4)]


# The reference


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_has_the_blocks_of_the_library(shape: tuple[int, ...]) -> None:
    layout = BlockLayout(shape)
    values = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    if not values.numel():
        return
    order, runs = plain.blocks(shape)
    assert torch.equal(values.reshape(-1)[order], layout.to_blocks(values))
    assert [(run.start, run.stop, run.size) for run in runs] == [(run.start, run.stop, run.size) for run in layout.runs]


@given(
    st.sampled_from([(64,), (70, 130), (256, 64)]),
    st.sampled_from([16, 64]),
    st.sampled_from([2, 4, 8]),
    st.integers(0, 99),
)
def test_the_reference_sends_what_receivers_of_the_library_decode(
    shape: tuple[int, ...], keeps: int, bits: int, seed: int
) -> None:
    layout = BlockLayout(shape)
    flat = torch.randn(math.prod(shape), generator=torch.Generator().manual_seed(seed))
    kept = plain.largest(flat, plain.blocks(shape)[1], keeps)
    values = torch.zeros_like(flat).index_copy_(0, kept, plain.quantised(flat[kept], bits))
    torch.testing.assert_close(values, SparseTensor.of(flat, layout, TopK(1 / keeps, bits)).dense(), rtol=1e-6, atol=0)


def test_what_is_sent_and_the_residual_are_all_that_changed() -> None:
    """With the decay written out: residual = decay · residual + change - sent."""
    case = top_k(15, 16, 2)
    changes = [torch.randn(64 * 70, generator=torch.Generator().manual_seed(peer)) for peer in range(3)]
    residuals = [torch.randn(64 * 70, generator=torch.Generator().manual_seed(9 + peer)) for peer in range(3)]
    order = plain.blocks((64, 70))[0]
    exact = [torch.add(new[order], old, alpha=case.decay) for old, new in zip(residuals, changes, strict=True)]
    average = plain.top_k_round(case, (64, 70), changes, residuals, [1, 1, 1])
    for before, after in zip(exact, residuals, strict=True):
        assert 0 < (before != after).float().mean() < 0.1
    assert 0.06 < (average != 0).float().mean() < 0.2


def test_a_mean_over_senders_and_a_mean_over_all() -> None:
    sent = [torch.tensor([3.0, 0.0, 4.0]), torch.tensor([3.0, 4.0, 0.0])]
    chosen = [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0])]
    assert plain.mean_of_sparse(sent, chosen, [1, 1], senders=True).tolist() == [3.0, 4.0, 4.0]
    assert plain.mean_of_sparse(sent, chosen, [1, 3], senders=False).tolist() == [3.0, 3.0, 1.0]


def test_a_contribution_is_scaled_to_the_median_norm_at_most() -> None:
    sent = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([90.0])]
    assert plain.mean_of_sparse(sent, [torch.ones(1)] * 3, [1, 1, 1], senders=True).tolist() == pytest.approx(
        [5 / 3]
    )  # of norms 1, 2 and 90 the median is 2


@pytest.mark.parametrize("name", ["unequal-h30", "muon-h15", "quorum-h15"])
def test_the_library_trains_with_unequal_speeds_and_with_muon(name: str) -> None:
    """With a quorum nobody waits for the slow peer, so there is nothing to compare with in plain torch."""
    case, model = replace(all_cases()[name], every=10), new_model(SMALL, 0)
    library = train_with_library(SMALL, case, model, 16, 3, 0, lambda _: None)
    orders = () if case.quorum else library.orders
    mine = plain.train_replicas(SMALL, case, model, 16, 3, 0, lambda _: None, orders)
    assert library.samples == mine.samples
    if case.quorum:
        assert library.incomplete
        assert library.loss == pytest.approx(mine.loss, rel=0.1)
    else:
        assert library.loss == pytest.approx(mine.loss, rel=1e-5)


def test_peers_of_unequal_speed_train_on_as_many_samples() -> None:
    case = all_cases()["unequal-h30"]
    model = new_model(SMALL, 0)
    trained = plain.train_replicas(SMALL, case, model, 10, 4, 0, lambda _: None)
    assert trained.samples == pytest.approx(10 * 4 * 2, rel=0.03)
    assert trained.rounds == 1


@pytest.mark.parametrize(
    ("case", "apart"),
    [
        (diloco(4, "int8"), 1e-5),
        (top_k(4, 16, 2), 0.0),
        (replace(all_cases()["muon-top-k-32-2bit-h15"], every=4), 0.0),
    ],
    ids=["int8", "top-k", "Muon, top-k"],
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


@pytest.mark.parametrize(("keeps", "bits", "numel"), [(64, 2, 64), (32, 2, 256), (16, 8, 4096), (16, 8, 16384)])
def test_the_reference_answers_as_a_reducer_does(keeps: int, bits: int, numel: int) -> None:
    """Twice, since what the first reply has lost is added to the second."""
    case, top = top_k(15, keeps, bits), TopK(1 / keeps, bits)
    shape = (numel,) if numel <= 4096 else (numel // 64, 64)
    residuals, lost = [torch.zeros(numel) for _ in range(4)], torch.zeros(numel)
    layout, theirs = BlockLayout(shape), torch.zeros(numel)
    for turn in range(2):
        changes = [torch.randn(numel, generator=torch.Generator().manual_seed(9 * turn + peer)) for peer in range(4)]
        exact = [
            torch.add(layout.to_blocks(change.view(shape)), residual, alpha=case.decay)
            for change, residual in zip(changes, residuals, strict=True)
        ]
        sparse = [SparseTensor.of(values, layout, top) for values in exact]
        parts = [one.values(0, numel) for one in sparse]
        norms = [float(torch.linalg.vector_norm(part.values, dtype=torch.float64)) for part in parts]
        scales = [min(1.0, statistics.median_low(norms) / norm) for norm in norms]
        came = [
            Contribution(part, one.wire(0, numel).buffer, scale=scale)
            for part, one, scale in zip(parts, sparse, scales, strict=True)
        ]
        reply = encode_union(came, layout.runs[0].size, top, theirs)
        average = plain.top_k_round(case, shape, changes, residuals, [1] * 4, lost)
        assert torch.equal(average, layout.from_blocks(reply.part.dense()).reshape(-1))
        if reply.loss is not None:
            theirs[reply.part.indices] = reply.loss
        assert torch.equal(lost, theirs)


@pytest.mark.asyncio
async def test_receipts_have_14_bits_for_each_weight_that_is_sent_and_as_many_times_back_as_there_are_members() -> None:
    """Within 3 %; the matrix is one part, so two of three members send no more than their contribution."""
    top = TopK(1 / 64, 2)
    matrices = [torch.randn(512, 512, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    async with AsyncExitStack() as stack:
        peers: list[Peer] = []
        for matrix in matrices:
            join = [peers[0].endpoint] if peers else []
            peers.append(await stack.enter_async_context(Peer([matrix], run_id="bytes", join=join, group_size=3)))
        topics = [
            peer.topic("t", {"w": matrix}, adopt="whole", compression="top_k", top_k=top, decay=0.95)
            for peer, matrix in zip(peers, matrices, strict=True)
        ]
        rounds = [peer.average(topic=topic) for peer, topic in zip(peers, topics, strict=True)]
        *senders, reducer = sorted(await asyncio.gather(*rounds), key=lambda receipt: receipt.bytes_sent)
    contribution = 512 * 512 / 4096 * top.kept(4096) * 14 / 8
    for receipt in senders:
        assert receipt.bytes_sent == pytest.approx(contribution, rel=0.03)
        assert receipt.bytes_received == pytest.approx(3 * contribution, rel=0.03)
    assert reducer.bytes_received == pytest.approx(2 * contribution, rel=0.03)


# The cells


def test_the_cells_of_the_page_come_first_and_each_is_there_once() -> None:
    cells, page = all_cells(), page_cells()
    assert len(cells) == len(set(cells)) > 1000
    assert cells[: len(page)] == page
    assert sum(cell.by == "plain" for cell in page) <= 135
    first = {cell.case for cell in cells[:24]}
    assert {"joined", "int8-h30", "top-k-32-2bit-h15", "top-k-64-2bit-h15", "top-k-64-2bit-h30"} <= first
    library = {cell.case for cell in page if cell.by == "library"}
    assert {"muon-h30", "streaming-h30", "quorum-h30", "unequal-h30", "top-k-32-2bit-h15"} <= library
    grid = {(cell.peers, cell.seed, cell.start) for cell in cells if cell.case == "top-k-128-8bit-h100-no-decay"}
    assert len(grid) == 8


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("int8-h30", 120), ("top-k-32-2bit-h15", 1097), ("top-k-64-2bit-h30", 4389), ("gradients", 1), ("joined", 0)],
)
def test_how_many_times_fewer_bits_a_peer_contributes(name: str, ratio: int) -> None:
    assert round(all_cases()[name].ratio) == ratio


@pytest.mark.parametrize("cell", [cell for cell in page_cells() if cell.by == "replayed"], ids=str)
def test_what_is_replayed_was_trained_by_the_library_before(cell: Cell) -> None:
    cells = page_cells()
    library = replace(cell, by="library")
    assert cells.index(library) < cells.index(cell)
    assert orders_for(Job(cell), {}) is None
    assert orders_for(Job(cell), {str(library): {"orders": [[1, 0]]}}) == [[1, 0]]
    assert orders_for(Job(library), {}) == []


JOB = Job(Cell("random", 4, "plain", "joined", 0))
RESULT = {"loss": 2.0, "seconds": 30.0, "date": "2026-11-01", "machine": this_machine()}


def test_results_of_two_processes_are_both_kept(tmp_path: Path) -> None:
    file = tmp_path / "convergence.json"
    one, other = Results(file, SMALL), Results(file, SMALL)
    one.add("a/4/plain/joined/0", RESULT)
    other.add("a/4/plain/joined/1", RESULT)
    assert list(one.read()["cells"]) == ["a/4/plain/joined/0", "a/4/plain/joined/1"]


def test_cells_of_other_machines_are_added_and_the_newer_one_is_kept(tmp_path: Path) -> None:
    mine, theirs = (Results(tmp_path / name, SMALL, "text") for name in ("mine.json", "theirs.json"))
    for number, date in enumerate(("2026-11-03", "2026-11-01")):
        mine.add(f"a/4/plain/joined/{number}", RESULT | {"date": date, "loss": 1.0})
    for number in range(3):
        theirs.add(f"a/4/plain/joined/{number}", RESULT | {"date": "2026-11-02"})
    assert mine.merge(tmp_path / "theirs.json") == 2
    assert [cell["loss"] for cell in mine.read()["cells"].values()] == [1.0, 2.0, 2.0]
    assert mine.merge(tmp_path / "theirs.json") == 0


def test_cells_of_another_text_are_not_added(tmp_path: Path) -> None:
    mine, theirs = (Results(tmp_path / f"{text}.json", SMALL, text) for text in ("one", "other"))
    for results in (mine, theirs):
        results.add("a/4/plain/joined/0", RESULT)
    with pytest.raises(ValueError, match="results of another text"):
        mine.merge(tmp_path / "other.json")
    with pytest.raises(ValueError, match="results of another text"):
        Results(tmp_path / "one.json", SMALL).merge(tmp_path / "other.json")


def test_the_text_is_kept_for_other_versions_of_python(tmp_path: Path) -> None:
    files = [Path(json.__file__), Path(asyncio.__file__)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "standard_library", lambda: files)
        kept = Text.kept_in(tmp_path / "text.zip")
    assert Text.kept_in(tmp_path / "text.zip").digest == kept.digest == Text([f.read_bytes() for f in files]).digest
    assert Text([b"other"]).digest != kept.digest


def test_a_trained_start_is_made_once(tmp_path: Path) -> None:
    recipe, said = replace(SMALL, joint_steps=3, joint_peers=2), list[str]()
    first, second = (start_model(recipe, "trained", 0, tmp_path, said.append) for _ in range(2))
    assert len(said) == 1
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    (file,) = tmp_path.glob("start-0-*.safetensors")
    assert not torch.equal(next(first.parameters()), next(new_model(recipe, 0).parameters()))
    assert file.stat().st_size < 100_000


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": {}}', '{"recipe": {"steps": 7}, "text": "a", "cells": {}}'])
def test_foreign_results_are_not_overwritten(text: str, tmp_path: Path) -> None:
    file = tmp_path / "convergence.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="has (no )?results of"):
        Results(file, SMALL)
    assert file.read_text() == text


class AtOnce:
    """A pool whose jobs are done as they are submitted."""

    def __init__(self, *_: object, **__: object) -> None:
        self.done: list[Job] = []
        self.hanging: set[str] = set()
        self.failing: set[str] = set()
        self.closed = False
        self.now = 0.0

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, running: Iterable[Future[Any]], limit: float, **_: object) -> tuple[set[Future[Any]], set[Any]]:
        done = {future for future in running if future.done()}
        self.now += 0.0 if done else limit
        return done, set()

    def submit(self, _: object, recipe: Recipe, job: Job, *__: object) -> Future[dict[str, Any]]:
        self.done.append(job)
        future: Future[dict[str, Any]] = Future()
        if job.key in self.failing:
            future.set_exception(RuntimeError("not all peers averaged"))
        elif job.key not in self.hanging:
            future.set_result(dict(RESULT))
        return future

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        self.closed = not wait and cancel_futures


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> AtOnce:
    made = AtOnce()
    monkeypatch.setattr(runner, "ProcessPoolExecutor", lambda *_, **__: made)
    monkeypatch.setattr(runner, "wait", made.wait)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def jobs(*seeds: int) -> list[Job]:
    return [Job(Cell("random", 4, "plain", "joined", seed)) for seed in seeds]


def test_what_is_recorded_is_not_run_again(tmp_path: Path, pool: AtOnce) -> None:
    results = Results(tmp_path / "convergence.json", SMALL)
    assert Runner(SMALL, results, tmp_path, 2, math.inf).run(jobs(0)) == 0
    assert Runner(SMALL, results, tmp_path, 2, math.inf).run(jobs(0, 1)) == 0
    assert [job.cell.seed for job in pool.done] == [0, 1]
    assert len(results.read()["cells"]) == 2


def test_nothing_is_begun_that_would_not_be_done_in_time(tmp_path: Path, pool: AtOnce) -> None:
    """30 s were needed for such a cell; how long the first one takes is not known."""
    results = Results(tmp_path / "convergence.json", SMALL)
    assert Runner(SMALL, results, tmp_path, 1, until=20.0).run(jobs(0, 1)) == 1
    assert [job.cell.seed for job in pool.done] == [0]


def test_a_cell_that_is_cut_off_loses_only_itself(tmp_path: Path, pool: AtOnce) -> None:
    results = Results(tmp_path / "convergence.json", SMALL)
    first, second = jobs(0, 1)
    pool.hanging.add(second.key)
    assert Runner(SMALL, results, tmp_path, 2, until=20.0).run([first, second]) == 1
    assert list(results.read()["cells"]) == [first.key]
    assert pool.closed


def test_a_cell_that_fails_keeps_no_other_from_its_end(tmp_path: Path, pool: AtOnce) -> None:
    results = Results(tmp_path / "convergence.json", SMALL)
    first, second = jobs(0, 1)
    pool.failing.add(first.key)
    runner = Runner(SMALL, results, tmp_path, 1)
    assert runner.run([first, second]) == 0
    assert runner.failed == [first]
    assert list(results.read()["cells"]) == [second.key]


def test_estimates_are_in_proportion_to_steps_and_peers() -> None:
    recipe = Recipe(steps=100, random_steps=300)
    cells = {"trained/4/plain/a/0": {"seconds": 40.0}, "trained/8/plain/a/0": {"seconds": 80.0}}
    assert estimate(recipe, cells, Job(Cell("random", 4, "library", "b", 0))) == pytest.approx(120)
    assert estimate(recipe, {}, JOB) == 0
    elsewhere = {key: cell | {"machine": "another"} for key, cell in cells.items()}
    assert estimate(recipe, elsewhere, JOB) == 0
    assert [minutes(seconds) for seconds in (5, 65.5, 3600)] == ["0:05", "1:06", "1:00:00"]


def test_a_rate_that_is_tried_has_a_result_of_its_own() -> None:
    tried = Job(JOB.cell, 0.003)
    assert (tried.key, tried.case.lr) == ("random/4/plain/joined/0@0.003", 0.003)


# The page


def recorded(losses: dict[str, float], **more: Any) -> dict[str, Any]:
    cell = {
        "tuning_loss": 2.0,
        "curve": [3.0, 2.0],
        "lr": 1e-3,
        "seconds": 1.0,
        "sent": 0.0,
        "date": "2026",
        "commit": "c",
    }
    cell |= {"machine": "m", "python": "3", "torch": "2"} | more
    cells = {key: cell | {"loss": loss} for key, loss in losses.items()}
    return {"recipe": json.loads(json.dumps(asdict(Recipe()))), "text": "t", "cells": cells}


@pytest.mark.parametrize(("loss", "met"), [(2.0599, True), (2.0601, False)])
def test_verdicts_are_of_the_best_row_that_sends_so_little(loss: float, met: bool) -> None:
    losses = {"joined": 2.0, "top-k-32-2bit-h15": loss, "top-k-128-2bit-h15": 2.5, "int8-h15": 2.0}
    results = recorded({f"trained/{peers}/plain/{name}/0": one for peers in (4, 8) for name, one in losses.items()})
    found = {one.wanted.split(" of ")[0]: one for one in verdicts(Recorded(results))}
    assert list(found) == [  # int8 every 15 steps is only 1/60
        f"{peers} peers, top-k, 1/{ratio}" for peers in (4, 8) for ratio in ("1,000", "2,000", "4,000")
    ]
    assert found["4 peers, top-k, 1/1,000"].met is met
    assert found["8 peers, top-k, 1/4,000"].measured == "+25.00% (top-k 1/128, 2 bit, H=15, 1/4,389)"


@pytest.mark.parametrize(("loss", "met"), [(2.13, True), (2.15, False)])
def test_a_quorum_is_compared_with_equal_machines(loss: float, met: bool) -> None:
    losses = {"plain/diloco-h30/0": 2.1, "library/quorum-h30/0": loss}
    (found,) = verdicts(Recorded(recorded({f"trained/4/{name}": one for name, one in losses.items()})))
    assert "quorum of the others, H=30" in found.wanted
    assert found.met is met


def test_two_rounds_tell_the_bytes_of_a_training() -> None:
    cell = Cell("trained", 8, "receipts", "top-k-64-2bit-h30", 0)
    assert cell in page_cells()
    assert cell.steps(900) == 60
    results = recorded({str(cell): 2.4, "trained/8/plain/top-k-64-2bit-h15/0": 2.1}, steps=60, sent=6000.0)
    row = Recorded(results).of("trained", 8)["top-k-64-2bit-h15"]
    assert Recorded(results).sent(row) == 6000.0 * (900 / 60) * 2


def test_losses_are_compared_seed_by_seed() -> None:
    losses = {"joined/0": 2.0, "joined/1": 3.0, "int8-h30/1": 3.03, "diloco-h30/2": 1.0}
    results = recorded({f"trained/4/plain/{name}": one for name, one in losses.items()})
    rows = Recorded(results).of("trained", 4)
    assert rows["int8-h30"].excess(rows["joined"]) == pytest.approx(0.01)
    assert rows["diloco-h30"].excess(rows["joined"]) is None


def test_bytes_of_receipts_serve_for_every_pause() -> None:
    losses = {"library/int8-h30/0": 2.0, "plain/int8-h15/0": 2.0, "plain/diloco-h30/0": 2.0}
    results = recorded({f"trained/4/{name}": one for name, one in losses.items()}, sent=100.0)
    found = Recorded(results)
    rows = found.of("trained", 4)
    assert (found.sent(rows["int8-h30"]), found.sent(rows["int8-h15"])) == (100.0, 200.0)
    assert found.sent(rows["diloco-h30"]) is None


def test_the_page_says_what_was_not_run_and_where_the_library_differs(tmp_path: Path) -> None:
    losses = {"plain/joined/0": 2.0, "plain/int8-h30/0": 2.1, "library/int8-h30/0": 2.1021, "plain/joined/0@0.001": 1.9}
    losses["replayed/int8-h30/0"] = 2.1021
    results = recorded({f"trained/4/{name}": one for name, one in losses.items()})
    text = page(results, tmp_path)
    assert (
        "| DiLoCo, H=30, int8, trained start, 4 peers | 0 | 2.10000 | 2.10210 | +0.1000% | 2.10210 (+0.0000%) |" in text
    )
    assert "| trained | 4 | plain | 2 of" in text
    assert "| trained | 8 | plain | 0 of" in text
    assert "at most 0.100% apart in 1 trainings | **missed** |" in text
    assert "at most 0.000% apart in 1 trainings | met |" in text
    assert "| trained/4/plain/joined | 0.001 | 2.0000 | 1.9000 |" in text


def test_the_learning_rate_rises_then_falls() -> None:
    factors = [Recipe().lr_factor(step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.2)
    assert max(factors) == pytest.approx(1.0, abs=0.01)
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[-1] == pytest.approx(0.05)
