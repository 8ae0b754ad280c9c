"""`averaging rollouts` as a process: stopped and killed in the middle, and with wrong arguments."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from averaging.cli import main
from tests.support.engines import EngineProcess, Trainer
from tests.support.feeds import Feed
from tests.support.processes import JsonProcess, averaging_process
from tests.support.text_models import write_tokenizer

pytestmark = pytest.mark.integrations

DIGIT = "examples.posttrain_text.environment"


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    with EngineProcess() as engine:
        yield engine


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[Feed]:
    with Feed(tmp_path / "feed.sqlite") as feed:
        yield feed


def started(folder: Path, engine: EngineProcess, feed: Feed, *options: str) -> JsonProcess:
    tokenizer = write_tokenizer(folder / "tokenizer")
    return averaging_process(
        "rollouts", "--environment", DIGIT, "--engine", engine.url, "--feed", feed.url, "--tokenizer", tokenizer,
        "--store", str(folder / "rollouts.sqlite"), "--group-size", "4", "--max-tokens", "4", *options,
    )  # fmt: skip


def test_ctrl_c_loses_nothing_that_was_scored(tmp_path: Path, engine: EngineProcess, feed: Feed) -> None:
    engine.control(answers=6)
    with Trainer(feed.url, 4) as trainer:
        with started(tmp_path, engine, feed, "--concurrency", "1") as first:
            first.expect("posted")
            first.signal(signal.SIGINT)
            assert first.wait() == 0
            done = first.events("done")[0]
        engine.control(answers=None)
        with started(tmp_path, engine, feed, "--max-groups", "9") as second:
            assert second.expect("ready")["kept_rollouts"] == done["kept_rollouts"]
            assert second.wait() == 0
        assert second.events("done")[0]["groups"] == 9
        assert done["groups"] == 1
        digits = [group["tokens"][0][1] for group in trainer.wait(10)]
    assert len(set(digits)) == 10


def test_a_kill_posts_nothing_twice_and_loses_nothing(tmp_path: Path, engine: EngineProcess, feed: Feed) -> None:
    engine.control(delay=0.05)
    with Trainer(feed.url, 4) as trainer:
        with started(tmp_path, engine, feed) as first:
            for _ in range(4):
                first.expect("posted")
            first.kill()
            first.wait()
        with started(tmp_path, engine, feed, "--max-groups", "25") as second:
            assert second.wait() == 0
        first.drain()
        numbers = [event["group"] for process in (first, second) for event in process.events("posted")]
        # A group whose answer the first did not read is posted again, and the feed takes it once.
        taken = len(set(numbers))
        assert len(trainer.wait(taken)) == taken
    assert sorted(set(numbers)) == list(range(taken))


def test_a_second_signal_ends_it_during_the_start(tmp_path: Path, engine: EngineProcess, feed: Feed) -> None:
    engine.kill()
    with started(tmp_path, engine, feed) as process:
        assert process.expect("away")["what"] == "engine"
        process.signal(signal.SIGTERM)
        assert process.wait() == 143
        assert "stopped during the start" in process.events("error")[0]["message"]


def test_wrong_arguments_are_usage_errors(tmp_path: Path) -> None:
    needed = ["rollouts", "--environment", DIGIT, "--engine", "http://127.0.0.1:1", "--feed", "http://127.0.0.1:2"]
    needed += ["--store", str(tmp_path / "store")]
    for options, message in [
        (["--environment-args", "[1]"], "--environment-args must be a JSON object"),
        (["--sampling-args", "{"], "is not JSON"),
        (["--group-size", "0"], "--group-size"),
        (["--truncated", "never"], "--truncated"),
        (["--environment", "nothing_of_that_name"], "cannot be loaded"),
        (["--engine", "here"], "is not the address of an engine"),
        (["--feed", "here"], "is not the address of a feed"),
        (["--store", str(tmp_path)], "directory"),
        (["--engine-token-file", str(tmp_path / "none")], "none"),
    ]:
        result = CliRunner().invoke(main, [*needed, *options])
        assert result.exit_code == 2, (options, result.output)
        assert message in result.output, (options, result.output)


def test_a_feed_that_refuses_ends_it(tmp_path: Path, engine: EngineProcess) -> None:
    (tmp_path / "token").write_text("a" * 64 + "\n")
    with (
        Feed(tmp_path / "feed.sqlite", "--token-file", str(tmp_path / "token")) as feed,
        started(tmp_path, engine, feed) as process,
    ):
        assert process.wait() == 1
        assert "401" in process.events("error")[0]["message"]


def test_the_password_of_a_feed_is_not_told(tmp_path: Path, engine: EngineProcess) -> None:
    (tmp_path / "token").write_text("a" * 64 + "\n")
    with Feed(tmp_path / "feed.sqlite", "--token-file", str(tmp_path / "token")) as feed:
        feed.url = feed.url.replace("http://", f"http://any:{'a' * 64}@")
        with started(tmp_path, engine, feed) as process:
            away = process.expect("away")  # no trainer has started
            assert away["what"] == "feed"
            assert "aaaa" not in str(process.seen)
            process.signal(signal.SIGTERM)
            assert process.wait() == 0
            assert process.events("done")[0]["kept_rollouts"] > 0
