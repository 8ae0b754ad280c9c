"""`RunSampler` in real processes that come and die, with loaders that fetch ahead, and alone."""

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from averaging import DecentralizedAverager, LocalSGD
from averaging.common import pack
from averaging.data import RunSampler
from averaging.data.dealing import MAX_BLOCKS
from averaging.errors import ConfigError, StateError
from tests.data.data_worker import Numbers
from tests.support.ports import free_address
from tests.support.processes import JsonProcess
from tests.support.training import model_of

LENGTH, BATCH, BLOCK = 1501, 4, 24


def worker(stack: ExitStack, **options: Any) -> JsonProcess:
    given = {"length": LENGTH, "batch": BATCH, "block": BLOCK, "epochs": 1, "seconds": 0.02} | options
    process = stack.enter_context(JsonProcess("python", "-m", "tests.data.data_worker", json.dumps(given)))
    process.expect("imported")
    return process


def trained_by(process: JsonProcess) -> list[int]:
    """The samples that it has trained until its end."""
    process.wait()
    return [sample for event in process.events("trained") for sample in event["samples"]]


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_four_peers_with_one_killed_and_one_joining(workers: int, stack: ExitStack) -> None:
    """Each sample is trained, and at most one block twice, also if loaders have fetched further ones."""
    addresses = [free_address() for _ in range(5)]
    processes = [
        worker(stack, listen=address, join=addresses[:1] if number else [], peers=4, workers=workers, pause_after=pause)
        for number, (address, pause) in enumerate(zip(addresses, (20, 20, 20, 20, None), strict=True))
    ]
    for process in processes[:4]:
        process.send("")
    for process in processes[:4]:
        assert process.expect("ready")["together"]
    for _ in range(BLOCK // BATCH + 3):  # in the midst of its second block
        processes[1].expect("trained")
    processes[1].kill()
    processes[4].send("")  # while the others are in the midst of the epoch
    processes[4].expect("trained")
    for process in (processes[0], *processes[2:4]):
        process.send("")
    digests = {process.expect("finished")["digest"] for process in (processes[0], *processes[2:])}
    assert len(digests) == 1
    shares = [trained_by(process) for process in processes]
    assert all(shares), "each peer has trained a part"
    trained = Counter(sample for share in shares for sample in share)
    assert trained.keys() == set(range(LENGTH)), "a sample was not trained"
    assert trained.total() - LENGTH <= BLOCK
    assert max(trained.values()) <= 2


@pytest.mark.long
def test_a_site_of_two_ranks_and_a_peer_share_an_epoch(stack: ExitStack, tmp_path: Path) -> None:
    """Both ranks of the site make as many steps, also in the last block, which is shorter."""
    addresses = [free_address() for _ in range(2)]
    site: dict[str, Any] = {"listen": addresses[0], "peers": 2, "ranks": 2, "store": str(tmp_path / "store")}
    ranks = [worker(stack, length=501, rank=rank, **site) for rank in range(2)]
    alone = worker(stack, length=501, listen=addresses[1], join=addresses[:1], peers=2)
    for process in (*ranks, alone):
        process.send("")
    assert len({process.expect("finished")["digest"] for process in (*ranks, alone)}) == 1
    shares = [trained_by(process) for process in (*ranks, alone)]
    assert all(shares)
    assert len(ranks[0].events("trained")) == len(ranks[1].events("trained"))
    trained = Counter(sample for share in shares for sample in share)
    assert trained.keys() == set(range(501))
    assert trained.total() - 501 <= 1, "one rank had no sample of its own at the end"


@pytest.mark.parametrize("peers", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_pass_belongs_to_one_epoch_and_each_epoch_has_each_sample_once(peers: int, stack: ExitStack) -> None:
    """Peers that end an epoch at different moments do not run on into the next one in the same pass."""
    addresses = [free_address() for _ in range(peers)]
    processes = [
        worker(
            stack,
            length=203,
            block=8,
            epochs=3,
            seconds=0.1,
            listen=address,
            join=addresses[:1] if number else [],
            peers=peers,
        )
        for number, address in enumerate(addresses)
    ]
    for process in processes:
        process.send("")
    assert len({process.expect("finished")["digest"] for process in processes}) == 1
    trained = Counter(
        (event["epoch"], sample)
        for process in processes
        for event in process.events("trained")
        for sample in event["samples"]
    )
    assert trained == Counter((epoch, sample) for epoch in range(3) for sample in range(203))


@pytest.fixture
def opt() -> Iterator[DecentralizedAverager]:
    model = model_of(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with DecentralizedAverager(
        inner, model=model, run_id="run", strategy=LocalSGD(1000), listen="127.0.0.1:0"
    ) as averager:
        yield averager


def train(opt: DecentralizedAverager, samples: torch.Tensor, *, tell: bool = True) -> list[int]:
    for group in opt.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    opt.step(batch_size=len(samples) if tell else None)
    return samples.tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_alone_each_epoch_has_each_sample_once(opt: DecentralizedAverager, workers: int, drop_last: bool) -> None:
    numbers = Numbers(103)
    sampler = RunSampler(numbers, opt, block_size=8)
    loader = DataLoader(numbers, batch_size=4, sampler=sampler, num_workers=workers, drop_last=drop_last)
    epochs: dict[int, list[int]] = {}
    for epoch in sampler.epochs(2):
        for samples in loader:
            epochs.setdefault(epoch, []).extend(train(opt, samples))
    assert list(epochs) == [0, 1]
    lost = 103 % 4 if drop_last else 0
    for seen in epochs.values():
        assert len(seen) == len(set(seen)) == 103 - lost
    assert epochs[0] != epochs[1], "another order"
    statistics = sampler.statistics
    assert (statistics.epoch, statistics.blocks_here, statistics.most_duplicates) == (2, 26, 0)


def test_a_loop_without_epochs_goes_on_with_the_next_one(opt: DecentralizedAverager) -> None:
    sampler = RunSampler(20, opt, block_size=4, shuffle=False)
    seen = [[train(opt, samples) for samples in DataLoader(Numbers(20), 4, sampler=sampler)] for _ in range(2)]
    assert [sorted(chain(*each)) for each in seen] == [list(range(20))] * 2
    assert sampler.epoch == 1


def test_a_loop_that_is_left_early_gives_back_what_it_has_not_trained(opt: DecentralizedAverager) -> None:
    numbers = Numbers(64)
    sampler = RunSampler(numbers, opt, block_size=8)
    loader = DataLoader(numbers, batch_size=4, sampler=sampler, num_workers=2, prefetch_factor=4)
    seen: list[int] = []
    for number, samples in enumerate(loader):
        if number == 3:
            break
        seen += train(opt, samples)
    assert sampler.state_dict()["epoch"] == 0
    rest = [sample for samples in loader for sample in train(opt, samples)]
    assert set(seen) | set(rest) == set(range(64))
    assert len(seen) + len(rest) - 64 == 4, "a half of a block was trained twice"


def test_a_checkpoint_goes_on_with_what_was_not_trained(opt: DecentralizedAverager) -> None:
    numbers = Numbers(64)
    sampler = RunSampler(numbers, opt, block_size=8)
    loader = iter(DataLoader(numbers, batch_size=4, sampler=sampler, num_workers=2))
    seen = [sample for _ in range(6) for sample in train(opt, next(loader))]
    state = pickle.loads(pickle.dumps(sampler.state_dict()))
    del loader
    resumed = RunSampler(numbers, opt, block_size=8)
    resumed.load_state_dict(state)
    rest = [sample for samples in DataLoader(numbers, 4, sampler=resumed) for sample in train(opt, samples)]
    assert sorted(seen + rest) == list(range(64)), "what the loader had fetched ahead does not count"
    other = RunSampler(numbers, opt, block_size=16)
    with pytest.raises(StateError, match="another length, block_size or seed"):
        other.load_state_dict(state)
    for wrong in ({}, {**state, "done": "x"}, {**state, "epoch": -1}, {**state, "epoch": True}):
        with pytest.raises(StateError, match="malformed"):
            resumed.load_state_dict(wrong)


def test_without_a_batch_size_it_is_said_what_that_costs(
    opt: DecentralizedAverager, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = RunSampler(20, opt, block_size=4)
    for epoch in sampler.epochs(1):
        for samples in DataLoader(Numbers(20), 4, sampler=sampler):
            train(opt, samples, tell=False)
            assert (epoch, sampler.statistics.done) == (0, 0)
    assert sampler.epoch == 1
    assert caplog.text.count("give RunSampler or opt.step a batch_size") == 1
    told = RunSampler(20, opt, block_size=4, batch_size=4)
    for samples in DataLoader(Numbers(20), 4, sampler=told):
        train(opt, samples, tell=False)
    assert told.statistics.done == 5


def test_a_batch_size_of_the_sampler_counts_samples_while_the_steps_count_tokens(opt: DecentralizedAverager) -> None:
    sampler = RunSampler(20, opt, block_size=4, batch_size=4)
    done = []
    for _ in DataLoader(Numbers(20), 4, sampler=sampler, num_workers=1):  # it fetches ahead
        opt.step(batch_size=4 * 512)
        done.append(sampler.statistics.done)
    assert done == [1, 2, 3, 4, 5]


class Endless:
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Endless(), {}, "Endless has no length; index the samples"),
        (10, {"block_size": 0}, "block_size must be"),
        (2 * MAX_BLOCKS, {"block_size": 1}, "give a block_size of at least 2"),
        (10, {"seed": -1}, "seed must be"),
    ],
)
def test_wrong_arguments_raise(opt: DecentralizedAverager, dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunSampler(dataset, opt, **options)
    with pytest.raises(ConfigError, match="opt must be a DecentralizedAverager, not SGD"):
        RunSampler(10, torch.optim.SGD(model_of(0).parameters(), lr=0.1))  # type: ignore[arg-type]


def test_only_a_majority_that_divides_otherwise_is_an_error_and_garbage_is_ignored(
    opt: DecentralizedAverager, caplog: pytest.LogCaptureFixture
) -> None:
    RunSampler(20, opt, block_size=4)
    records = opt.data_records
    assert records is not None
    for garbage in (b"", b"\xff" * 100, pack([1, 2, 3])):
        records._note({"10.0.0.1:1": garbage})
        RunSampler(20, opt, block_size=4)
    assert "10.0.0.1:1 announces no data that can be read" in caplog.text
    other = pack([b"otherwis", 0, 0, b"", [], 0])
    records._note({"10.0.0.2:3": other})
    RunSampler(20, opt, block_size=4)
    assert "10.0.0.2:3 divides the dataset otherwise, so its samples and ours may be the same" in caplog.text
    records._note({"10.0.0.2:1": other, "10.0.0.3:1": other})
    with pytest.raises(ConfigError, match=r"10.0.0.2:1, 10.0.0.3:1 of this run divide their dataset otherwise"):
        RunSampler(20, opt, block_size=4)
