"""The groups of a batch, compared with an exhaustive search."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, strategies as st

from averaging.rl.feed.batch_formation import exact_sum, form_batch, reservations

SIZES = st.lists(st.integers(1, 6), max_size=8)


def subsets(sizes: list[int], target: int) -> list[tuple[int, ...]]:
    """Returns all sets of indices whose sizes add up to `target`."""
    indices = range(len(sizes))
    return [
        chosen
        for count in range(len(sizes) + 1)
        for chosen in combinations(indices, count)
        if sum(sizes[index] for index in chosen) == target
    ]


@given(SIZES, st.integers(0, 12))
def test_the_oldest_groups_that_add_up_exactly(sizes: list[int], target: int) -> None:
    found = exact_sum(sizes, target)
    possible = subsets(sizes, target)
    if not possible:
        assert found is None
        return
    # The newest group is as old as possible; of these sets, the first one in lexicographic order.
    front = min(max(chosen, default=-1) for chosen in possible)
    assert found == list(min(chosen for chosen in possible if max(chosen, default=-1) == front))


@given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from([None, 0, 1, 2])), max_size=8),
    st.integers(1, 10),
    st.dictionaries(st.integers(0, 2), st.integers(1, 6), max_size=3),
)
def test_reservations(queue: list[tuple[int, int | None]], target: int, reserved: dict[int, int]) -> None:
    sizes, envs = [size for size, _ in queue], [env for _, env in queue]
    waiting: Counter[int | None] = Counter()
    for size, env in queue:
        waiting[env] += size
    found = form_batch(sizes, envs, target, reserved)
    possible = subsets(sizes, target)
    if not possible or any(waiting[env] < count for env, count in reserved.items()):
        assert found is None
        return
    assert found is not None, "a batch exists, and each environment has enough groups"
    assert tuple(found) in possible

    def allocated(chosen: tuple[int, ...] | list[int]) -> Counter[int | None]:
        counts: Counter[int | None] = Counter()
        for index in chosen:
            counts[envs[index]] += sizes[index]
        return counts

    def keeps(chosen: tuple[int, ...] | list[int]) -> bool:
        return all(allocated(chosen)[env] >= count for env, count in reserved.items())

    if any(keeps(chosen) for chosen in possible):
        assert keeps(found), "reservations that can be kept are kept"


@given(st.integers(1, 1000), st.dictionaries(st.integers(0, 9), st.floats(0, 1), max_size=8))
def test_reservations_never_sum_to_more_than_a_batch(batch_size: int, proportions: dict[int, float]) -> None:
    found = reservations(batch_size, proportions)
    assert sum(found.values()) <= batch_size
    wanted = {env: int(batch_size * proportion) for env, proportion in proportions.items()}
    if sum(wanted.values()) <= batch_size:
        assert found == {env: want for env, want in wanted.items() if want}


def test_reservations_and_the_oldest_groups_that_fill_the_rest() -> None:
    assert form_batch([2, 2], [1, 1], 4, {0: 2}) is None, "too few groups of environment 0"
    assert form_batch([2, 2, 2], [1, 1, 0], 4, {0: 2}) == [0, 2]
    assert form_batch([1] * 5, [0, 0, 0, 3, 3], 4, {0: 1, 3: 1}) == [0, 1, 2, 3]
    assert form_batch([4] * 4, [0, 0, 1, None], 12, {0: 1, 1: 1}) == [0, 1, 2]
    # Three reservations of 2, rounded up to groups of 4, do not fit into 8. The oldest group goes first.
    assert form_batch([4, 4, 4], [2, 0, 1], 8, {0: 2, 1: 2, 2: 2}) == [0, 1]


T = 1 << 13


@pytest.mark.parametrize(
    "sizes",
    [
        [2] * 100_000,
        [2 * (1 + i % 1000) for i in range(99_999)],
        [2 * (1 + i % 1000) for i in range(99_999)] + [1],
        [2 * (1 + i * i % 4999) for i in range(99_999)] + [1],
    ],
    ids=("one size", "a thousand sizes", "a thousand sizes and the one that fits last", "sizes at random"),
)
def test_a_full_queue_of_groups_that_hardly_add_up(sizes: list[int]) -> None:
    found = exact_sum(sizes, T - 1)
    assert (found is None) == (sizes[-1] != 1)
    assert sum(sizes[index] for index in found or ()) == (T - 1 if found else 0)


def test_many_reservations_that_do_not_fit_together() -> None:
    envs: list[int | None] = [*range(1000), *[None] * 1000]
    sizes = [T // 3 + i for i in range(1000)] + [1] * 1000
    found = form_batch(sizes, envs, T, dict.fromkeys(range(1000), 5))
    assert found is not None
    assert sum(sizes[index] for index in found) == T
    envs = [i % 5 for i in range(20_000)]
    sizes = [6 + 2 * (i % 300) for i in range(20_000)]
    found = form_batch(sizes, envs, T, {0: 9, 1: 15, 2: 1, 3: 2, 4: 3})
    assert found is not None
    assert sum(sizes[index] for index in found) == T
