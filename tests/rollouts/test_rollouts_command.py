"""`averaging rollouts` as a process: stopped and killed in the middle, and with wrong arguments."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from averaging.cli import main
from tests.feed.feeds import Feed
from tests.rollouts.engines import EngineProcess, Trainer
from tests.rollouts.text_models import write_tokenizer
from tests.support.processes import JsonProcess, averaging_process

pytestmark = pytest.mark.integrations

DIGIT = "examples.posttrain.environment"


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
        "--group-size", "4", "--max-tokens", "4", *options,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_in_the_middle_posts_nothing_twice(
    number: signal.Signals, tmp_path: Path, engine: EngineProcess, feed: Feed
) -> None:
    engine.control(delay=0.05)
    with Trainer(feed.url, 4) as trainer:
        with started(tmp_path, engine, feed) as first:
            for _ in range(4):
                first.expect("posted")
            first.signal(number)
            assert first.wait() == (0 if number == signal.SIGINT else -number)
        with started(tmp_path, engine, feed, "--max-groups", "9") as second:
            assert second.wait() == 0
        # A killed process may not have read the answer to its last post.
        posted = len(first.events("posted")) + len(second.events("posted"))
        taken = len(trainer.wait(posted))
    assert posted <= taken <= posted + (number == signal.SIGKILL)
    if number == signal.SIGINT:
        done = first.events("done")[0]
        assert (done["groups"], done["waiting"]) == (len(first.events("posted")), 0)
    assert second.events("done")[0]["groups"] == 9


def test_a_second_signal_ends_it_during_the_start(tmp_path: Path, engine: EngineProcess, feed: Feed) -> None:
    engine.kill()
    with started(tmp_path, engine, feed) as process:
        assert process.expect("away")["what"] == "engine"
        process.signal(signal.SIGTERM)
        assert process.wait() == 143
        assert "stopped during the start" in process.events("error")[0]["message"]


def test_wrong_arguments_are_usage_errors(tmp_path: Path) -> None:
    needed = ["rollouts", "--environment", DIGIT, "--engine", "http://127.0.0.1:1", "--feed", "http://127.0.0.1:2"]
    for options, message in [
        (["--environment-args", "[1]"], "--environment-args must be a JSON object"),
        (["--sampling-args", "{"], "--sampling-args must be a JSON object"),
        (["--group-size", "0"], "--group-size"),
        (["--truncated", "never"], "--truncated"),
        (["--environment", "nothing_of_that_name"], "cannot be loaded"),
        (["--engine", "here"], "is not the address of an engine"),
        (["--feed", "here"], "is not the address of a feed"),
        (["--engine-token-file", str(tmp_path / "none")], "none"),
    ]:
        result = CliRunner().invoke(main, [*needed, *options])
        assert result.exit_code == 2, (options, result.output)
        assert message in result.output, (options, result.output)


def test_a_feed_that_refuses_ends_it_and_its_password_is_not_told(tmp_path: Path, engine: EngineProcess) -> None:
    (tmp_path / "token").write_text("a" * 64 + "\n")
    with Feed(tmp_path / "feed.sqlite", "--token-file", str(tmp_path / "token")) as feed:
        with started(tmp_path, engine, feed) as process:
            assert process.wait() == 1
            assert "401" in process.events("error")[0]["message"]
        feed.url = feed.url.replace("http://", f"http://any:{'a' * 64}@")
        with started(tmp_path, engine, feed) as process:
            away = process.expect("away")  # no trainer has started
            assert away["what"] == "feed"
            assert "aaaa" not in str(process.seen)
            process.signal(signal.SIGTERM)
            assert process.wait() == 0
            assert process.events("done")[0]["waiting"] > 0
