"""Bounds how many callers are served at once, so that some callers cannot shut out the others. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from averaging.errors import BusyError
from averaging.rpc import RpcCaller

LEAST_RATE = 16 << 10
"""Bytes per second at which a caller must send or read."""


@dataclass(eq=False, slots=True)
class Place:
    """A place that a caller has.

    Attributes:
        caller: Whose place it is.
        amount: What it counts for.
        rank: A caller of a higher rank takes the places of lower ones.
        serial: The order in which callers have come.
        due: When the caller is late, because it sends or reads nothing; infinite while nothing is expected from it.
        lost: Whether another caller has got the place. Its owner then has to end.
        lose: Callback for that moment.
    """

    caller: RpcCaller
    amount: int = 1
    rank: int = 0
    serial: int = 0
    due: float = math.inf
    lost: bool = False
    lose: Callable[[], object] = bool


class SlotTable:
    """The places of one kind.

    A newcomer that finds no place takes one of those who have a lower rank or who are late. Of its own rank it takes
    one of those whose host or connection keeps at least as much as that of the newcomer afterwards, and if it has
    nothing, one of those who came later. So callers that are in time cannot take places from each other in turn.

    Args:
        what: What has the places, for errors.
        in_all: Amount of all places together.
        per_host: Amount of the places of one host.
        per_caller: Amount of the places of one connection.
    """

    def __init__(self, what: str, in_all: int, per_host: int, per_caller: int) -> None:
        self._what = what
        self._in_all, self._per_host, self._per_caller = in_all, per_host, per_caller
        self._places: list[Place] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._places)

    def enter(self, new: Place, now: float) -> None:
        """Takes a place.

        Raises:
            BusyError: There is none.
        """
        gone: list[Place] = []
        while pool := self._too_many_with(new, gone):
            victim = self._weakest(pool, new, now)
            if victim is None:
                raise BusyError(f"there are {len(self._places)} {self._what} here; try again later")
            gone.append(victim)
        for place in gone:
            self._places.remove(place)
            place.lost = True
            place.lose()
        self._places.append(new)

    def leave(self, place: Place) -> None:
        """Returns a place, which may be lost already."""
        if not place.lost:
            self._places.remove(place)

    def _too_many_with(self, new: Place, gone: list[Place]) -> list[Place]:
        """Returns the places that leave no room for a new one, those of the narrowest limit; empty if there is room."""
        kept = [place for place in self._places if place not in gone]
        of_host = [place for place in kept if place.caller.host == new.caller.host]
        own = [place for place in of_host if place.caller == new.caller]
        for pool, most in ((own, self._per_caller), (of_host, self._per_host), (kept, self._in_all)):
            if sum(place.amount for place in pool) + new.amount > most:
                return pool
        return []

    def _weakest(self, pool: list[Place], new: Place, now: float) -> Place | None:
        """Returns the place that gives way to a new one; None if there is none."""
        hosts: Counter[str] = Counter()
        callers: Counter[RpcCaller] = Counter()
        for place in self._places:
            hosts[place.caller.host] += place.amount
            callers[place.caller] += place.amount

        def gives_way(place: Place) -> bool:
            if place.caller.host != new.caller.host:
                fair = hosts[place.caller.host] - place.amount >= hosts[new.caller.host] + new.amount
            else:
                fair = callers[place.caller] - place.amount >= callers[new.caller] + new.amount
            elder = new.serial < place.serial and not callers[new.caller]
            return place.rank < new.rank or now > place.due or (place.rank == new.rank and (fair or elder))

        def weakness(place: Place) -> tuple[int, bool, int, int]:
            return -place.rank, now > place.due, hosts[place.caller.host], callers[place.caller]

        return max(filter(gives_way, reversed(pool)), key=weakness, default=None)  # of equal ones the newest
