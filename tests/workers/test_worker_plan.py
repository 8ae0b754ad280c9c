"""The plan of a master: levels of the graph of calls, routing by name, and mistakes that are found at once."""

import itertools

import pytest

from averaging.errors import ConfigError
from averaging.rl.workers import Average, Call, Model, ParamRealloc, Topology
from averaging.rl.workers.plan import levels_of
from tests.workers.backends import ppo

WORKERS = {"a": "127.0.0.1:1", "b": "127.0.0.1:2", "c": "127.0.0.1:3"}


def names(levels: list[list[Call]]) -> list[list[str]]:
    return [[call.name for call in level] for level in levels]


def test_calls_that_need_nothing_of_each_other_share_a_level() -> None:
    assert names(ppo(WORKERS, ["a"], ["b"]).levels) == [["actor_gen"], ["rew_inf"], ["actor_train"]]
    calls = (
        Call("critic_train", "critic", "train_step", ("answer", "reward", "value")),
        Call("actor_train", "actor", "train_step", ("answer", "reward", "ref")),
        Call("gen", "actor", "generate", ("prompt",), ("answer",)),
        Call("value", "critic", "inference", ("answer",), ("value",)),
        Call("ref", "ref", "inference", ("answer",), ("ref",)),
        Call("rew", "reward", "inference", ("answer",), ("reward",)),
        Call("report", "ref", "inference", ("value",), ("text",)),
    )
    assert names(levels_of(calls, ["prompt"])) == [
        ["gen"],
        ["ref", "rew", "value"],
        ["actor_train", "critic_train", "report"],
    ]


def test_a_cycle_is_named() -> None:
    calls = (
        Call("gen", "a", "generate", ("prompt", "score"), ("answer",)),
        Call("judge", "b", "inference", ("verdict",), ("score",)),
        Call("think", "c", "inference", ("answer",), ("verdict",)),
        Call("alone", "c", "inference", ("prompt",), ("other",)),
    )
    with pytest.raises(ConfigError, match="in a cycle: (.*)") as error:
        levels_of(calls, ["prompt"])
    cycle = str(error.value).rpartition(": ")[2].split(" → ")
    assert cycle[0] == cycle[-1]
    assert set(cycle) == {"gen", "judge", "think"}
    for before, after in itertools.pairwise(cycle):
        assert (before, after) in {("gen", "think"), ("think", "judge"), ("judge", "gen")}


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ((), "no calls"),
        ((Call("a", "m", "inference", ("x",), ("y",)),), "'x', an input of 'a', is made by no call"),
        ((Call("a", "m", "inference", ("prompt",), ("prompt",)),), "'prompt' is an output of 'a' and of the dataset"),
        (
            (Call("a", "m", "inference", ("prompt",), ("y",)), Call("b", "m", "inference", ("prompt",), ("y",))),
            "'y' is an output of 'b' and of a",
        ),
    ],
)
def test_mistakes_in_a_graph(calls: tuple[Call, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        levels_of(calls, ["prompt"])


def test_mistakes_in_a_call() -> None:
    with pytest.raises(ConfigError, match="interface of call 'a' must be one of generate, inference, train_step"):
        Call("a", "m", "forward", ("x",))
    with pytest.raises(ConfigError, match="has no inputs"):
        Call("a", "m", "generate", ())
    with pytest.raises(ConfigError, match="every 0"):
        Average(every=0)
    with pytest.raises(ConfigError, match="eta .* from 0 to 1, not 1.5"):
        ParamRealloc(source="a", target="b", eta=1.5)


def test_the_shards_of_a_model() -> None:
    topology = Topology(dp=2, tp=2, pp=2)
    model = Model("actor", tuple("abcdefgh"), topology)
    shards = {str(shard): worker for shard, worker in model.shards.items()}
    assert shards["actor@dp0-tp0-pp0"] == "a"
    assert shards["actor@dp0-tp1-pp0"] == "b"
    assert shards["actor@dp0-tp0-pp1"] == "c"
    assert shards["actor@dp1-tp1-pp1"] == "h"
    # The heads have the last pipeline rank and tensor rank 0.
    assert model.heads == {0: "c", 1: "g"}
    with pytest.raises(ConfigError, match="name each of its 8 workers once"):
        Model("actor", ("a", "b"), topology)
    with pytest.raises(ConfigError, match="at least one rank"):
        Topology(dp=0)


def test_mistakes_in_a_plan() -> None:
    with pytest.raises(ConfigError, match="model 'actor' has the unknown worker 'z'; the plan has a, b, c"):
        ppo(WORKERS, ["z"], ["b"])
    with pytest.raises(ConfigError, match="call 'actor_train' needs the unknown model 'ref'"):
        ppo(WORKERS, ["a"], ["b"], train_hooks=(ParamRealloc(source="actor", target="ref"),))
    with pytest.raises(ConfigError, match="must be between 'actor' and another model"):
        ppo(WORKERS, ["a"], ["b"], train_hooks=(ParamRealloc(source="actor", target="actor"),))
    other = Model("ref", ("b", "c"), Topology(tp=2))
    with pytest.raises(ConfigError, match="same tp and pp"):
        ppo(WORKERS, ["a"], ["b"], train_hooks=(ParamRealloc(source="actor", target="ref"),), models=(other,))
    with pytest.raises(ConfigError, match="batch_size is 2, but model 'actor' has 3"):
        ppo(WORKERS, ["a", "b", "c"], ["c"], batch_size=2)
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        ppo(WORKERS, ["a"], ["c"], batch_size=0)
    with pytest.raises(ConfigError, match="names two"):
        ppo(WORKERS, ["a"], ["b"], models=(Model("actor", ("c",)),))
    with pytest.raises(ConfigError, match="'no name' is no name of a worker"):
        ppo({"no name": "127.0.0.1:1"}, ["no name"], ["no name"])
    with pytest.raises(ConfigError, match="HOST:PORT"):
        ppo({"a": "nowhere"}, ["a"], ["a"])
