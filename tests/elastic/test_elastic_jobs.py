"""Real torchrun jobs, gloo inside, workers that checkpoint: nodes come, stop, die and come back."""

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.jobs import PATIENCE, Job, Node
from tests.support.certificates import token_file
from tests.support.processes import JsonProcess, averaging_command, averaging_process

pytestmark = pytest.mark.timeout(600)

long = pytest.mark.long


def register(stack: ExitStack, endpoint: str) -> JsonProcess:
    process = stack.enter_context(averaging_process("register", "--listen", endpoint, "--json"))
    assert process.expect("ready")["endpoint"] == endpoint
    return process


def end(*nodes: Node) -> None:
    for node in nodes:
        assert node.wait(PATIENCE) == 0, node.stderr


def variables(job: Job) -> dict[str, Any]:
    """Turns the options of a job into variables, as Kubeflow Trainer's runtime for torch sets them."""
    host, _, port = job.endpoint.rpartition(":")
    given = dict(option.removeprefix("--").split("=", 1) for option in job.options)
    del given["rdzv-endpoint"], given["monitor-interval"]
    job.options = ["--monitor-interval=0.2"]
    named = {f"PET_{name.upper().replace('-', '_')}": value for name, value in given.items()}
    return named | {"PET_MASTER_ADDR": host, "PET_MASTER_PORT": port, "PET_NODE_RANK": "7"}


def test_a_job_of_one_node(stack: ExitStack, tmp_path: Path) -> None:
    job = Job(stack, tmp_path, "1", steps=2, pace=0.0)
    node = job.node(**variables(job))
    start = node.expect("start", PATIENCE)
    end(node)
    named = ("rank", "world", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    assert [start[name] for name in named] == [0, 1, 0, 0, 0, 1, 1]
    assert (start["restarts"], start["most"], start["run_id"]) == (0, 3, "job")


@long
def test_a_worker_that_is_killed_costs_one_restart_of_all(stack: ExitStack, tmp_path: Path) -> None:
    job = Job(stack, tmp_path, "2", nproc="2")
    nodes = [job.node(), job.node()]
    killed = nodes[0].until_step(5)
    os.kill(killed["pid"], signal.SIGKILL)
    again = nodes[0].expect("start", PATIENCE)
    nodes[0].until_step(again["step"] + 2)
    job.finish(*nodes)
    assert again["step"] >= killed["step"] - 1  # the checkpoint may be a step behind
    # The other node restarts for its own workers' failure, or because this one waits for it: that is not counted.
    assert nodes[0].starts() == [(4, 0), (4, 1)]
    assert nodes[1].starts() in ([(4, 0), (4, 1)], [(4, 0), (4, 0)])


@long
def test_a_node_that_is_killed_and_comes_back(stack: ExitStack, tmp_path: Path) -> None:
    """Twice; the workers that stay fail with it, which torch counts as a restart of theirs."""
    job = Job(stack, tmp_path, "1:2", conf={"last_call_timeout": 20}, max_restarts=2)
    register(stack, job.endpoint)
    stays, other = job.node(), job.node()
    step = other.until_step(5, world=2)["step"]
    for _ in range(2):
        other.signal_all(signal.SIGKILL)
        alone = stays.until_step(step + 1, world=1)["step"]
        other = job.node()
        step = other.until_step(alone + 2, world=2)["step"]
        stays.until_step(step, world=2)
    job.finish(stays, other)
    assert [world for world, _ in stays.starts()][-5:] == [2, 1, 2, 1, 2]


@long
def test_the_death_of_rank_0s_node(stack: ExitStack, tmp_path: Path) -> None:
    """If it hosts the register as well, another node of its machine takes that over, with what the nodes hold."""
    job = Job(stack, tmp_path, "2:3")
    nodes = [job.node() for _ in range(3)]
    ranks = {node.until_step(3, world=3)["rank"]: node for node in nodes}
    first = ranks.pop(0)
    first.signal_all(signal.SIGKILL)
    for node in ranks.values():
        node.until_step(4, world=2)
    job.finish(*ranks.values())
    for node in ranks.values():
        assert [world for world, _ in node.starts()][-2:] == [3, 2]


@long
def test_a_node_that_joins_late_is_no_restart(stack: ExitStack, tmp_path: Path) -> None:
    job = Job(stack, tmp_path, "1:2", max_restarts=0)
    early = job.node()
    early.until_step(3, world=1)
    late = job.node()
    late.until_step(6, world=2)
    job.finish(early, late)
    assert early.starts() == [(1, 0), (2, 0)]


@long
def test_a_node_that_is_stopped_for_longer_than_its_heartbeat(stack: ExitStack, tmp_path: Path) -> None:
    job = Job(stack, tmp_path, "2", max_restarts=1)
    register(stack, job.endpoint)
    nodes = [job.node(), job.node()]
    step = nodes[1].until_step(5)["step"]
    nodes[1].signal_all(signal.SIGSTOP)
    # To the other node's rendezvous it is gone after 4 s of silence; the workers there wait in the collective.
    with pytest.raises(AssertionError, match="no 'end' within"):
        nodes[0].expect("end", timeout=10.0)
    nodes[1].signal_all(signal.SIGCONT)
    nodes[1].until_step(step + 2)
    job.finish(*nodes)
    assert all(node.starts()[-1][0] == 2 for node in nodes)


@long
def test_a_register_that_dies_and_comes_back_restarts_no_worker(stack: ExitStack, tmp_path: Path) -> None:
    job = Job(stack, tmp_path, "2:3", max_restarts=0, conf={"is_host": "false"})
    process = register(stack, job.endpoint)
    nodes = [job.node(), job.node()]
    step = nodes[0].until_step(5, world=2)["step"]
    process.kill()
    process.wait()
    late = job.node()
    step = nodes[0].until_step(step + 100, world=2)["step"]  # 5 s without it
    register(stack, job.endpoint)
    late.until_step(step + 5, world=3)
    job.finish(*nodes, late)
    assert all(node.starts() == [(2, 0), (3, 0)] for node in nodes)
    assert "brought back version" in nodes[0].stderr + nodes[1].stderr


@long
def test_a_register_that_stays_away_ends_nothing_that_trains(stack: ExitStack, tmp_path: Path) -> None:
    job = Job(stack, tmp_path, "2", max_restarts=0, conf={"close_timeout": 1, "is_host": "false"})
    process = register(stack, job.endpoint)
    nodes = [job.node(), job.node()]
    step = nodes[0].until_step(5, world=2)["step"]
    process.kill()
    nodes[0].until_step(step + 100)
    late = job.node()
    while "no register answers" not in late.stderr:
        step = nodes[0].until_step(step + 1)["step"]
    job.finish(*nodes)
    assert all(node.starts() == [(2, 0)] for node in nodes)
    assert "Training goes on" in nodes[0].stderr
    assert f"no register answers at {job.endpoint}" in late.stderr


@long
def test_every_serving_peer_is_a_register(stack: ExitStack, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(2)}, tmp_path / "w.safetensors")
    tokens = token_file(tmp_path)
    peer = stack.enter_context(
        averaging_process(
            "peer",
            str(tmp_path / "w.safetensors"),
            "--run-id=demo",
            "--serve",
            "--json",
            "--listen=127.0.0.1:0",
            f"--token-file={tokens}",
        )
    )
    endpoint = peer.expect("ready")["endpoint"]
    job = Job(stack, tmp_path, "2", steps=3, pace=0.0, endpoint=endpoint, conf={"token_file": tokens})
    end(job.node(), job.node())
    stranger = Job(stack, tmp_path, "1:2", endpoint=endpoint).node()
    assert stranger.wait(PATIENCE) != 0
    assert "the register refuses this node" in stranger.stderr


SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def leaving_job() -> JsonProcess:
    trains = {"strategy": "local", "way": "until ended", "every": 2, "peers": 1, "patient": True}
    options = json.dumps({**trains, "options": {"leave_on": ["SIGTERM", "SIGUSR1"]}})
    torchrun = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=3")
    return JsonProcess(*torchrun, SIGNALS, "-m", "tests.support.trainer", options)


@long
def test_a_worker_that_is_asked_to_leave_is_not_started_again() -> None:
    with leaving_job() as process:
        endpoint = process.expect("ready", PATIENCE)["endpoint"]
        told = averaging_command("leave", endpoint)
        assert told.returncode == 0, told.stderr
        assert process.wait(PATIENCE) != 0
        assert len(process.events("ready")) == 1
        assert "the averager of run 'run' has left" in process.stderr


@long
def test_a_worker_leaves_on_a_signal_that_torchrun_hands_on() -> None:
    with leaving_job() as process:
        process.expect("ready", PATIENCE)
        process.signal(signal.SIGUSR1)
        assert process.wait(PATIENCE) != 0
        assert len(process.events("ready")) == 1
        assert "the averager of run 'run' has left" in process.stderr
