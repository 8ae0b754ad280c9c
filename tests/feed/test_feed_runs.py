"""Complete runs: the server, environments and ranks in separate processes that are killed and restarted."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from averaging.errors import FeedError
from averaging.rl.feed import BatchFeed, FeedEnvironment
from tests.feed.feeds import DEADLINE, Feed, a_group, a_rank, environment, names, registration
from tests.support import certificates
from tests.support.processes import JsonProcess, all_expect
from tests.support.selection import rest_is_long


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Feed]:
    with Feed(tmp_path_factory.mktemp("feed") / "feed.sqlite") as feed:
        yield feed


@pytest.fixture
def feed(served: Feed) -> Feed:
    """A feed without a run. The numbers of trainers go on from one test to the next."""
    if served.process.poll() is not None:
        served.start()
    httpx.get(f"{served.url}/reset_data").raise_for_status()
    return served


def start(stack: ExitStack, ranks: int, store: Path, url: str, **changes: Any) -> list[JsonProcess]:
    options = {"poll": 0.05, "retry_timeout": 30.0} | changes.pop("options", {})
    processes = [
        stack.enter_context(a_rank(r, ranks, store, url, registration(**changes), **options)) for r in range(ranks)
    ]
    all_expect(processes, "up")
    return processes


def step(processes: Sequence[JsonProcess]) -> dict[str, Any]:
    """Returns the next batch, which must be the same at all ranks."""
    for process in processes:
        process.send("next")
    batches = all_expect(processes, "batch")
    assert all(batch == batches[0] for batch in batches), "the ranks got different batches"
    return batches[0]


def posted(url: str, *groups: int, **options: Any) -> None:
    with FeedEnvironment(url, environment(), **options) as env:
        for name in groups:
            env.post(a_group(name))


def names_of(event: dict[str, Any]) -> list[int]:
    return [group["tokens"][0][0] for group in event["groups"]]


def test_one_process_iterates_to_the_end(feed: Feed) -> None:
    with BatchFeed(feed.url, registration(num_steps=3), poll=0.05) as batches:
        poster = threading.Thread(target=posted, args=(feed.url, *range(6)))
        poster.start()
        seen = [(batch.step, names(batch), batch.sequences) for batch in batches]
        poster.join()
    assert seen == [(1, [0, 1], 4), (2, [2, 3], 4), (3, [4, 5], 4)]
    assert list(batches) == [], "it has ended"
    assert batches.step == 3
    group = a_group(7)
    assert [f for f in group.__struct_fields__ if getattr(group, f) is None]


@pytest.mark.parametrize(("gone", "how"), rest_is_long([(0, "dies"), (2, "hangs"), (1, "leaves"), (1, "dies")], 3))
def test_when_a_rank_is_gone_all_others_raise(
    gone: int, how: str, feed: Feed, stack: ExitStack, tmp_path: Path
) -> None:
    ranks = start(stack, 3, tmp_path / "ranks", feed.url, options={"rank_timeout": 5.0} if how == "hangs" else {})
    for rank in ranks:
        rank.send("next")
    posted(feed.url, *range(4))
    all_expect(ranks, "batch")
    lost = ranks.pop(gone)
    for rank in ranks:
        rank.send("next")
    if how == "dies":
        lost.kill()
    elif how == "leaves":
        lost.send("close")
    for rank in ranks:
        failed = rank.expect("failed")
        assert (failed["kind"], "another rank, which has ended or hangs" in failed["message"]) == ("FeedError", True)
        rank.send("next")
        assert "this BatchFeed is closed" in rank.expect("failed")["message"]


def test_some_of_the_ranks(feed: Feed, stack: ExitStack, tmp_path: Path) -> None:
    """The process group has another rank 0 than the job."""
    options = {"poll": 0.05}
    ranks = [
        stack.enter_context(a_rank(r, 3, tmp_path / "ranks", feed.url, registration(), members=(1, 2), **options))
        for r in range(3)
    ]
    all_expect(ranks, "up")
    for rank in ranks[1:]:
        rank.send("next")
    posted(feed.url, *range(2))
    batches = all_expect(ranks[1:], "batch")
    assert batches[0] == batches[1]
    assert names_of(batches[0]) == [0, 1]


def test_an_error_of_rank_0_is_raised_at_all_ranks(feed: Feed, stack: ExitStack, tmp_path: Path) -> None:
    with BatchFeed(feed.url, registration(8)) as other:
        other._register()
    ranks = start(stack, 2, tmp_path / "ranks", feed.url)
    for rank in ranks:
        rank.send("next")
    for rank in ranks:
        assert "serves a run with batch_size 8, not 4" in rank.expect("failed")["message"]


def test_ranks_with_different_registrations_raise(feed: Feed, stack: ExitStack, tmp_path: Path) -> None:
    ranks = [stack.enter_context(a_rank(r, 2, tmp_path / "ranks", feed.url, registration(4 + r))) for r in range(2)]
    for rank in ranks:
        rank.send("next")
    for rank in ranks:
        failed = rank.expect("failed")
        assert (failed["kind"], "different registrations" in failed["message"]) == ("ConfigError", True)


def test_a_server_that_is_killed_loses_nothing(feed: Feed, stack: ExitStack, tmp_path: Path) -> None:
    """The server is killed repeatedly while groups are posted and trained. Each is trained once, in order."""
    count = 24
    ranks = start(stack, 2, tmp_path / "ranks", feed.url, options={"retry_timeout": DEADLINE})
    for rank in ranks:
        rank.send("next")
    poster = threading.Thread(target=posted, args=(feed.url, *range(count)), kwargs={"retry_timeout": DEADLINE})
    poster.start()
    trained = names_of(all_expect(ranks, "batch")[0])
    for number in range(2, count // 2 + 1):
        for rank in ranks:
            rank.send("next")
        if number % 4 == 0:
            feed.kill()
            feed.start()
        batches = all_expect(ranks, "batch")
        assert batches[0] == batches[1]
        assert batches[0]["step"] == number
        trained += names_of(batches[0])
    poster.join()
    assert trained == list(range(count))


def test_a_trainer_resumes_from_its_checkpoint(feed: Feed, stack: ExitStack, tmp_path: Path) -> None:
    """Trainer and server are killed after step 5. From the checkpoint of step 4 it gets batch 5 again, and then 6."""
    (trainer,) = start(stack, 1, tmp_path / "1", feed.url, save_checkpoint_interval=2)
    trainer.send("next")
    posted(feed.url, *range(12))
    batches = [trainer.expect("batch")]
    batches += [step([trainer]) for _ in range(4)]
    trainer.kill()
    feed.kill()
    feed.start()
    (trainer,) = start(stack, 1, tmp_path / "2", feed.url, save_checkpoint_interval=2, starting_step=4)
    assert step([trainer]) == batches[4]
    assert names_of(step([trainer])) == [10, 11]
    (late,) = start(stack, 1, tmp_path / "3", feed.url, save_checkpoint_interval=2, starting_step=2)
    late.send("next")
    failed = late.expect("failed")
    assert failed["kind"] == "FeedError"
    assert "the batch of step 3 is forgotten" in failed["message"]


def test_a_full_disk_is_waited_for(feed: Feed) -> None:
    """The server may write no further byte, then again, and is killed: each group is trained once."""
    with BatchFeed(feed.url, registration(save_checkpoint_interval=3), poll=0.05, retry_timeout=DEADLINE) as batches:
        batches._register()
        batches._request_batch()
        with FeedEnvironment(feed.url, environment(), retry_timeout=DEADLINE) as env:
            for name in range(6):
                env.post(a_group(name, length=2000))
            trained = [names(next(batches))]
            server = psutil.Process(feed.process.pid)
            _, most = server.rlimit(psutil.RLIMIT_FSIZE)
            server.rlimit(psutil.RLIMIT_FSIZE, (4096, most))
            replies = [httpx.post(f"{feed.url}/scored_data", content=msgspec.json.encode(a_group(99)))]
            replies.append(httpx.get(f"{feed.url}/batch?step=2&saved=0&registration={batches._number}"))
            assert [(reply.status_code, "cannot be written" in reply.text) for reply in replies] == [(503, True)] * 2
            server.rlimit(psutil.RLIMIT_FSIZE, (most, most))
            env.post(a_group(6), a_group(7))
            trained += [names(next(batches))]
        feed.kill()
        feed.start()
        trained += [names(next(batches)) for _ in range(2)]
        assert trained == [[2 * i, 2 * i + 1] for i in range(4)]


def test_clients_log_why_there_is_no_batch(feed: Feed, caplog: pytest.LogCaptureFixture) -> None:
    with BatchFeed(feed.url, registration(5)) as batches, FeedEnvironment(feed.url, environment()) as env:
        batches._register()
        batches._request_batch()
        env.register()
        for _ in range(2):
            batches._request_batch()
    said = [record.name for record in caplog.records if "batch_size 5 is not a multiple" in record.getMessage()]
    assert said == ["averaging.rl.feed.clients"] * 2


def test_after_a_reset_the_run_continues_at_the_trainers_step(feed: Feed) -> None:
    with BatchFeed(feed.url, registration(), poll=0.05) as batches, FeedEnvironment(feed.url, environment()) as env:
        batches._register()
        httpx.get(f"{feed.url}/batch")
        for name in range(4):
            env.post(a_group(name))
        assert [next(batches).step for _ in range(2)] == [1, 2]
        httpx.get(f"{feed.url}/reset_data")
        poster = threading.Thread(target=lambda: (env.post(a_group(7)), env.post(a_group(8))))
        poster.start()
        batch = next(batches)
        poster.join()
        assert (batch.step, names(batch)) == (3, [7, 8]), "the environment has registered again, and so has the trainer"
        assert env.status().current_step == 3


def test_the_environment_waits_for_a_trainer(feed: Feed) -> None:
    env = FeedEnvironment(feed.url, environment(), start_timeout=0.0)
    with env, pytest.raises(FeedError, match="has no trainer after 0 s: wait for trainer to start"):
        env.post(a_group(0))


def test_with_tls_and_a_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(certificates.TOKEN)
    token.chmod(0o600)
    files = certificates.write(tmp_path, *certificates.HERE)
    options: dict[str, Any] = files | {"token_file": token}
    arguments = [argument for name, file in options.items() for argument in (f"--{name.replace('_', '-')}", str(file))]
    with Feed(tmp_path / "store", *arguments) as feed:
        with BatchFeed(feed.url, registration(), poll=0.05, **options) as batches:
            poster = threading.Thread(target=posted, args=(feed.url, 0, 1), kwargs=options)
            poster.start()
            assert names(next(batches)) == [0, 1]
            poster.join()
        wrong = tmp_path / "wrong"
        wrong.write_text("another-token-0123456789")
        wrong.chmod(0o600)
        with pytest.raises(FeedError, match="answers 401: this server requires a token"):
            next(BatchFeed(feed.url, registration(), **options | {"token_file": wrong}))
        with pytest.raises(FeedError, match="cannot be reached"):
            next(BatchFeed(feed.url, registration(), retry_timeout=0.2))  # without tls_ca


@pytest.mark.long
def test_the_events_of_the_command_and_its_end(tmp_path: Path) -> None:
    with Feed(tmp_path / "store") as feed:
        with BatchFeed(feed.url, registration(), poll=0.05) as batches:
            poster = threading.Thread(target=posted, args=(feed.url, 0, 1))
            poster.start()
            next(batches)
            poster.join()
        assert feed.process.expect("batch") == {"event": "batch", "step": 1, "groups": 2, "sequences": 4}
        feed.process.signal(signal.SIGTERM)
        assert feed.process.wait() == 0
        assert feed.process.seen[-1] == {"event": "done"}
