"""Our clients with the server of atroposlib and its quirks."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from averaging.errors import FeedError
from averaging.rl.feed import BatchFeed, FeedEnvironment
from tests.feed.feeds import a_group, a_rank, environment, names, registration
from tests.interop.atropos import RunApi
from tests.support.processes import DEADLINE, JsonProcess, all_expect

pytestmark = pytest.mark.interop

REGISTRATION = {name: getattr(registration(), name) for name in registration().__struct_fields__}


@pytest.fixture
def server() -> Iterator[RunApi]:
    with RunApi() as server:
        yield server


def start(stack: ExitStack, ranks: int, store: Path, url: str, **changes: Any) -> list[JsonProcess]:
    processes = [
        stack.enter_context(a_rank(r, ranks, store, url, registration(**changes), poll=0.05, retry_timeout=DEADLINE))
        for r in range(ranks)
    ]
    all_expect(processes, "up")
    return processes


def ask(ranks: list[JsonProcess]) -> None:
    for rank in ranks:
        rank.send("next")


def received(ranks: list[JsonProcess]) -> tuple[int, list[int]]:
    """Returns the step and the names of the groups of a batch, which must be the same at all ranks."""
    batches = all_expect(ranks, "batch")
    assert all(batch == batches[0] for batch in batches)
    return batches[0]["step"], [group["tokens"][0][0] for group in batches[0]["groups"]]


def post(server: RunApi, *numbers: int) -> None:
    for number in numbers:
        assert server.post("/scored_data", msgspec.to_builtins(a_group(number))).status_code == 200


def wait_for_the_trainer(server: RunApi) -> None:
    """Waits until it has requested its first batch."""
    with FeedEnvironment(server.url, environment()) as env:
        env.register()


@pytest.mark.parametrize("count", [1, 3])
def test_batches_that_are_formed_at_once(count: int, server: RunApi, stack: ExitStack, tmp_path: Path) -> None:
    """One request forms three batches, adds 3 to the step, and delivers the last first. Each rank counts its own."""
    ranks = start(stack, count, tmp_path / "ranks", server.url, num_steps=4)
    ask(ranks)
    wait_for_the_trainer(server)
    post(server, 0)
    assert server.get("/status").json() == {"current_step": 0, "queue_size": 1}
    everything = [msgspec.to_builtins(a_group(number)) for number in range(1, 6)]
    assert server.post("/scored_data_list", everything).json()["groups_processed"] == 5
    assert received(ranks) == (1, [4, 5])
    assert server.get("/status").json() == {"current_step": 3, "queue_size": 0}
    ask(ranks)
    assert received(ranks) == (2, [2, 3])
    ask(ranks)
    assert received(ranks) == (3, [0, 1])
    ask(ranks)  # the ranks wait for data, although the server's step is 3
    post(server, 6, 7)
    assert received(ranks) == (4, [6, 7])
    ask(ranks)
    assert {event["step"] for event in all_expect(ranks, "end")} == {4}


@pytest.mark.parametrize("count", [1, 3])
def test_batches_that_another_trainer_left(count: int, server: RunApi, stack: ExitStack, tmp_path: Path) -> None:
    """The server delivers them without a change of the step, which the other ranks poll."""
    server.post("/register", REGISTRATION)
    server.get("/batch")
    post(server, *range(6))
    assert server.get("/batch").json()["batch"][0]["tokens"][0][0] == 4
    assert server.get("/status").json()["current_step"] == 3
    ranks = start(stack, count, tmp_path / "ranks", server.url, starting_step=3)
    ask(ranks)
    assert received(ranks) == (4, [2, 3])
    ask(ranks)
    assert received(ranks) == (5, [0, 1])
    ask(ranks)
    post(server, 6, 7)
    assert received(ranks) == (6, [6, 7])


@pytest.mark.parametrize("count", [1, 3])
def test_a_server_that_is_killed_and_comes_back(count: int, server: RunApi, stack: ExitStack, tmp_path: Path) -> None:
    """The server has lost its state. The trainer registers again and continues to count."""
    ranks = start(stack, count, tmp_path / "ranks", server.url)
    ask(ranks)
    wait_for_the_trainer(server)
    post(server, 0, 1)
    assert received(ranks) == (1, [0, 1])
    server.kill()
    ask(ranks)
    server.start()
    with FeedEnvironment(server.url, environment()) as env:
        assert env.register().starting_step == 1, "the trainer has registered its step"
        env.post(a_group(2), a_group(3))
    assert received(ranks) == (2, [2, 3])


def test_a_reset_that_makes_the_server_fail(server: RunApi) -> None:
    with BatchFeed(server.url, registration(), poll=0.05, retry_timeout=DEADLINE) as batches:
        batches._register()
        server.get("/batch")
        post(server, 0, 1)
        assert next(batches).step == 1
        server.get("/reset_data")
        assert server.get("/batch").status_code == 500
        batches._fetch(time.monotonic())  # registers again
        deadline = time.monotonic() + DEADLINE
        while server.get("/info").json()["batch_size"] != 4:
            assert time.monotonic() < deadline
            batches._fetch(time.monotonic())
        post(server, 2, 3)
        batch = next(batches)
        assert (batch.step, names(batch)) == (2, [2, 3])


def test_a_server_that_received_data_too_early_is_an_error(server: RunApi) -> None:
    post(server, 0)
    with pytest.raises(FeedError, match="received data before a trainer registered.*GET /reset_data"):
        next(BatchFeed(server.url, registration()))


def test_our_environment(server: RunApi) -> None:
    server.post("/register", REGISTRATION)
    with FeedEnvironment(server.url, environment(), start_timeout=0.0) as env:
        with pytest.raises(FeedError, match="wait for trainer to start"):
            env.register()
        server.get("/batch")
        reply = env.register()
        assert (reply.env_id, reply.wandb_name) == (0, "env_0")
        assert (reply.checkpoint_dir, reply.num_steps) == ("checkpoints", 1000)
        env.post(a_group(0), key="k")
        env.post(a_group(1, 1))
        assert server.get("/status").json()["queue_size"] == 1, "half a group waits for the other half"
        status = env.status()
        assert (status.current_step, status.self_queue_size, status.env_weight) == (0, 1, 1.0)
    assert server.post("/disconnect-env", {"env_id": 0}).json() == {"status": "success"}


def test_versions_do_no_harm(server: RunApi) -> None:
    """That server knows of no versions: it takes the groups, and the batches have no ages."""
    with BatchFeed(server.url, registration(), poll=0.05, weights=SimpleNamespace(version=7)) as batches:
        batches._register()
        assert batches._request_batch() == b""
        with FeedEnvironment(server.url, environment()) as env:
            answers = [env.post(a_group(number), version=[6, 7]) for number in range(2)]
            assert [(answer.status, answer.newest_version, answer.stale) for answer in answers] == [
                ("received", None, 0)
            ] * 2
        batch = next(batches)
        assert sorted(names(batch)) == [0, 1]
        assert (batch.versions, batch.ages) == ([[], []], [None, None])
