"""Who is there, who is suspected, who is looked for."""

from __future__ import annotations

import random
from collections import Counter

from averaging.discovery.gossip.broadcast_tree import RING, all_others
from averaging.discovery.gossip.membership import Membership

OWN = "own:1"


def members(*seeds: str, endpoint: str = OWN, most_lost: int = 256) -> Membership:
    return Membership(endpoint, seeds, random.Random(0), retry_lost=600.0, most_lost=most_lost)


def test_only_endpoints_of_others_are_members() -> None:
    several = members()
    for name in ("a:1", "b:1", OWN, "client::x", "no endpoint", "a:1", "c:0"):
        several.heard_of(name)
    assert len(several) == 2
    assert {several.pick() for _ in range(50)} == {"a:1", "b:1"}
    assert members().pick() is None


def test_suspects_are_picked_only_if_there_is_nobody_else() -> None:
    several = members()
    for name in ("a:1", "b:1", "c:1"):
        several.heard_of(name)
    several.suspect("a:1", 0.0, "no answer")
    several.suspect("b:1", 0.0, "no answer")
    several.suspect("stranger:1", 0.0, "no answer")
    assert {several.pick() for _ in range(50)} == {"c:1"}
    several.suspect("c:1", 0.0, "no answer")
    assert Counter(several.pick() for _ in range(300)).keys() == {"a:1", "b:1", "c:1"}
    several.heard_of("a:1")
    several.trust("b:1")
    assert {several.pick() for _ in range(50)} == {"a:1", "b:1"}


def test_who_did_not_answer_is_told_with_the_reason_for_a_minute() -> None:
    several = members("seed:1")
    for name in ("a:1", "b:1", "c:1", "d:1"):
        several.heard_of(name)
    for name in ("a:1", "b:1", "c:1", "d:1", "seed:1", "stranger:1"):
        several.suspect(name, 100.0, f"why {name}")
    several.answered("a:1")
    several.trust("b:1")  # it calls, which does not mean that it can be called
    several.gone("c:1", 110.0, vanished=False)
    several.gone("d:1", 110.0, vanished=True)
    assert several.silent(120.0) == {name: f"why {name}" for name in ("b:1", "d:1", "seed:1")}
    several.heard_of("d:1")
    several.suspect("b:1", 130.0, "why again")
    assert several.silent(165.0) == {"b:1": "why again"}


def test_suspects_are_told_last() -> None:
    several = members()
    names = [f"peer-{number}:1" for number in range(20)]
    for name in names:
        several.heard_of(name)
    for name in names[:10]:
        several.suspect(name, 0.0, "no answer")
    for branch in several.branches(*all_others(OWN), 2):
        trusted = [name in names[10:] for name in branch.candidates]
        assert trusted == sorted(trusted, reverse=True)


def test_seeds_are_looked_for_until_they_are_members() -> None:
    several = members("a:1", "b:1", "a:1", OWN)
    assert several.seeds == ("a:1", "b:1")
    several.heard_of("a:1")
    assert several.pick_missing(0.0) == ["b:1"]
    several.gone("a:1", 0.0, vanished=False)
    assert several.pick_missing(0.0) == ["a:1", "b:1"]


def test_who_vanished_is_looked_for_for_a_while_and_who_left_is_not() -> None:
    several = members()
    for name in ("vanished:1", "left:1", "back:1"):
        several.heard_of(name)
    several.gone("vanished:1", 100.0, vanished=True)
    several.gone("left:1", 100.0, vanished=False)
    several.gone("back:1", 100.0, vanished=True)
    several.gone("stranger:1", 100.0, vanished=True)
    several.heard_of("back:1")
    assert several.pick_missing(600.0) == ["vanished:1"]
    assert several.pick_missing(700.0) == []


def test_of_many_that_vanished_a_few_are_tried_and_the_last_are_remembered() -> None:
    several = members(most_lost=20)
    for number in range(100):
        several.heard_of(f"peer-{number}:1")
        several.gone(f"peer-{number}:1", 0.0, vanished=True)
    tried = several.pick_missing(1.0)
    assert len(tried) == 8
    assert {int(name[5:-2]) for _ in range(50) for name in several.pick_missing(1.0)} == set(range(80, 100))


def test_a_client_has_everything_told_by_the_member_it_follows() -> None:
    client = members("seed:1", endpoint="client::x")
    (branch,) = client.branches(1, RING - 1, 4)
    assert branch.candidates == ("seed:1",)
    for name in ("a:1", "b:1", "c:1"):
        client.heard_of(name)
    client.followed = "b:1"
    client.suspect("a:1", 0.0, "no answer")
    (branch,) = client.branches(1, RING - 1, 4)
    assert (branch.start, branch.end) == (1, RING - 1)
    assert branch.candidates == ("b:1", "c:1", "a:1", "seed:1")


def test_a_client_turns_to_a_member_else_to_anyone() -> None:
    client = members("seed:1", endpoint="client::x")
    assert client.pick_to_follow(0.0) == "seed:1"
    client.heard_of("a:1")
    assert {client.pick_to_follow(0.0) for _ in range(20)} == {"a:1"}
    client.suspect("a:1", 0.0, "no answer")
    assert {client.pick_to_follow(0.0) for _ in range(50)} == {"a:1", "seed:1"}
    assert members(endpoint="client::x").pick_to_follow(0.0) is None
