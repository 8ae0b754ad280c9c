"""Groups that are too old for the trainer, whatever versions are claimed and reported, and whoever is restarted."""

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st

from averaging.errors import ConfigError
from averaging.rl.feed import BatchFeed, FeedEnvironment, FeedServer, ScoredData
from averaging.rl.feed.database import Database
from averaging.rl.feed.messages import MAX_STEP, MAX_VERSIONS, UNKNOWN, Post
from averaging.rl.feed.run_state import Fit, RunState, TrainerVersion
from averaging.weights import WeightFollower, WeightPublisher
from tests.feed.feeds import Feed, a_group, environment, names, registration
from tests.feed.test_feed_server import GROUP, begin, serving
from tests.weights.test_weights import Publishing


@pytest.mark.parametrize(
    ("version", "limit", "fit"),
    [
        (7, 0, Fit.FITS),
        (6, 0, Fit.OLD),
        (6, 1, Fit.FITS),
        (5, 1, Fit.OLD),
        (0, 7, Fit.FITS),
        (0, 6, Fit.OLD),
        (8, 0, Fit.WAITS),
        (None, 0, Fit.FITS),
        (0, None, Fit.FITS),
        (UNKNOWN, 7, Fit.UNKNOWN),
        (UNKNOWN, 9, Fit.UNKNOWN),
        (UNKNOWN, None, Fit.FITS),
    ],
)
def test_a_limit_of_0_means_only_the_newest(version: int | None, limit: int | None, fit: Fit) -> None:
    assert TrainerVersion(7, 1).fit_of(version, 0, limit) is fit


def test_a_group_that_is_ahead_of_two_reports_is_of_other_weights() -> None:
    assert TrainerVersion().fit_of(9, 0, 0) is Fit.FITS, "nothing is known yet"
    trainer = TrainerVersion(5, 1)
    assert trainer.fit_of(9, 0, 0) is Fit.WAITS
    assert trainer.fit_of(9, 1, 0) is Fit.WAITS, "the report may have been sent before the group arrived"
    assert trainer.fit_of(9, 2, 0) is Fit.FOREIGN


def test_only_another_registration_goes_back() -> None:
    trainer = TrainerVersion()
    for version, number, newest in ((5, 1, 5), (3, 1, 5), (6, 1, 6), (4, 2, 4), (4, 2, 4), (3, 2, 4)):
        trainer.report(version, number)
        assert trainer.newest == newest


def a_post(
    name: int, version: int | list[int] | msgspec.UnsetType | None, env: int | None = None, size: int = 2, key: str = ""
) -> Post:
    data = ScoredData(tokens=[[name]] * size, masks=[[name]] * size, scores=[0.0] * size, env_id=env, version=version)
    return Post.of([data], key)


def running(path: str | Path, limit: int | None) -> Database:
    database = Database(path, fsync=False, new_state=partial(RunState, max_staleness=limit))
    database.register(registration(4))
    return database


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.integers(-3, 3), st.sampled_from([None, 0]), st.integers(1, 4)),
        st.tuples(st.just("post old API"), st.just(0), st.none(), st.integers(1, 4)),
        st.tuples(st.just("train"), st.integers(0, 2), st.none(), st.just(0)),
        st.tuples(st.just("resume"), st.integers(0, 4), st.none(), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.none(), st.just(0)),
    ),
    max_size=40,
)


@given(OPERATIONS, st.sampled_from([0, 1, 3]))
@settings(max_examples=25)
def test_no_batch_has_a_group_beyond_the_limit_and_none_is_lost_uncounted(
    operations: list[tuple[str, int, int | None, int]], limit: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        database = running(path, limit)
        database.batch(1, None, 0.0)
        database.register_env(environment(4), b"", 0.0)
        versions: dict[int, int | None] = {}
        trained: Counter[int] = Counter()
        stale, newest, trainer, step = 0, 0, database.state.run.trainer, 0
        for operation, argument, env, size in operations:
            if operation.startswith("post"):
                version = None if operation == "post old API" else max(0, newest + argument)
                posted = msgspec.UNSET if version is None else version
                database.post(a_post(len(versions), posted, env, size), 0.0)
                versions[len(versions)] = version
            elif operation == "train":
                found = database.batch(step + 1, step, 0.0, trainer, newest)
                if found is not None:
                    step += 1
                    for content in found[2]:
                        group = msgspec.json.decode(content)
                        name = group["tokens"][0][0]
                        assert group.get("version") == versions[name]
                        assert versions[name] is None or 0 <= newest - (versions[name] or 0) <= limit
                        trained[name] += 1
                newest += argument
            elif operation == "resume":  # from a checkpoint with an older version; the step is that of the next batch
                database.register(registration(4))
                trainer, newest = database.state.run.trainer, max(0, newest - argument)
            else:
                stale += database.state.stale.total()
                before = database.state
                database.close()
                database = running(path, limit)
                trainer = database.state.run.trainer
                assert database.state.run.version.newest == before.run.version.newest, "the limits hold after a restart"
                assert database.state.queue == before.queue
        waiting = [*database.state.waiting]
        assert max(trained.values(), default=1) == 1
        stale += database.state.stale.total()
        assert len(versions) == trained.total() + len(waiting) + stale
        database.close()


def test_another_limit_holds_from_the_start_on(tmp_path: Path) -> None:
    database = running(tmp_path / "store", None)
    database.batch(1, None, 0.0, version=3)
    for name in range(4):
        database.post(a_post(name, name), 0.0)
    for _ in range(2):  # what is dropped is deleted with the first request
        database.close()
        database = running(tmp_path / "store", 0)
        assert [each.number for each in database.state.queue] == [3]
    assert database.state.stale.total() == 0
    database.close()


FALSE = [
    (-1, "Expected `int` >= 0"),
    (2**53 + 1, "Expected `int` <= 9007199254740992"),
    (2**70, "version"),
    (1.5, "got `float`"),
    (True, "got `bool`"),
    ("newest", "version"),
    ({"of": 3}, "got `object`"),
    ([], "length >= 1"),
    (list(range(MAX_VERSIONS + 1)), "length <= 64"),
    (list(range(200_000)), "length <= 64"),
    ([3, -3], "Expected `int` >= 0"),
    ([[3]], "got `array`"),
]


async def test_a_version_that_is_none_is_refused() -> None:
    async with serving(max_staleness=0) as client:
        await begin(client)
        for version, message in FALSE:
            reply = await client.post("/scored_data", json=GROUP | {"version": version})
            assert (reply.status_code, message in reply.json()["message"]) == (422, True), reply.text
        for version in ("-1", "x", str(MAX_STEP + 1), "9" * 30):
            assert (await client.get("/batch", params={"version": version})).status_code == 422
        assert (await client.get("/status")).json() == {"current_step": 0, "queue_size": 0}
    wrong: Any
    for wrong in (-1, 1.5):
        with pytest.raises(ConfigError, match="max_staleness must be a number"):
            FeedServer(":memory:", max_staleness=wrong)


async def test_who_sends_no_versions_sees_the_old_api() -> None:
    """Also if the server has a limit: the bytes are those of a server without."""
    replies = []
    limits: list[dict[str, Any]] = [{}, {"max_staleness": 0}]
    for options in limits:
        async with serving(**options) as client:
            await begin(client)
            answers = [
                await client.post("/scored_data", json=GROUP),
                await client.post("/scored_data_list", json=[GROUP, GROUP]),
                await client.get("/status"),
                await client.request("GET", "/status-env", json={"env_id": 0}),
                await client.get("/batch"),
                await client.get("/latest_example"),
            ]
        replies.append([reply.content for reply in answers])
    assert replies[0] == replies[1]
    assert replies[0][0] == b'{"status":"received"}'
    assert not any(b"version" in content or b"stale" in content for content in replies[0])


async def test_what_is_too_old_is_counted_and_told() -> None:
    events: list[Any] = []
    async with serving(max_staleness=1, on_event=events.append) as client:
        await begin(client)
        await client.get("/batch", params={"version": 5})
        posts = [
            await client.post("/scored_data", json=GROUP | {"env_id": 0, "version": version})
            for version in (5, [4, 5], 3)
        ]
        told = {"status": "received", "newest_version": 5, "max_staleness": 1}
        assert [post.json() for post in posts] == [told, told, told | {"stale": 1}]
        many = await client.post("/scored_data_list", json=[GROUP | {"version": [5, 1]}, GROUP | {"version": 2}, GROUP])
        assert many.json() == {"groups_processed": 3, "stale": 2} | told
        status = (await client.get("/status")).json()
        assert "env_0 posts" in status.pop("warning")
        assert status == {
            "current_step": 0,
            "queue_size": 3,
            "newest_version": 5,
            "max_staleness": 1,
            "stale_groups": 3,
        }
        status = (await client.request("GET", "/status-env", json={"env_id": 0})).json()
        assert (status["newest_version"], status["stale_groups"]) == (5, 1)
        batch = (await client.get("/batch", params={"version": 5})).json()
        assert (batch["newest_version"], [group["version"] for group in batch["batch"]]) == (5, [5, [4, 5]])
        await client.post("/scored_data", json=GROUP | {"env_id": 0, "version": 2**53})
        assert (await client.get("/status")).json()["newest_version"] == 5, "a claim is not a report"
        for _ in range(2):
            await client.get("/batch", params={"version": 5})
        metrics = (await client.get("/metrics")).text
    assert 'averaging_feed_stale_groups_total{reason="old"} 3.0' in metrics
    assert 'averaging_feed_stale_groups_total{reason="foreign"} 1.0' in metrics
    assert "averaging_feed_newest_version 5.0" in metrics
    stale = [event for event in events if event.name == "stale"]
    assert [tuple(event.fields[name] for name in ("name", "groups", "reason")) for event in stale] == [
        *(("env_0", 1, "old"), ("", 2, "old"), ("env_0", 1, "foreign"))
    ]
    assert str(stale[0]) == "1 groups of env_0 are old: the trainer is at version 5"


@pytest.mark.parametrize("reported", [0, 5])
async def test_groups_of_unknown_weights_are_dropped_where_versions_are_limited(
    reported: int, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = GROUP | {"env_id": 0, "version": None}
    async with serving(max_staleness=9) as client:
        await begin(client)
        assert (await client.post("/scored_data", json=unknown)).json() == {"status": "received"}
        await client.get("/batch", params={"version": reported})  # now it is known that the limit holds
        answer = (await client.post("/scored_data", json=unknown)).json()
        assert answer == {"status": "received", "newest_version": reported, "max_staleness": 9, "stale": 1}
        status = (await client.get("/status")).json()
        assert (status["queue_size"], status["stale_groups"]) == (0, 2)
        metrics = (await client.get("/metrics")).text
    assert 'averaging_feed_stale_groups_total{reason="unknown"} 2.0' in metrics
    async with serving() as client:
        await begin(client)
        await client.get("/batch", params={"version": reported})
        await client.post("/scored_data_list", json=[unknown, unknown])
        assert len((await client.get("/batch")).json()["batch"]) == 2, "without a limit they are trained"


@pytest.mark.parametrize("version", [{}, {"version": None}, {"version": 3}, {"version": [3, 5]}])
async def test_an_environment_whose_engine_follows_nobody_is_named(
    version: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "feed.sqlite"
    async with serving(store=store, max_staleness=1) as client:
        await begin(client)
        await client.get("/batch", params={"version": 5})
        await client.post("/scored_data", json=GROUP | {"env_id": 0} | version)
        warning = (await client.get("/status")).json()["warning"]
        assert "env_0 posts groups without a version" in warning
        assert "averaging serve --follow" in warning
        assert caplog.text.count("env_0 posts groups without a version") == 1
    caplog.clear()
    async with serving(store=store, max_staleness=1) as client:  # the environment may wait for a version meanwhile
        assert (await client.get("/status")).json()["warning"] == warning
        assert caplog.text.count("env_0 posts groups without a version") == 1
        await client.post("/scored_data", json=GROUP | {"env_id": 0, "version": 5})
        assert "warning" not in (await client.get("/status")).json(), "it follows now"
        await client.get("/batch", params={"version": 9})
        assert "warning" not in (await client.get("/status")).json(), "its group was not too old when it was posted"


async def test_a_limit_without_a_version_of_the_trainer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(max_staleness=1) as client:
        await begin(client)
        await client.post("/scored_data_list", json=[GROUP | {"version": 3}] * 2)
        assert (await client.get("/batch")).json()["step"] == 1
        assert "the trainer does not report its version" in (await client.get("/status")).json()["warning"]
    assert "the limit of 1 versions has no effect" in caplog.text


def begin_run(batches: BatchFeed) -> None:
    """Registers, and asks for the first batch in vain, so that environments can register."""
    batches._register()
    assert batches._request_batch() == b""


def test_the_version_of_a_follower_travels_from_its_publisher_to_the_batch(tmp_path: Path) -> None:
    """Without a line of the user's, and over restarts of the feed and the trainer."""
    publisher, copy = WeightPublisher(), {"w": torch.zeros(8)}
    publisher.publish_now({"w": torch.zeros(8)}, version=10)
    with (
        Feed(tmp_path / "store", "--max-staleness", "1") as feed,
        Publishing(publisher) as endpoint,
        WeightFollower(copy, join=[endpoint]) as follower,
    ):
        with BatchFeed(feed.url, registration(), poll=0.05, weights=publisher) as batches:
            begin_run(batches)
            with FeedEnvironment(feed.url, environment(), weights=follower) as env:
                assert follower.update(30)
                assert env.post(a_group(0)).newest_version == 10
                publisher.publish_now({"w": torch.ones(8)}, version=11)
                assert follower.update(30)
                posted = env.post(a_group(1))
                assert (posted.newest_version, posted.max_staleness, posted.stale) == (10, 1, 0), "ahead of the report"
                batch = next(batches)
                assert (names(batch), batch.versions, batch.ages) == ([0, 1], [[10], [11]], [1, 0])
                publisher.publish_now({"w": torch.full((8,), 2.0)}, version=13)
                assert batches._request_batch() == b""
                feed.kill()
                feed.start()
                assert env.post(a_group(2)).stale == 1, "the limit holds after a restart of the feed"
                assert env.post(a_group(3), version=[11, 13]).stale == 1, "the oldest version counts"
                assert env.post(a_group(4), version=12).stale == 0
                assert env.status().stale_groups == 2
        resumed = SimpleNamespace(version=11)
        with BatchFeed(feed.url, registration(starting_step=1), poll=0.05, weights=resumed) as batches:
            batches._register()
            assert batches._request_batch() == b"", "the group of version 12 is ahead of the checkpoint"
            with FeedEnvironment(feed.url, environment(desired_name="new")) as env:
                assert env.post(a_group(5), version=9).stale == 1, "the version of the checkpoint counts"
                for name, version in ((6, 10), (7, 11)):
                    assert env.post(a_group(name), version=version).stale == 0
            batch = next(batches)
            assert (names(batch), batch.ages, batch.newest_version) == ([6, 7], [1, 0], 11)
