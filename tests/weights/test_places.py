"""Places of callers: the limits hold, and no caller can shut out another one."""

from __future__ import annotations

import math
import random

import pytest

from averaging.errors import BusyError
from averaging.rpc import RpcCaller
from averaging.weights.places import Place, SlotTable

IN_ALL, PER_HOST, PER_CALLER = 8, 6, 4


def places() -> SlotTable:
    return SlotTable("calls", IN_ALL, PER_HOST, PER_CALLER)


def of(host: str, connection: int = 0, **given: float) -> Place:
    return Place(RpcCaller(host, f"{host}:{connection}"), **given)  # type: ignore[arg-type]


def enter(there: SlotTable, *new: Place, now: float = 0.0) -> None:
    for place in new:
        there.enter(place, now)


def test_a_caller_a_host_and_all_have_limits() -> None:
    for full, held in (
        (PER_CALLER, [of("a") for _ in range(PER_CALLER)]),
        (PER_HOST, [of("a", number) for number in (0, 0, 1, 1, 2, 2)]),
        (IN_ALL, [of(host, number) for host in "ab" for number in (0, 0, 1, 1)]),
    ):
        there = places()
        enter(there, *held)
        with pytest.raises(BusyError, match=f"there are {full} calls here; try again later"):
            there.enter(of("a"), 0.0)
        assert len(there) == full
        there.leave(held[0])
        there.enter(of("a"), 0.0)


def test_a_host_that_has_most_gives_way_to_another_one() -> None:
    there = places()
    many = [of("a", number) for number in range(PER_HOST)]
    enter(there, *many, of("b"), of("b", 1), of("c"))
    assert [place.lost for place in many] == [False] * 5 + [True], "the newest"
    with pytest.raises(BusyError):
        there.enter(of("a", 9), 0.0)


def test_a_connection_that_has_most_gives_way_to_another_one_of_its_host() -> None:
    there = places()
    flood = [of("a", number) for number in (0, 0, 0, 0, 1, 1)]
    enter(there, *flood)
    honest = of("a", 2)
    lost: list[str] = []
    flood[3].lose = lambda: lost.append("the newest of the largest")
    there.enter(honest, 0.0)
    assert lost == ["the newest of the largest"]
    assert not honest.lost
    there.leave(flood[3])
    there.leave(honest)
    assert len(there) == PER_HOST - 1


def test_a_caller_that_is_late_gives_way() -> None:
    there = places()
    slow = [of("a", number, due=5.0) for number in range(PER_HOST)]
    enter(there, *slow)
    with pytest.raises(BusyError):
        there.enter(of("a", 9), 5.0)
    there.enter(of("a", 9), 5.1)
    assert sum(place.lost for place in slow) == 1


def test_a_higher_rank_takes_the_places_of_lower_ones_and_never_the_reverse() -> None:
    there = SlotTable("states", 100, 100, 100)
    strangers = [of(f"stranger {number}", amount=25) for number in range(4)]
    trainer = of("a", amount=50, rank=1)
    enter(there, *strangers, trainer)
    assert sum(place.lost for place in strangers) == 2
    trainer.due = 0.0
    there.enter(of("b", amount=50, rank=1), 1.0)  # lower ranks go first, even if a higher one is late
    assert all(place.lost for place in strangers)
    assert not trainer.lost
    trainer.due = math.inf
    with pytest.raises(BusyError):
        there.enter(of("c", amount=25), 1.0)
    trainer.due = 0.0
    there.enter(of("c", amount=25), 1.0)
    assert trainer.lost, "a place that nobody uses is of no rank"


def test_an_earlier_caller_with_nothing_takes_the_place_of_a_later_one_and_not_the_reverse() -> None:
    there = SlotTable("states", 100, 100, 100)
    later = [of("a", number, amount=25, rank=1, serial=number) for number in range(2, 6)]
    enter(there, *later)
    trainer = of("a", 1, amount=25, rank=1, serial=1)
    there.enter(trainer, 0.0)
    assert [place.lost for place in later] == [False, False, False, True]
    for refused in (later[3], of("a", 0, amount=25, serial=0)):  # the second is of a lower rank
        refused.lost = False
        with pytest.raises(BusyError):
            there.enter(refused, 0.0)
    assert not trainer.lost


def test_nobody_is_displaced_for_a_caller_that_gets_no_place() -> None:
    there = SlotTable("states", 100, 100, 100)
    stranger, trainer = of("a", amount=50), of("b", amount=50, rank=1)
    enter(there, stranger, trainer)
    with pytest.raises(BusyError):
        there.enter(of("c", amount=100, rank=1), 0.0)
    assert not stranger.lost


@pytest.mark.parametrize("seed", range(200))
def test_what_holds_after_any_sequence(seed: int) -> None:
    rng = random.Random(seed)
    there = places()
    held: list[Place] = []
    for now in range(60):
        if held and rng.random() < 0.3:
            there.leave(held.pop(rng.randrange(len(held))))
            continue
        new = of(rng.choice("abcd"), rng.randrange(4), rank=rng.choice([0, 0, 1]))
        new.due = rng.choice([math.inf, now + 3.0])
        before = list(held)
        try:
            there.enter(new, now)
        except BusyError:
            assert not any(place.lost for place in before)
            assert all(place.rank >= new.rank for place in before if _in_the_way(before, place, new))
            continue
        gone = [place for place in before if place.lost]
        assert all(place.rank < new.rank or now > place.due or _has_as_much(before, place, new) for place in gone)
        held = [place for place in (*held, new) if not place.lost]
        assert len(held) == len(there) <= IN_ALL
        for place in held:
            assert sum(other.caller.host == place.caller.host for other in held) <= PER_HOST
            assert sum(other.caller == place.caller for other in held) <= PER_CALLER
        for place in gone:  # it cannot take its place back, so that the two do not go on for ever
            if now <= place.due and place.rank <= new.rank and len(gone) == 1:
                again = Place(place.caller, rank=place.rank)
                try:
                    there.enter(again, now)
                except BusyError:
                    continue
                assert not new.lost
                held = [*(place for place in held if not place.lost), again]


def _in_the_way(held: list[Place], place: Place, new: Place) -> bool:
    """Whether a place counts in the limit that leaves no room for a new one."""
    if sum(other.caller == new.caller for other in held) >= PER_CALLER:
        return place.caller == new.caller
    if sum(other.caller.host == new.caller.host for other in held) >= PER_HOST:
        return place.caller.host == new.caller.host
    return True


def _has_as_much(held: list[Place], place: Place, new: Place) -> bool:
    """Whether its host, or its connection if they share the host, has at least as much afterwards."""
    if place.caller.host != new.caller.host:
        hosts = [other.caller.host for other in held]
        return hosts.count(place.caller.host) - 1 >= hosts.count(new.caller.host) + 1
    callers = [other.caller for other in held]
    return callers.count(place.caller) - 1 >= callers.count(new.caller) + 1
