"""Ranks of FSDP2 publish their parts; followers put them together, or take their own."""

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from averaging import TensorError, WeightFollower
from tests.support.ports import free_address, free_port
from tests.support.processes import JsonProcess, averaging_command, averaging_process
from tests.weights.shard_worker import model_of

PATIENCE = 60.0


class Ranks:
    """Processes of one group."""

    def __init__(self, stack: ExitStack, count: int, **options: Any) -> None:
        port = str(free_port())
        self.processes: list[JsonProcess] = []
        for rank in range(count):
            env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_PORT": port}
            env |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
            told = json.dumps(options | {"endpoint": free_address()})
            command = ("python", "-m", "tests.weights.shard_worker", told)
            self.processes.append(stack.enter_context(JsonProcess(*command, env=env)))

    def expect(self, event: str) -> list[dict[str, Any]]:
        return [process.expect(event, PATIENCE) for process in self.processes]

    def send(self, line: str) -> None:
        for process in self.processes:
            process.send(line)


def has(weights: WeightFollower, version: int) -> None:
    end = time.monotonic() + PATIENCE
    while weights.version != version:
        assert time.monotonic() < end
        weights.update(timeout=1.0)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def equal(model: torch.nn.Module, seed: int) -> bool:
    ours, theirs = model.state_dict(), model_of(seed).state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_follower_puts_the_parts_together_and_never_has_parts_of_two_versions(stack: ExitStack) -> None:
    publishers = Ranks(stack, 2, role="publish")
    join = publishers.expect("ready")[0]["endpoint"]
    publishers.send("1")
    publishers.expect("published")
    model = model_of(0)
    weights = stack.enter_context(WeightFollower(model, join=[join], join_timeout=PATIENCE))
    has(weights, 1)
    assert equal(model, 1)
    # Rank 1 dies before it publishes version 2, so that version does not exist.
    publishers.processes[1].send("die")
    publishers.processes[0].send("2")
    publishers.processes[1].wait(PATIENCE)
    assert not weights.update(timeout=1.0)
    assert weights.version == 1
    assert equal(model, 1)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_follow_what_they_hold(stack: ExitStack, count: int) -> None:
    publishers = Ranks(stack, 2, role="publish")
    join = publishers.expect("ready")[0]["endpoint"]
    publishers.send("3")
    publishers.expect("published")
    followers = Ranks(stack, count, role="follow", join=join)
    followers.expect("ready")
    followers.send("3")
    told = followers.expect("has")
    expected = {name: one.tolist() for name, one in model_of(3).state_dict().items()}
    assert all(one["weights"] == expected for one in told)
    nbytes = sum(one.nbytes for one in model_of(3).state_dict().values())
    if count == 2:  # it has got its own part only; the part of rank 0 has what is not divided, which both need
        assert told[0]["received"] < nbytes


@pytest.mark.long
def test_a_site_that_trains_publishes_each_global_step(stack: ExitStack) -> None:
    trainers = Ranks(stack, 2, role="train")
    join = trainers.expect("ready")[0]["endpoint"]
    model = model_of(0)
    weights = stack.enter_context(WeightFollower(model, join=[join], run_id="run", join_timeout=PATIENCE))
    for step in (1, 2, 4):
        trainers.send(str(step))
        told = trainers.expect("published")
        assert [one["version"] for one in told] == [step, step]
        has(weights, step)
        ours = {name: one.tolist() for name, one in model.state_dict().items() if "running" not in name}
        assert {name: told[0]["weights"][name] for name in ours if "num" not in name} == {
            name: values for name, values in ours.items() if "num" not in name
        }


def test_the_command_writes_the_whole_model_and_receives_only_what_changed(stack: ExitStack, tmp_path: Path) -> None:
    publishers = Ranks(stack, 3, role="publish")
    join = publishers.expect("ready")[0]["endpoint"]
    path = tmp_path / "now.safetensors"

    def written(version: int) -> dict[str, Any]:
        command = ("follow", join, "--output", str(path), "--once", "--min-version", str(version))
        with averaging_process(*command) as process:
            told = process.expect("written", PATIENCE)
            assert process.wait(PATIENCE) == 0
        assert told["version"] == version
        return told

    publishers.send("1")
    publishers.expect("published")
    expected = model_of(1).state_dict()
    first = written(1)
    assert first["received"] == first["bytes"] == sum(one.nbytes for one in expected.values())
    assert_same(load_file(path), expected)
    assert written(1) == first | {"received": 0}
    # It has cut the parts out of the file, so only the bias of the last layer is received, as a difference.
    publishers.send("bias 2")
    publishers.expect("published")
    expected["2.bias"] = model_of(2).state_dict()["2.bias"]
    assert written(2)["received"] <= 64
    assert_same(load_file(path), expected)


def test_who_joins_another_rank_than_the_first_is_told_so(stack: ExitStack, tmp_path: Path) -> None:
    publishers = Ranks(stack, 2, role="publish")
    join = publishers.expect("ready")[1]["endpoint"]
    publishers.send("1")
    publishers.expect("published")
    model = model_of(0)
    with pytest.raises(TensorError, match="publishes a part of a model"), WeightFollower(model, join=[join]) as weights:
        weights.update(timeout=PATIENCE)
    assert equal(model, 0)
    path = tmp_path / "now.safetensors"
    ended = averaging_command("follow", join, "--output", str(path), "--once")
    assert ended.returncode == 2
    assert f"{join} publishes a part of a model, and names no others; join the publisher of rank 0" in ended.stderr
    assert not path.exists()
