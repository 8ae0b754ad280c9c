"""Scored sequences, and groups of them."""

import math
from typing import Any

import pytest

from averaging.errors import RolloutError
from averaging.rl.feed import Posted
from averaging.rl.rollouts.environment import ScoredSequence, TruncatedMode, group_of, is_too_old


def sequence(**changes: Any) -> ScoredSequence:
    fields: dict[str, Any] = {
        "tokens": [5, 6, 7],
        "sampled": [False, True, True],
        "logprobs": [0.0, -0.5, -1.0],
        "score": 1.0,
        "versions": [3],
    }
    return ScoredSequence(**fields | changes)


def test_a_group_trains_what_the_model_wrote() -> None:
    group = group_of([sequence(), sequence(score=0.0)], TruncatedMode.DROP)
    assert group.masks == [[-100, 6, 7]] * 2
    assert group.inference_logprobs == [[1.0, -0.5, -1.0]] * 2
    assert list(group.scores) == [1.0, 0.0]
    assert group.version == 3
    assert group.overrides is None


def test_a_group_names_all_versions_that_made_it() -> None:
    named = [sequence(versions=[4, 5]), sequence(versions=[3])]
    assert group_of(named, TruncatedMode.DROP).version == [3, 4, 5]
    assert group_of([*named, sequence(versions=[])], TruncatedMode.DROP).version is None, "a part is unknown"


def test_of_many_versions_the_oldest_and_the_newest_are_named() -> None:
    group = group_of([sequence(versions=[number]) for number in range(100)], TruncatedMode.DROP)
    assert group.version == [0, *range(37, 100)]


@pytest.mark.parametrize("mode", [TruncatedMode.MASK, TruncatedMode.TRAIN])
def test_truncated_sequences_are_marked(mode: TruncatedMode) -> None:
    group = group_of([sequence(), sequence(truncated=True)], mode)
    assert group.overrides == [{}, {"truncated": True}]
    assert group.masks == [[-100, 6, 7], [-100, 6, 7] if mode is TruncatedMode.TRAIN else [-100] * 3]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sampled": [False] * 3}, "empty"),
        ({"sampled": [True]}, "lengths"),
        ({"logprobs": [0.0]}, "lengths"),
        ({"score": math.nan}, "score"),
        ({"logprobs": [0.0, -math.inf, 0.0]}, "logprobs"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RolloutError) as refused:
        sequence(**changes)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("served", "newest", "limit", "too_old"),
    [(6, 7, 1, False), (6, 7, 0, True), (7, 7, 0, False), (5, 7, 1, True), (None, 7, 9, True), (0, 7, None, False)],
)
def test_weights_that_are_too_old_for_the_feed(
    served: int | None, newest: int, limit: int | None, too_old: bool
) -> None:
    assert is_too_old(served, Posted("received", newest, limit)) == too_old
    assert not is_too_old(served, Posted("received", None, limit))
