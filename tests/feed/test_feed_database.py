"""No group is lost, split or used twice, whatever is posted and whenever the process ends."""

import shutil
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from averaging.errors import ConfigError, FeedError
from averaging.rl.feed.database import KEY_SECONDS, Database
from averaging.rl.feed.messages import Post, RegisterEnv, ScoredData
from averaging.rl.feed.run_state import MAX_BUFFERED, RunRecord, RunState
from tests.feed.feeds import environment, registration

OPENED: list[Database] = []


@pytest.fixture(autouse=True)
def closed_databases() -> Iterator[None]:
    """From Python 3.13 on, a database that is not closed warns."""
    yield
    while OPENED:
        OPENED.pop().close()


def open_database(path: str | Path = ":memory:", **limits: Any) -> Database:
    database = Database(path, fsync=False, new_state=partial(RunState, **limits))
    if threading.current_thread() is threading.main_thread():  # other threads close theirs themselves
        OPENED.append(database)
    return database


def running(path: str | Path = ":memory:", batch_size: int = 4, **limits: Any) -> Database:
    """A database whose trainer has asked for its first batch."""
    database = open_database(path, **limits)
    database.register(registration(batch_size))
    assert database.batch(1, None, 0.0) is None
    return database


def register_env(database: Database, config: RegisterEnv, key: bytes = b"", now: float = 0.0) -> int:
    return database.register_env(config, key, now)


def a_post(*groups: tuple[int, int | None, int], key: str = "") -> Post:
    """Returns a post of groups, given as (name, environment, sequences)."""
    data = [ScoredData(tokens=[[name]] * size, masks=[[name]] * size, scores=[0.0] * size) for name, _, size in groups]
    contents = [msgspec.json.encode(group) for group in data]
    return Post([(env, size) for _, env, size in groups], contents, key, b"".join(contents))


def waiting(database: Database) -> int:
    return len([*database.state.waiting])


def told(database: Database) -> list[tuple[str, int]]:
    return [(event.name, event.fields["env_id"]) for event in database.state.events]


def names(contents: Sequence[bytes]) -> list[int]:
    return [msgspec.json.decode(content)["tokens"][0][0] for content in contents]


def sizes(contents: Sequence[bytes]) -> list[int]:
    return [len(msgspec.json.decode(content)["tokens"]) for content in contents]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("post"), st.lists(st.tuples(st.sampled_from([None, 0, 1]), st.integers(1, 4)), max_size=4)),
        st.tuples(st.just("repeat"), st.integers(0, 9)),
        st.tuples(st.just("fetch"), st.booleans()),
        st.tuples(st.just("save"), st.none()),
        st.tuples(st.just("resume"), st.none()),
        st.tuples(st.just("restart"), st.none()),
    ),
    max_size=40,
)


@given(OPERATIONS, st.sampled_from([None, 0.25, 0.5]))
@settings(max_examples=60)
def test_each_group_is_trained_once_in_the_history_that_is_saved(
    operations: list[tuple[str, Any]], part: float | None
) -> None:
    """A trainer that resumes gets the same batches again. A server that restarts has the same state."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        database = running(path, max_groups=20)
        for group_size in (2, 4):
            register_env(database, environment(group_size, min_batch_allocation=part if group_size == 2 else None))
        posts: list[tuple[Post, list[int]]] = []
        accepted: dict[int, int] = {}
        given_out: dict[int, list[int]] = {}
        step = saved = 0
        for operation, argument in operations:
            if operation == "post":
                first = len(accepted) + 1000 * len(posts)
                post = a_post(*((first + i, env, size) for i, (env, size) in enumerate(argument)), key=f"{len(posts)}")
                try:
                    buffered, repeated = database.post(post, 0.0)
                except FeedError:
                    continue
                assert not repeated
                posts.append((post, buffered))
                accepted |= {first + i: size for i, (_, size) in enumerate(argument)}
            elif operation == "repeat" and posts:
                post, buffered = posts[argument % len(posts)]
                assert database.post(post, 1.0) == (buffered, True)
            elif operation == "fetch":
                found = database.batch(step + 1, saved, 0.0)
                if found is None:
                    assert step + 1 not in given_out
                    continue
                found_step, sequences, contents = found
                step += 1
                assert (found_step, sequences) == (step, 4) == (step, sum(sizes(contents)))
                assert given_out.setdefault(step, names(contents)) == names(contents), "another batch for the same step"
                assert [accepted[name] for name in names(contents)] == sizes(contents)
            elif operation == "save":
                saved = step
            elif operation == "resume":
                step = saved
            elif operation == "restart":
                database.close()
                database = open_database(path, max_groups=20)
        used = Counter(name for batch in given_out.values() for name in batch)
        assert max(used.values(), default=1) == 1
        assert waiting(database) == len(accepted) - len(used)
        state = database.state
        database.close()
        database = open_database(path, max_groups=20)
        assert (state.run, state.queue, state.batches) == (
            *(database.state.run, database.state.queue, database.state.batches),
        )
        assert [(env.config, env.name, env.key) for env in state.envs] == [
            (env.config, env.name, env.key) for env in database.state.envs
        ]
        assert {env: buffer for env, buffer in state.buffers.items() if buffer} == database.state.buffers
        database.close()


def test_batches_come_in_order_and_groups_first_in_first_out() -> None:
    database = running()
    database.post(a_post(*((name, None, 2) for name in range(8))), 0.0)
    for step in range(1, 5):
        found = database.batch(step, None, 0.0)
        assert found is not None
        assert (found[0], names(found[2])) == (step, [2 * step - 2, 2 * step - 1])
        assert database.state.run.step == step, "the step counts delivered batches only"
    assert database.batch(5, None, 0.0) is None
    database.post(a_post(*((name, None, 2) for name in range(4))), 0.0)
    fetched = [database.batch(None, None, 0.0) for _ in range(3)]
    assert [found and names(found[2]) for found in fetched] == [[0, 1], [2, 3], None], "each once without a step"
    assert database.state.batches == {}


def test_groups_posted_before_the_trainer_registers_are_kept() -> None:
    database = open_database()
    database.post(a_post((0, None, 2), (1, None, 2)), 0.0)
    with pytest.raises(FeedError, match="Trainer not registered"):
        database.batch(None, None, 0.0)
    with pytest.raises(FeedError, match="2 sequences, more than batch_size 1"):
        database.register(registration(1))
    assert database.register(registration())
    assert not database.register(registration(2)), "a second one changes nothing"
    found = database.batch(None, None, 0.0)
    assert found is not None
    assert names(found[2]) == [0, 1]


def test_smaller_groups_wait_until_they_add_up() -> None:
    database = running()
    register_env(database, environment(4))
    assert database.post(a_post((0, 0, 3)), 0.0) == ([3], False)
    assert database.post(a_post((1, 0, 2), (2, 0, 1)), 0.0) == ([5, 2], False)
    found = database.batch(1, None, 0.0)
    assert found is not None
    assert names(found[2]) == [0, 2]
    for name in range(MAX_BUFFERED - 1):
        database.post(a_post((name, 0, 3)), 0.0)
    with pytest.raises(FeedError, match="1024 groups of environment 0 wait and do not add up to 4"):
        database.post(a_post((9999, 0, 3)), 0.0)
    database.post(a_post((9999, None, 4)), 0.0)  # other groups are accepted


@pytest.mark.parametrize(
    ("groups", "status", "message"),
    [
        ([(0, 5, 2)], 404, "no environment with env_id 5"),
        ([(0, -1, 2)], 404, "no environment with env_id -1"),
        ([(0, 0, 3)], 422, "3 sequences, more than the group_size of environment 0, 2"),
        ([(0, None, 5)], 422, "5 sequences, more than the run's batch_size, 4"),
    ],
)
def test_a_list_with_one_group_that_cannot_be_used_is_refused_whole(
    groups: list[tuple[int, int | None, int]], status: int, message: str
) -> None:
    database = running()
    register_env(database, environment())
    with pytest.raises(FeedError, match=message) as refused:
        database.post(a_post((7, None, 2), *groups), 0.0)
    assert refused.value.status == status
    assert waiting(database) == 0


def test_a_key_identifies_one_post_for_a_day() -> None:
    database = running()
    post = a_post((0, None, 2), key="k")
    assert database.post(post, 0.0) == ([], False)
    assert database.post(post, KEY_SECONDS) == ([], True)
    with pytest.raises(FeedError, match="used for other data before"):
        database.post(a_post((1, None, 2), key="k"), 1.0)
    database.post(a_post((1, None, 2), key="another"), KEY_SECONDS + 1)
    assert database.post(post, KEY_SECONDS + 2) == ([], False), "the key is forgotten after a day"
    assert waiting(database) == 3


def test_a_full_queue_refuses_unless_it_holds_no_batch() -> None:
    database = running(max_groups=3)
    register_env(database, environment(min_batch_allocation=0.5))
    for name in range(3):
        database.post(a_post((name, None, 2)), 0.0)
    # There is no batch without a group of environment 0, so the full queue accepts one.
    database.post(a_post((3, 0, 2)), 0.0)
    with pytest.raises(FeedError, match="full: 4 groups and .* bytes wait; post the same again") as full:
        database.post(a_post((4, 0, 2)), 0.0)
    assert (full.value.status, full.value.retry_after) == (503, 1.0)
    found = database.batch(1, None, 0.0)
    assert found is not None
    assert names(found[2]) == [0, 3]
    database.post(a_post((4, None, 2)), 0.0)


@pytest.mark.parametrize(("limits", "size", "room"), [({"max_groups": 3}, 3, 6), ({"max_bytes": 500}, 2, 2)])
def test_a_queue_without_a_batch_and_its_bytes_are_bounded_too(limits: dict[str, Any], size: int, room: int) -> None:
    database = running(**limits)
    for name in range(room):
        database.post(a_post((name, None, size)), 0.0)
    with pytest.raises(FeedError):
        database.post(a_post((room, None, size)), 0.0)


def test_the_oldest_kept_batches_are_forgotten_first(caplog: pytest.LogCaptureFixture) -> None:
    database = running(max_bytes=1500)
    database.post(a_post(*((name, None, 4) for name in range(9))), 0.0)
    for step in range(1, 10):
        assert database.batch(step, 0, 0.0) is not None
    kept = min(database.state.batches)
    assert 1 < kept < 9
    assert database.batch(kept, 0, 0.0) is not None
    assert f"resume from step {kept - 1} or later" in caplog.text
    with pytest.raises(FeedError, match=f"the batch of step {kept - 1} is forgotten") as gone:
        database.batch(kept - 1, 0, 0.0)
    assert gone.value.status == 410


def test_a_step_of_another_run_is_refused() -> None:
    database = running()
    with pytest.raises(FeedError, match="step 7 was requested, but the next batch is that of step 1") as refused:
        database.batch(7, None, 0.0)
    assert refused.value.status == 409
    with pytest.raises(FeedError, match="the batch of step 0 is forgotten"):
        database.batch(0, None, 0.0)
    database.reset()
    database.register(registration(starting_step=10))
    database.post(a_post((0, None, 4)), 0.0)
    found = database.batch(11, 10, 0.0)
    assert found is not None
    assert found[0] == database.state.run.step == 11


def test_a_reset_deletes_everything(tmp_path: Path) -> None:
    database = running(tmp_path / "store")
    register_env(database, environment())
    post = a_post((0, 0, 2), key="k")
    database.post(post, 0.0)
    database.reset()
    assert database.state == RunState(run=RunRecord(trainer=1))
    assert database.latest == b""
    with pytest.raises(FeedError, match="no environment"):
        database.post(post, 0.0)
    database.close()
    database = open_database(tmp_path / "store")
    assert database.state == RunState(run=RunRecord(trainer=1))
    database.close()


@pytest.mark.parametrize("reset", [False, True])
def test_a_store_that_is_killed_right_after_its_start_is_whole(reset: bool, tmp_path: Path) -> None:
    database = open_database(tmp_path / "store")
    if reset:
        database.reset()
    shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name} killed")
    database.close()
    open_database(tmp_path.parent / f"{tmp_path.name} killed" / "store").close()


def test_a_file_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no database " * 100)
    with pytest.raises(ConfigError, match="cannot be used: file is not a database; give another file"):
        open_database(text)
    assert text.read_text() == "no database " * 100
    other = tmp_path / "other"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    with pytest.raises(ConfigError, match="not the store of a feed"):
        open_database(other)
    with pytest.raises(ConfigError, match="cannot be used"):
        open_database(tmp_path / "nowhere" / "store")


def test_a_store_has_one_server_and_fsync_waits_for_the_disk(tmp_path: Path) -> None:
    for fsync, level in ((False, 1), (True, 2)):
        database = Database(tmp_path / f"fsync {fsync}", fsync=fsync, new_state=RunState)
        assert database._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert database._db.execute("PRAGMA synchronous").fetchone() == (level,)
        database.close()
    database = open_database(tmp_path / "store")
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="another process uses it; give another file"):
        open_database(tmp_path / "store")
    database.close()


def test_the_weight_of_an_environment() -> None:
    database = running()
    for weight in (1.0, 3.0, 0.0):
        register_env(database, msgspec.structs.replace(environment(), weight=weight))
    state = database.state
    assert [state.status_env(env)["env_weight"] for env in range(3)] == [0.25, 0.75, 0.01]
    database.disconnect(1)
    assert state.status_env(0)["env_weight"] == 1.0
    database.disconnect(0)
    assert state.status_env(2)["env_weight"] == 0.01, "no environment with a weight is left"


def test_an_environment_that_all_wait_for_gives_up_its_reservation_and_gets_it_back() -> None:
    database = running(env_timeout=60.0)
    register_env(database, environment(min_batch_allocation=0.5), now=100.0)
    database.post(a_post(*((name, None, 2) for name in range(8))), 100.0)
    assert database.batch(1, None, 159.0) is None
    assert database.state.events == []
    found = database.batch(1, None, 160.0)
    assert found is not None
    assert names(found[2]) == [0, 1]
    assert told(database) == [("silent", 0)]
    assert database.state.silent_environments() == ["env_0"]
    assert database.state.status_env(0)["unallocated_fraction"] == 1.0
    assert database.batch(2, None, 161.0) is not None
    database.post(a_post((9, 0, 2)), 162.0)
    assert told(database) == [("silent", 0), ("returned", 0)]
    assert database.state.status_env(0)["unallocated_fraction"] == 0.5
    found = database.batch(3, None, 162.0)
    assert found is not None
    assert names(found[2]) == [4, 9]
    assert database.batch(4, None, 200.0) is None, "the run waits for it again"
    database.disconnect(0)
    assert database.batch(4, None, 200.0) is not None


def test_an_environment_that_waits_for_the_trainer_keeps_its_reservation() -> None:
    database = running(env_timeout=60.0)
    register_env(database, environment(min_batch_allocation=0.5))
    database.post(a_post((0, 0, 2), *((name, None, 2) for name in range(1, 5))), 0.0)
    assert database.batch(1, None, 10_000.0) is not None, "its group has waited, and not the trainer"
    assert database.batch(2, None, 10_059.0) is None, "its time begins with the batch that took its last group"
    assert database.state.events == []
    assert database.batch(2, None, 10_060.0) is not None


@pytest.mark.parametrize("own_names", [False, True])
def test_environments_that_only_register_again_and_again_do_not_stop_the_run(own_names: bool) -> None:
    """For example one that is restarted each minute, and fails before its first post."""
    database = running(batch_size=100, env_timeout=300.0)
    database.post(a_post(*((name, None, 2) for name in range(1000))), 0.0)
    formed = []
    for minute in range(20):
        config = environment(min_batch_allocation=0.5)
        if own_names:
            config = msgspec.structs.replace(config, desired_name=f"pod-{minute}")
        register_env(database, config, now=60.0 * minute)
        formed.append(database.batch(None, None, 60.0 * minute + 30) is not None)
    assert formed == [False] * 5 + [True] * 15
    own = a_post((2000, 19 if own_names else 0, 2))
    database.post(own, 1200.0)
    assert database.batch(None, None, 1200.0) is None, "it posts, so it has its reservation again"
    for _ in range(24):
        database.post(own, 1200.0)
    found = database.batch(None, None, 1200.0)
    assert found is not None
    assert names(found[2]).count(2000) == 25


def test_a_restarted_server_waits_again(tmp_path: Path) -> None:
    database = running(tmp_path / "store", env_timeout=60.0)
    register_env(database, environment(min_batch_allocation=0.5))
    database.post(a_post((1, None, 2), (2, None, 2)), 0.0)
    database.close()
    new_state = partial(RunState, env_timeout=60.0)
    database = Database(tmp_path / "store", fsync=False, new_state=new_state, clock=lambda: 1000.0)
    assert database.batch(1, None, 1059.0) is None
    assert database.batch(1, None, 1060.0) is not None
    database.close()


def test_an_environment_that_returns_takes_its_old_place(tmp_path: Path) -> None:
    database = running(tmp_path / "store", env_timeout=60.0)
    key, other_key = b"1", b"2"
    assert register_env(database, environment(), key, 0.0) == 0
    assert register_env(database, environment(), other_key, 1.0) == 1, "both of them work"
    assert register_env(database, environment(), key, 2.0) == 0, "it has the key"
    assert register_env(database, environment(4), key, 2.0) == 2, "another configuration"
    assert register_env(database, environment(), now=59.0) == 3
    database.post(a_post((0, 0, 2), (1, 1, 2)), 60.0)
    database.state.envs[1].heard = 100.0  # it has asked for its status
    assert register_env(database, environment(), now=120.0) == 0, "it was silent"
    assert register_env(database, environment(), now=121.0) == 3
    assert register_env(database, environment(), now=121.0) == 4
    database.disconnect(1)
    assert register_env(database, environment(), now=122.0) == 1, "it has disconnected"
    assert [env.name for env in database.state.envs] == ["env_0", "env_1", "env_2", "env_3", "env_4"]
    database.close()
    database = open_database(tmp_path / "store")
    assert [env.key for env in database.state.envs] == [b"", b"", key, b"", b""]
    assert all(env.connected for env in database.state.envs)
    database.close()


def test_a_trainer_is_refused_once_another_has_registered(tmp_path: Path) -> None:
    database = running(tmp_path / "store")
    database.post(a_post((0, None, 4), (1, None, 4)), 0.0)
    assert database.batch(1, 0, 0.0, 1) is not None
    assert not database.register(registration())
    assert database.batch(1, 0, 0.0, 2) is not None
    for _ in range(2):
        with pytest.raises(FeedError, match="has registration 1, but another .* as number 2.* End this one") as old:
            database.batch(2, 1, 0.0, 1)
        assert (old.value.status, database.state.run.saved) == (409, 0), "what it says it has saved does not count"
        with pytest.raises(FeedError, match="has registration 1"):
            database.register(registration(), 1)
        database.close()
        database = open_database(tmp_path / "store")
    database.reset()
    with pytest.raises(FeedError, match="has registration 1"):
        database.register(registration(), 1)
    assert database.register(registration(), 2)
    assert database.state.run.trainer == 3
    assert database.batch(None, None, 0.0) is None, "trainers that know no number are served"
    database.close()


@pytest.mark.parametrize(
    ("batch_size", "group_sizes", "posted", "expected"),
    [
        (10, [4], [], "batch_size 10 is not a multiple of the group size 4"),
        (10, [], [4], "batch_size 10 is not a multiple of the group size 4"),
        (7, [4, 6], [], "batch_size 7 is not a sum of multiples of the group sizes 4, 6"),
        (10, [4, 6], [], ""),
        (10, [4], [2], ""),
        (8, [4], [], ""),
        (8, [], [], ""),
    ],
)
def test_a_batch_that_can_never_be_formed(
    batch_size: int, group_sizes: list[int], posted: list[int], expected: str
) -> None:
    database = running(batch_size=batch_size)
    for size in group_sizes:
        register_env(database, environment(size))
    database.post(a_post(*((0, None, size) for size in posted)), 0.0)
    warning = database.state.warning()
    assert warning.startswith(f"no batch can be formed: {expected};" if expected else ""), warning
    assert bool(warning) == bool(expected)
