"""From whom followers get a version: few copies from the publisher, short ways, and never a circle."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.weights.tree import PUBLISHER, Tree, best_fan_out, depth_of, in_order


def names(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def depth(tree: Tree, follower: bytes) -> int:
    steps = 0
    while follower != PUBLISHER:
        follower = tree.sources[follower]
        steps += 1
        assert steps <= len(tree.sources), "a circle"
    return steps


@pytest.mark.parametrize(("fan_out", "hops"), [(1, 16), (2, 5), (4, 3)])
def test_32_followers_cost_two_copies(fan_out: int, hops: int) -> None:
    tree, followers = Tree(copies=2), names(32)
    for follower in followers:
        tree.source_of(follower, followers, (), fan_out)
    children = Counter(tree.sources.values())
    assert children.pop(PUBLISHER) == 2
    assert max(children.values()) == fan_out
    assert max(depth(tree, follower) for follower in followers) == hops


def test_followers_that_do_not_hand_on_get_it_from_those_that_do() -> None:
    tree, followers = Tree(copies=1), names(8)
    for follower in followers:
        tree.source_of(follower, followers[:1], (), 8)
    assert Counter(tree.sources.values()) == {PUBLISHER: 1, followers[0]: 7}


def test_a_follower_whose_source_failed_gets_the_version_from_the_publisher() -> None:
    tree, (a, b, c, d) = Tree(copies=2), names(4)
    able = [a, b, c, d]
    assert [tree.source_of(each, able, (), 2) for each in (a, b, c)] == [PUBLISHER, PUBLISHER, a]
    assert tree.source_of(c, able, {a}, 2) == PUBLISHER, "and tries no further one"
    assert tree.source_of(d, [b, c, d], (), 2) == b, "others are not sent to the one that was left"


def test_without_another_source_the_publisher_sends_a_further_copy() -> None:
    tree, (a, b, c) = Tree(copies=1), names(3)
    assert tree.source_of(a, [a, b, c], (), 2) == PUBLISHER
    assert tree.source_of(b, [a, b, c], (), 2) == a
    assert tree.source_of(b, [a, b, c], {a}, 2) == PUBLISHER
    tree.leave(a)
    assert tree.source_of(c, [b, c], (), 2) == b


@given(seed=st.integers(0, 1 << 32), copies=st.integers(1, 3), fan_out=st.integers(1, 3))
def test_no_sequence_of_failures_makes_a_circle(seed: int, copies: int, fan_out: int) -> None:
    rng, tree, followers = random.Random(seed), Tree(copies), names(12)
    failed: dict[bytes, set[bytes]] = {follower: set() for follower in followers}
    for _ in range(80):
        follower = rng.choice(followers)
        if rng.random() < 0.1:
            tree.leave(follower)
            continue
        if follower in tree.sources:
            failed[follower].add(tree.sources[follower])
        able = {each for each in followers if rng.random() < 0.8}
        source = tree.source_of(follower, able, failed[follower], fan_out)
        assert source == PUBLISHER or (source in able and source not in failed[follower] | {follower})
        for each in tree.sources:
            place, seen = each, set()
            while place in tree.sources:
                assert place not in seen
                seen.add(place)
                place = tree.sources[place]


@pytest.mark.parametrize(("followers", "fan_out", "hops"), [(8, 1, 8), (1, 2, 1), (6, 2, 2), (7, 2, 3), (20, 4, 2)])
def test_the_depth_of_a_tree_is_that_of_a_planned_one(followers: int, fan_out: int, hops: int) -> None:
    tree = Tree(copies=fan_out)
    tree.plan(names(followers), names(followers), fan_out)
    assert depth_of(followers, fan_out) == max(depth(tree, each) for each in names(followers)) == hops


@given(count=st.integers(1, 40), copies=st.integers(1, 3), fan_out=st.integers(1, 4), able=st.sets(st.integers(0, 39)))
def test_a_plan_is_what_followers_get_that_ask_in_its_order(
    count: int, copies: int, fan_out: int, able: set[int]
) -> None:
    followers = names(count)
    hand_on = {follower for number, follower in enumerate(followers) if number in able}
    followers.sort(key=lambda each: each not in hand_on)
    planned, asked = Tree(copies), Tree(copies)
    planned.plan(followers, hand_on, fan_out)
    for follower in followers:
        asked.source_of(follower, hand_on, (), fan_out)
    assert [depth(planned, each) for each in followers] == [depth(asked, each) for each in followers]
    assert planned.source_of(followers[-1], hand_on, (), fan_out) == planned.sources[followers[-1]]


def test_the_number_of_copies_follows_the_rate_and_the_length() -> None:
    fast, slow = 12e6, 2e6
    assert best_fan_out(8, 64 << 20, fast) == 1, "a copy takes longer than the way through all of them"
    assert best_fan_out(32, 64 << 20, fast) == 1, "as was measured"
    assert best_fan_out(32, 12 << 20, fast) == 2
    assert best_fan_out(32, 1 << 20, fast) == 4, "a copy is sent at once"
    assert best_fan_out(8, 2 << 20, slow) == 1
    assert best_fan_out(8, 1 << 20, slow) == 2
    assert best_fan_out(1, 64 << 20, fast) == 1


def test_slow_followers_come_after_fast_ones_and_equal_ones_keep_their_places() -> None:
    a, b, c, d, e = followers = names(5)
    assert in_order(followers, {}) == followers
    assert in_order(followers, {a: 2e6, b: 120e6, c: 100e6, d: 130e6}) == [b, c, d, e, a]
    assert in_order(followers, dict.fromkeys(followers, 0.0)) == followers
