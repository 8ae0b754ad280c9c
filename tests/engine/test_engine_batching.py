"""Which requests go together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.engine import GenerationRequest, Sampling
from averaging.engine.batching import in_turns, next_batch

REQUESTS = st.lists(
    st.builds(
        GenerationRequest,
        prompts=st.lists(st.lists(st.just(1), min_size=1, max_size=20).map(tuple), min_size=1, max_size=2).map(tuple),
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 20),
        sampling=st.sampled_from([Sampling(), Sampling(temperature=0)]),
        seed=st.sampled_from([None, None, None, 7]),
    ),
    max_size=8,
)


@given(REQUESTS)
def test_a_batch_has_the_oldest_and_fits(waiting: list[GenerationRequest]) -> None:
    chosen = [waiting[index] for index in next_batch(waiting, 8, 40)]
    assert bool(chosen) == bool(waiting)
    if chosen:
        assert chosen[0] is waiting[0]
        assert len({each.sampling for each in chosen}) == 1
        assert sum(each.sequences for each in chosen) <= 8
        assert max(each.longest for each in chosen) + max(each.max_tokens for each in chosen) <= 40
        assert len(chosen) == 1 or all(each.seed is None for each in chosen)


def test_all_that_are_alike_go_together() -> None:
    request = GenerationRequest(prompts=((1, 2),), max_tokens=3)
    assert next_batch([request] * 5, 4, 40) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("networks", "served", "order"),
    [
        ("", {}, []),
        ("aaab", {}, [0, 3, 1, 2]),
        ("aaab", {"a": 4}, [3, 0, 1, 2]),
        ("abc", {"a": 5, "b": 4}, [2, 1, 0]),
        ("aabbc", {"a": 1, "b": 2, "c": 3}, [0, 2, 4, 1, 3]),
    ],
)
def test_networks_have_their_turns(networks: str, served: dict[str, int], order: list[int]) -> None:
    assert in_turns(networks, served) == order
