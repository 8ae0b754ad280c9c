"""From whom followers get a version: few copies from the publisher, short ways, no circle; and how late they are."""

import random
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from averaging.weights import Staleness, StalenessWatch
from averaging.weights.publisher import PUBLISHER, Tree


def names(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def depth(tree: Tree, follower: bytes) -> int:
    steps = 0
    while follower != PUBLISHER:
        follower = tree.sources[follower]
        steps += 1
        assert steps <= len(tree.sources), "a circle"
    return steps


@pytest.mark.parametrize(("copies", "fan_out", "hops"), [(1, 1, 32), (2, 2, 5), (2, 4, 3)])
def test_32_followers_cost_few_copies(copies: int, fan_out: int, hops: int) -> None:
    tree, followers = Tree(copies, fan_out), names(32)
    for follower in followers:
        tree.source_of(follower, followers, ())
    children = Counter(tree.sources.values())
    assert children.pop(PUBLISHER) == copies
    assert max(children.values()) == fan_out
    assert max(depth(tree, follower) for follower in followers) == hops


def test_followers_that_do_not_hand_on_get_it_from_those_that_do() -> None:
    tree, followers = Tree(1, 8), names(8)
    for follower in followers:
        tree.source_of(follower, followers[:1], ())
    assert Counter(tree.sources.values()) == {PUBLISHER: 1, followers[0]: 7}


def test_a_follower_whose_source_failed_gets_the_version_from_the_publisher() -> None:
    tree, (a, b, c, d) = Tree(2, 2), names(4)
    able = [a, b, c, d]
    assert [tree.source_of(each, able, ()) for each in (a, b, c)] == [PUBLISHER, PUBLISHER, a]
    assert tree.source_of(c, able, {a}) == PUBLISHER, "and tries no further one"
    assert tree.source_of(d, [b, c, d], ()) == b, "others are not sent to the one that was left"


@given(seed=st.integers(0, 1 << 32), copies=st.integers(1, 3), fan_out=st.integers(1, 3))
def test_no_sequence_of_failures_makes_a_circle(seed: int, copies: int, fan_out: int) -> None:
    rng, tree, followers = random.Random(seed), Tree(copies, fan_out), names(12)
    failed: dict[bytes, set[bytes]] = {follower: set() for follower in followers}
    for _ in range(80):
        follower = rng.choice(followers)
        if rng.random() < 0.1:
            tree.leave(follower)
            continue
        if follower in tree.sources:
            failed[follower].add(tree.sources[follower])
        able = {each for each in followers if rng.random() < 0.8}
        source = tree.source_of(follower, able, failed[follower])
        assert source == PUBLISHER or (source in able and source not in failed[follower] | {follower})
        for each in tree.sources:
            place, seen = each, set()
            while place in tree.sources:
                assert place not in seen
                seen.add(place)
                place = tree.sources[place]


def test_versions_and_time_since_a_newer_one_or_the_loss_of_the_publisher() -> None:
    watch = StalenessWatch()
    assert watch.look(0.0, None, None, connected=True) == Staleness()
    assert watch.look(1.0, 5, 7, connected=True) == Staleness(2, 0.0)
    assert watch.look(2.0, 5, 8, connected=True) == Staleness(3, 1.0)
    assert watch.look(4.0, 9, 9, connected=True) == Staleness()
    assert watch.look(5.0, 9, 9, connected=False) == Staleness()
    assert watch.look(8.0, 9, 10, connected=False) == Staleness(1, 3.0)
    assert watch.look(9.0, 10, 10, connected=True) == Staleness()
    assert watch.look(9.5, None, 0, connected=True).versions == 1
