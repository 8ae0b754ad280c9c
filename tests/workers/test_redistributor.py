"""Plans of transfers, compared with a dumb reference on random layouts, and the division of samples over ranks."""

import asyncio
from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st

from averaging.errors import WorkerError
from averaging.rl.workers.backend import ListDataset, Sample
from averaging.rl.workers.data_manager import DataManager, OwnerTracker, Redistributor, balance
from averaging.rl.workers.requests import Step, pack, unpack
from tests.workers.memory_workers import MemoryWorkers

Held = dict[tuple[str, str], set[str]]
"""Workers by sample and tensor."""

WORKERS = ["w0", "w1", "w2", "w3"]
KEYS = ["prompt", "answer", "reward"]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Held, dict[str, list[str]], list[str]]:
    """Who holds what, which samples each worker wants, and which tensors."""
    ids = [f"s{n}" for n in range(draw(st.integers(1, 6)))]
    owners = st.sets(st.sampled_from(WORKERS), min_size=1)
    held = {(sample, key): draw(owners) for sample in ids for key in KEYS}
    wanted = {worker: draw(st.lists(st.sampled_from(ids), unique=True)) for worker in WORKERS}
    return held, wanted, draw(st.lists(st.sampled_from(KEYS), min_size=1, unique=True))


def tracker_of(held: Held) -> OwnerTracker:
    tracker = OwnerTracker()
    for (sample, key), workers in held.items():
        for worker in workers:
            tracker.add(worker, [sample], [key])
    return tracker


def reference(held: Held, wanted: dict[str, list[str]], keys: list[str]) -> set[tuple[str, str, str]]:
    """What must be received: (worker, sample, tensor)."""
    return {
        (worker, sample, key)
        for worker, ids in wanted.items()
        for sample in ids
        for key in keys
        if worker not in held[sample, key]
    }


def transfers(steps: list[Step]) -> list[tuple[str, str, str, str]]:
    """The single transfers of a plan, from the definition of its steps: (source, worker, sample, tensor)."""
    found = []
    for step in steps:
        assert step.srcs == [step.root]
        ids_of = step.ids * len(step.dsts) if step.comm_type == "bcast" else step.ids
        for worker, ids in zip(step.dsts, ids_of, strict=True):
            found += [(step.root, worker, sample, key) for sample in ids for key in step.keys]
    return found


@given(layouts())
def test_each_missing_tensor_is_sent_once_by_an_owner(layout: tuple[Held, dict[str, list[str]], list[str]]) -> None:
    held, wanted, keys = layout
    steps = Redistributor(tracker_of(held)).plan(wanted, keys)
    planned = transfers([unpack(pack(step), Step) for step in steps])
    assert len(planned) == len(set(planned))
    assert {(worker, sample, key) for _, worker, sample, key in planned} == reference(held, wanted, keys)
    assert len(planned) == len(reference(held, wanted, keys))
    for source, _, sample, key in planned:
        assert source in held[sample, key]
    received = [
        (source, worker, sample, key)
        for worker in WORKERS
        for step in steps
        for source, ids in step.sources_of(worker)
        for sample in ids
        for key in step.keys
    ]
    assert Counter(received) == Counter(planned)


@given(layouts())
def test_data_managers_execute_a_plan(layout: tuple[Held, dict[str, list[str]], list[str]]) -> None:
    held, wanted, keys = layout
    values = {place: torch.tensor([n, n + 1]) for n, place in enumerate(held)}

    async def main() -> None:
        network = MemoryWorkers()
        managers = {worker: DataManager(worker, network.connect) for worker in WORKERS}
        for worker, manager in managers.items():
            manager.endpoints = {name: f"{name}:1" for name in WORKERS}
            network.serve_data(f"{worker}:1", manager)
            for (sample, key), workers in held.items():
                if worker in workers:
                    manager.store([Sample(sample, {key: values[sample, key]})])
        steps = Redistributor(tracker_of(held)).plan(wanted, keys)
        await asyncio.gather(*(manager.redistribute(steps) for manager in managers.values()))
        for worker, manager in managers.items():
            batch = manager.get(wanted[worker], keys)
            for key in keys:
                assert [tensor.tolist() for tensor in batch[key]] == [
                    values[sample, key].tolist() for sample in wanted[worker]
                ]

    asyncio.run(main())


def test_alike_samples_are_a_bcast_and_others_a_scatter_and_owners_share_the_work() -> None:
    tracker = OwnerTracker()
    tracker.add("w0", ["a", "b"], ["x"])
    plan = Redistributor(tracker).plan
    [step] = plan({"w2": ["a", "b"], "w3": ["a", "b"]}, ["x"])
    assert step == Step("bcast", "w0", ["w0"], ["w2", "w3"], [["a", "b"]], ["x"])
    [step] = plan({"w2": ["a"], "w3": ["b"]}, ["x"])
    assert step == Step("scatter", "w0", ["w0"], ["w2", "w3"], [["a"], ["b"]], ["x"])
    assert Step("gather", "w2", ["w0", "w1"], ["w2"], [["a"], ["c"]], ["x"]).sources_of("w2") == [
        ("w0", ["a"]),
        ("w1", ["c"]),
    ]
    for worker in ("w0", "w1"):
        tracker.add(worker, [f"s{n}" for n in range(10)], ["x"])
    planned = transfers(plan({"w2": [f"s{n}" for n in range(10)]}, ["x"]))
    assert Counter(source for source, *_ in planned) == {"w0": 5, "w1": 5}


def test_what_nobody_holds_is_named_and_a_computed_tensor_makes_copies_outdated() -> None:
    tracker = OwnerTracker()
    tracker.add("w0", ["a"], ["x"])
    tracker.add("w1", ["a"], ["x"])
    tracker.remove_worker("w0")
    assert Redistributor(tracker).plan({"w1": ["a"]}, ["x"]) == []
    assert tracker.missing(["a"], ["x", "y"]) == ["a"]
    assert tracker.missing(["a"], ["x"]) == []
    tracker.remove_worker("w1")
    with pytest.raises(WorkerError, match="no worker holds 'x' of sample a, which w2 needs"):
        Redistributor(tracker).plan({"w2": ["a"]}, ["x"])
    tracker.add("w0", ["a"], ["x"])
    tracker.replace("w1", ["a"], ["x"])
    assert tracker.owners("a", "x") == {"w1"}
    tracker.remove(["a"])
    assert list(tracker) == []


@given(st.integers(0, 40), st.integers(1, 9))
def test_a_dataset_is_divided_without_overlap(count: int, parts: int) -> None:
    samples = [Sample(str(number), {"x": torch.zeros(1)}) for number in range(count)]
    found = []
    for rank in range(parts):
        dataset = ListDataset(samples)
        dataset.place(rank, parts)
        found.append([sample.id for sample in dataset.fetch(count)])
    assert sorted(sample for part in found for sample in part) == sorted(sample.id for sample in samples)
    sizes = [len(part) for part in found]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 6))
def test_samples_are_balanced_over_ranks(lengths: list[int], ranks: int) -> None:
    samples = {f"s{n}": length for n, length in enumerate(lengths)}
    found = balance(samples, ranks)
    assert sorted(sample for ids in found for sample in ids) == sorted(samples)
    sizes = [len(ids) for ids in found]
    assert max(sizes) - min(sizes) <= 1
    for ids in found:
        assert ids == sorted(ids, key=lambda sample: int(sample[1:]))
    if ranks > 1 and len(lengths) % ranks == 0:
        totals = [sum(samples[sample] for sample in ids) for ids in found]
        assert max(totals) - min(totals) <= 2 * max(lengths)
