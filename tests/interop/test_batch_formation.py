"""Batches and buffers compared with those of atroposlib's library, on random queues."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from averaging.rl.feed.batch_formation import exact_sum, form_batch, reservations
from tests.interop.atropos import library

pytestmark = pytest.mark.interop

SETTINGS = settings(max_examples=1000)


def queue_of(groups: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Returns a queue of groups, given as (sequences, environment). The tokens of each are its index."""
    return [{"tokens": [[index]] * size, "env_id": env} for index, (size, env) in enumerate(groups)]


def indices(batch: list[dict[str, Any]] | None) -> list[int] | None:
    return None if batch is None else [group["tokens"][0][0] for group in batch]


GROUPS = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 3)), max_size=24)


@given(GROUPS, st.integers(1, 32))
@SETTINGS
def test_if_the_library_forms_a_batch_ours_forms_one_of_older_groups(
    groups: list[tuple[int, int]], target: int
) -> None:
    found = indices(library().grab_exact_from_heterogeneous_queue(queue_of(groups), target)[0])
    ours = exact_sum([size for size, _ in groups], target)
    if found is not None:
        assert ours is not None
        assert sum(groups[index][0] for index in ours) == target == sum(groups[index][0] for index in found)
        assert max(ours) <= max(found), "our newest group is not newer than that of the library"


@given(st.integers(1, 8), st.lists(st.integers(0, 3), max_size=24), st.integers(1, 8))
@SETTINGS
def test_groups_of_one_size_make_the_same_batches(size: int, envs: list[int], groups_in_batch: int) -> None:
    queue, left = queue_of([(size, env) for env in envs]), list(range(len(envs)))
    while True:
        batch, queue = library().grab_exact_from_heterogeneous_queue(queue, size * groups_in_batch)
        ours = exact_sum([size] * len(left), size * groups_in_batch)
        assert (batch is None) == (ours is None)
        if ours is None:
            return
        assert indices(batch) == [left[index] for index in ours]
        left = [group for index, group in enumerate(left) if index not in ours]


FRACTIONS = st.lists(st.sampled_from([None, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0]), min_size=4, max_size=4)


def configured(fractions: list[float | None]) -> list[dict[str, Any]]:
    return [
        {"registered_id": env, "connected": True, "min_batch_allocation": fraction}
        for env, fraction in enumerate(fractions)
    ]


@given(GROUPS, st.integers(1, 32), FRACTIONS)
@SETTINGS
def test_with_reservations(groups: list[tuple[int, int]], target: int, fractions: list[float | None]) -> None:
    """If the library forms a batch that keeps the reservations, ours forms one that keeps them, too."""
    queue = queue_of(groups)
    batch = indices(library().grab_batch_with_minimum_allocations(queue, target, configured(fractions))[0])
    wanted = {env: fraction for env, fraction in enumerate(fractions) if fraction is not None}
    reserved = reservations(target, wanted)
    ours = form_batch([size for size, _ in groups], [env for _, env in groups], target, reserved)

    def keeps(chosen: list[int]) -> bool:
        of: Counter[int] = Counter()
        for index in chosen:
            of[groups[index][1]] += groups[index][0]
        return all(of[env] >= count for env, count in reserved.items())

    if ours is not None:
        assert sum(groups[index][0] for index in ours) == target
    if batch is not None and keeps(batch):
        assert ours is not None
        assert keeps(ours)


@given(st.integers(1, 8), st.lists(st.integers(0, 3), max_size=24), st.integers(1, 8), FRACTIONS)
@SETTINGS
def test_with_reservations_groups_of_one_size_make_the_same_batches(
    size: int, envs: list[int], groups_in_batch: int, fractions: list[float | None]
) -> None:
    target = size * groups_in_batch
    wanted = {env: fraction for env, fraction in enumerate(fractions) if fraction is not None}
    reserved = {env: int(target * fraction) for env, fraction in wanted.items() if int(target * fraction)}
    rounded_up = sum(-(-count // size) * size for count in reserved.values())
    waiting = Counter(envs)
    if rounded_up > target or any(waiting[env] * size < count for env, count in reserved.items()):
        return  # the library cuts a reservation here; ours waits, or goes by the age of the groups
    batch = indices(
        library().grab_batch_with_minimum_allocations(
            queue_of([(size, e) for e in envs]), target, configured(fractions)
        )[0]
    )
    ours = form_batch([size] * len(envs), envs, target, reservations(target, wanted))
    assert ours == (None if batch is None else sorted(batch))
