"""`Rollouts` with the real verifiers, a real feed, and an engine whose answers the tests choose."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from averaging.errors import ConfigError, RolloutError
from averaging.rl.feed import CommandEvent
from averaging.rl.rollouts import RolloutOptions, Rollouts, TruncatedMode
from tests.feed.feeds import Feed
from tests.rollouts.engines import EngineProcess, Trainer
from tests.rollouts.text_models import END, IDS, write_tokenizer

pytestmark = [pytest.mark.integrations, pytest.mark.asyncio(loop_scope="module")]

DIGIT = "examples.posttrain.environment"
USER, ASSISTANT, STOP = IDS["<user>"], IDS["<assistant>"], IDS[END]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    with EngineProcess() as engine:
        yield engine


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[Feed]:
    with Feed(tmp_path / "feed.sqlite", "--max-staleness", "1") as feed:
        yield feed


class Made:
    """Rollouts that run in the test's event loop, and what they tell."""

    def __init__(self, rollouts: Callable[[Any], Rollouts]) -> None:
        self.events: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self.rollouts = rollouts(self._tell)

    def _tell(self, event: CommandEvent) -> None:
        self.events.append(event.as_json())
        self._news.set()

    def of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    async def expect(self, name: str, number: int = 1) -> list[dict[str, Any]]:
        async with asyncio.timeout(60):
            while len(self.of(name)) < number:
                self._news.clear()
                await self._news.wait()
        return self.of(name)


@pytest.fixture
def made(tokenizer: str, engine: EngineProcess, feed: Feed) -> Callable[..., Made]:
    def make(environment: str = DIGIT, **options: Any) -> Made:
        given: dict[str, Any] = {
            "engine": engine.url,
            "feed": feed.url,
            "tokenizer": tokenizer,
            "group_size": 4,
            "sampling": {"max_tokens": 4},
        }
        return Made(lambda tell: Rollouts(RolloutOptions(environment=environment, **given | options), tell))

    return make


@asynccontextmanager
async def running(made: Made) -> AsyncIterator[Made]:
    task = asyncio.create_task(made.rollouts.run())
    try:
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_groups_have_tokens_masks_scores_and_the_version(made: Callable[..., Made], feed: Feed) -> None:
    rollouts = made(max_groups=10)
    with Trainer(feed.url, 4, version=1) as trainer:
        await rollouts.rollouts.run()
        groups = trainer.wait(10)
    assert len(rollouts.of("posted")) == 10
    assert not rollouts.of("failed")
    digits = set()
    for group in groups:
        assert len(group["tokens"]) == 4
        assert group["version"] == 1
        for tokens, masks, score, logprobs in zip(
            group["tokens"], group["masks"], group["scores"], group["inference_logprobs"], strict=True
        ):
            digit = tokens[1] - IDS["0"]
            assert tokens[:3] == [USER, IDS[str(digit)], ASSISTANT]
            assert tokens[-1] == STOP
            assert masks == [-100, -100, -100, *tokens[3:]]
            assert logprobs == [1.0, 1.0, 1.0, -0.25, -0.25]
            assert score == float(tokens[3] == IDS[str((digit + 1) % 10)])
            digits.add(digit)
    assert digits == set(range(10))  # each task once in a pass


async def test_what_the_model_did_not_write_is_masked_in_each_turn(
    made: Callable[..., Made], feed: Feed, engine: EngineProcess
) -> None:
    engine.control(right=1.0)
    rollouts = made("tests.rollouts.turns", max_groups=2, environment_args={"taskset": {"tasks": 1}})
    with Trainer(feed.url, 4) as trainer:
        await rollouts.rollouts.run()
        group = trainer.wait(1)[0]
    yes, system = IDS["yes"], IDS["<unknown>"]
    one, two, three = (IDS[each] for each in "123")
    begin = [system, yes, USER, IDS["0"], ASSISTANT]
    assert group["tokens"][0] == [*begin, one, STOP, USER, one, ASSISTANT, two, STOP, USER, two, ASSISTANT, three, STOP]
    trained = [token for token in group["masks"][0] if token != -100]
    assert trained == [one, STOP, two, STOP, three, STOP]
    assert group["scores"] == [1.0] * 4


async def test_samples_have_the_version_of_the_adapter_that_made_them(
    made: Callable[..., Made], feed: Feed, engine: EngineProcess
) -> None:
    engine.control(adapter="tune", version=3, tells=False, routeless=True)
    rollouts = made(max_groups=2, model="tune")
    with Trainer(feed.url, 4, version=3) as trainer:
        await rollouts.rollouts.run()
        groups = trainer.wait(2)
    assert [group["version"] for group in groups] == [3, 3]
    assert [(event["model"], event["version"]) for event in rollouts.of("ready")] == [("tune", 3)]
    assert {asked["body"]["model"] for asked in engine.control()["asked"]} == {"tune-3"}
    with pytest.raises(ConfigError, match=r"serves tiny, tune-3, not other"):
        await made(model="other").rollouts.run()


@pytest.mark.parametrize("tells", [True, False])
async def test_weights_that_change_are_all_named(
    made: Callable[..., Made], feed: Feed, engine: EngineProcess, tells: bool
) -> None:
    engine.control(tells=tells, version=3, version_after=4)
    rollouts = made(max_groups=1, concurrency=1)
    with Trainer(feed.url, 4) as trainer:
        await rollouts.rollouts.run()
        assert trainer.wait(1)[0]["version"] == [3, 4]
    assert rollouts.of("posted")[0]["versions"] == [3, 4]


async def test_an_engine_that_tells_no_version_is_used_without(
    made: Callable[..., Made], feed: Feed, engine: EngineProcess
) -> None:
    engine.control(version=None, routeless=True)
    rollouts = made(max_groups=1)
    with Trainer(feed.url, 4) as trainer:
        await rollouts.rollouts.run()
        assert trainer.wait(1)[0]["version"] is None


async def test_an_engine_that_is_killed_and_comes_back_costs_nothing(
    made: Callable[..., Made], feed: Feed, engine: EngineProcess
) -> None:
    engine.control(delay=0.2)
    with Trainer(feed.url, 4) as trainer:
        async with running(made(max_groups=12, concurrency=8)) as rollouts:
            await rollouts.expect("posted")
            await asyncio.to_thread(engine.kill)
            assert (await rollouts.expect("away"))[0]["what"] == "engine"
            await asyncio.to_thread(engine.start)
            await rollouts.expect("back")
            await rollouts.expect("posted", 12)
            assert not rollouts.of("failed")
        assert len(trainer.wait(12)) == 12


async def test_complete_groups_are_posted_at_the_end(made: Callable[..., Made], feed: Feed) -> None:
    """Those that the feed did not take while it was away."""
    with Trainer(feed.url, 4) as trainer:
        async with running(made(concurrency=4)) as rollouts:
            await rollouts.expect("posted")
            await asyncio.to_thread(feed.kill)
            await rollouts.expect("away")
            await asyncio.to_thread(feed.start)
        posted = len(rollouts.of("posted"))
        assert rollouts.rollouts.summary().fields["waiting"] == 0
        assert len(trainer.wait(posted)) == posted


async def test_a_feed_that_is_killed_and_comes_back_gets_each_group_once(made: Callable[..., Made], feed: Feed) -> None:
    rollouts = made(max_groups=30)
    with Trainer(feed.url, 4) as trainer:
        async with running(rollouts):
            await rollouts.expect("posted", 3)
            await asyncio.to_thread(feed.kill)
            assert (await rollouts.expect("away"))[0]["what"] == "feed"
            await asyncio.to_thread(feed.start)
            await rollouts.expect("posted", 30)
        groups = trainer.wait(30)
    assert len(groups) == 30
    # 10 tasks in each pass: each was posted three times, in whatever order.
    digits = [group["tokens"][0][1] for group in groups]
    assert sorted(digits.count(digit) for digit in set(digits)) == [3] * 10


async def test_it_pauses_while_the_weights_are_too_old(
    made: Callable[..., Made], feed: Feed, engine: EngineProcess
) -> None:
    with Trainer(feed.url, 4, version=1) as trainer:
        async with running(made(concurrency=4)) as rollouts:
            await rollouts.expect("posted", 2)
            trainer.weights.version = 7
            paused = (await rollouts.expect("paused"))[0]
            assert (paused["version"], paused["newest_version"]) == (1, 7)
            asked = engine.control()["requests"]
            assert any(event["stale"] for event in rollouts.of("posted"))
            engine.control(version=6)
            await rollouts.expect("resumed")
            before = len(rollouts.of("posted"))
            await rollouts.expect("posted", before + 2)
            assert engine.control()["requests"] > asked
            assert rollouts.of("posted")[-1]["versions"] == [6]
            assert not rollouts.of("posted")[-1]["stale"]


async def test_it_pauses_while_the_weights_have_no_version(
    made: Callable[..., Made], feed: Feed, engine: EngineProcess
) -> None:
    with Trainer(feed.url, 4, version=1) as trainer:
        async with running(made(concurrency=4)) as rollouts:
            await rollouts.expect("posted", 2)
            engine.control(version="default", tells=False)
            assert (await rollouts.expect("paused"))[0]["version"] is None
            engine.control(version=1)
            await rollouts.expect("resumed")
            before = len(rollouts.of("posted"))
            await rollouts.expect("posted", before + 2)
            assert rollouts.of("posted")[-1]["versions"] == [1]
        assert all(group["version"] == 1 for group in trainer.wait(1)), "no group of unknown weights"


async def test_truncated_rollouts_are_never_posted_as_if_whole(
    made: Callable[..., Made], feed: Feed, engine: EngineProcess, tmp_path: Path
) -> None:
    engine.control(truncated=True)
    with Trainer(feed.url, 4) as trainer:
        dropped = made()
        with pytest.raises(RolloutError, match="10 groups were dropped one after the other .*truncated"):
            await dropped.rollouts.run()
        assert not dropped.of("posted")
        assert dropped.of("failed")[0]["reason"] == "truncated"
        assert dropped.rollouts.tally.failed["truncated"] >= 10
        for mode in (TruncatedMode.MASK, TruncatedMode.TRAIN):
            rollouts = made(max_groups=1, truncated=mode)
            await rollouts.rollouts.run()
        masked, trained = trainer.wait(2)[:2]
    assert masked["masks"] == [[-100] * 7] * 4
    assert masked["overrides"] == [{"truncated": True}] * 4
    assert [mask[3:] for mask in trained["masks"]] == [tokens[3:] for tokens in trained["tokens"]]
    assert trained["overrides"] == [{"truncated": True}] * 4


async def test_failed_rollouts_are_counted_and_named(made: Callable[..., Made], feed: Feed) -> None:
    with Trainer(feed.url, 4) as trainer:
        async with running(made("tests.rollouts.faulty")) as rollouts:
            await rollouts.expect("dropped", 2)
            await rollouts.expect("posted", 2)
        assert {group["tokens"][0][1] for group in trainer.wait(2)} <= {IDS["0"], IDS["3"]}
    failed = rollouts.rollouts.tally.failed
    assert failed["TaskError"] >= 8
    assert failed["score"] >= 8
    assert any("the rubric has a fault" in event["message"] for event in rollouts.of("failed"))


async def test_a_grader_that_is_away_is_waited_for_and_equal_scores_are_named(
    made: Callable[..., Made], feed: Feed
) -> None:
    with Trainer(feed.url, 4):
        rollouts = made("tests.rollouts.graded", concurrency=16, max_groups=101)
        await rollouts.rollouts.run()
    away, back = rollouts.of("away"), rollouts.of("back")
    assert [(event["what"], "the grader does not answer" in event["message"]) for event in away] == [
        ("environment", True)
    ]
    assert [event["what"] for event in back] == ["environment"]
    assert len(rollouts.of("dropped")) < 10
    assert len(rollouts.of("posted")) == 101
    assert [(event["groups"], event["score"]) for event in rollouts.of("equal")] == [(100, 1.0)]


async def test_sequences_that_the_trainer_does_not_take_are_dropped(made: Callable[..., Made], feed: Feed) -> None:
    with Trainer(feed.url, 4, max_token_len=5):
        rollouts = made()
        with pytest.raises(RolloutError, match="10 groups were dropped.*the trainer"):
            await rollouts.rollouts.run()
    assert not rollouts.of("posted")


async def test_the_number_of_rollouts_at_one_time_is_bounded(
    made: Callable[..., Made], feed: Feed, engine: EngineProcess
) -> None:
    engine.control(delay=0.05)
    with Trainer(feed.url, 4):
        await made(max_groups=6, concurrency=5).rollouts.run()
    assert engine.control()["most"] == 5


async def test_environments_of_the_package_play_over_other_tasks(
    made: Callable[..., Made], feed: Feed, engine: EngineProcess, tmp_path: Path
) -> None:
    with Trainer(feed.url, 4) as trainer:
        best = made(f"best-of-n+{DIGIT}", environment_args={"n": 2}, group_size=2, sequences=2, max_groups=1)
        await best.rollouts.run()
        user = {"user": {"max_turns": 2}, "done_marker": "no"}
        simulated = made(f"user-sim+{DIGIT}", environment_args=user, max_groups=1)
        await simulated.rollouts.run()
        first, second = trainer.wait(2)[:2]
    assert len(first["tokens"]) == 4
    assert len({tuple(tokens[:3]) for tokens in first["tokens"]}) == 1
    # The user's side is played by the same model, and is not trained.
    assert len(second["tokens"]) == 4
    assert all(
        tokens[0] == USER and masks[0] == -100 for tokens, masks in zip(second["tokens"], second["masks"], strict=True)
    )


async def test_a_rollout_of_several_sequences_says_which_option_it_needs(made: Callable[..., Made], feed: Feed) -> None:
    with Trainer(feed.url, 4):
        rollouts = made(f"best-of-n+{DIGIT}", environment_args={"n": 2})
        with pytest.raises(RolloutError, match="10 groups were dropped"):
            await rollouts.rollouts.run()
    assert (
        "give --sequences 2. A chat template that writes earlier turns in another way"
        in (rollouts.of("failed")[0]["message"])
    )


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ("no_such_environment", {}, "cannot be loaded.*no_such_environment"),
        ("tests.rollouts.nowhere", {}, "cannot be loaded.*nowhere"),
        ("tests.support.ports", {}, "cannot be loaded.*__all__"),
        (DIGIT, {"taskset": {"wrong": 1}}, "cannot be loaded.*wrong"),
        (DIGIT, {"taskset": 3}, "cannot be loaded"),
    ],
)
async def test_a_wrong_environment_is_an_error_with_its_remedy(
    made: Callable[..., Made], environment: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        made(environment, environment_args=arguments)


async def test_an_environment_without_tasks_and_a_wrong_tokenizer_are_errors(
    made: Callable[..., Made], feed: Feed, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="has no task"):
        await made(environment_args={"taskset": {"digits": 0}}).rollouts.run()
    with pytest.raises(ConfigError, match="--tokenizer"):
        await made(tokenizer=str(tmp_path / "none")).rollouts.run()
    with pytest.raises(ConfigError, match="serves tiny, not large"):
        await made(model="large").rollouts.run()
