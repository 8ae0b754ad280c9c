"""What one peer remembers of the conduct of others from search to search. Pure: `now` is passed in.

All times are of a clock that is never set back, such as the event loop's. Peers are known by their endpoints, and
nothing of this is sent to anyone.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum
from typing import TypeVar

from averaging.common import backoff_delay
from averaging.timing import VERDICT_SECONDS, Deadlines

DESERTION_SECONDS = 1800.0
"""Seconds for which a deserter is remembered, unless it leads a group before."""

EXCLUSION_SECONDS, MAX_EXCLUSION_SECONDS = 5.0, 300.0
"""Seconds for which a peer is neither asked nor accepted that was at fault twice in a row, doubled each further time.
It costs the others a round each time that it is tried again. Once may be an accident."""

MAX_REMEMBERED = 1024
"""Peers of each kind that are remembered."""

Value = TypeVar("Value")


class LeaderStanding(IntEnum):
    """Why a peer should rather not be asked to lead. Peers of a lower standing are asked first."""

    GOOD = 0
    """Nothing is known against it."""
    SILENT = 1
    """It did not answer the last request in time."""
    DESERTER = 2
    """It accepted this peer as its follower, and then neither began nor disbanded the group in time."""


class Conduct:
    """What one peer remembers of the others, for all its searches.

    Attributes:
        deadlines: how long they take to answer.
    """

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        self.deadlines = Deadlines(VERDICT_SECONDS, VERDICT_SECONDS) if deadlines is None else deadlines
        # The latest is last.
        self._unanswered: OrderedDict[str, int] = OrderedDict()
        self._deserted: OrderedDict[str, float] = OrderedDict()  # until when that counts
        self._faults: OrderedDict[str, tuple[int, float]] = OrderedDict()  # how often in a row, and excluded until when
        self._logged: OrderedDict[str, None] = OrderedDict()

    def note_answer(self, endpoint: str) -> None:
        """It answered a request, early or late."""
        self._unanswered.pop(endpoint, None)

    def note_silence(self, endpoint: str) -> None:
        """It did not answer within its head start."""
        _remember(self._unanswered, endpoint, self.unanswered(endpoint) + 1)

    def note_desertion(self, endpoint: str, now: float) -> None:
        """It accepted this peer, and its declared time passed without a decision."""
        _remember(self._deserted, endpoint, now + DESERTION_SECONDS)

    def note_group(self, endpoint: str) -> None:
        """It began a group with this peer."""
        self._deserted.pop(endpoint, None)

    def unanswered(self, endpoint: str) -> int:
        return self._unanswered.get(endpoint, 0)

    def standing(self, endpoint: str, now: float) -> LeaderStanding:
        if now < self._deserted.get(endpoint, now):
            return LeaderStanding.DESERTER
        return LeaderStanding.SILENT if endpoint in self._unanswered else LeaderStanding.GOOD

    def note_fault(self, endpoint: str, now: float) -> None:
        """It broke the protocol, or its parts came although it cannot be called."""
        times, _ = self._faults.get(endpoint, (0, 0.0))
        seconds = backoff_delay(EXCLUSION_SECONDS, MAX_EXCLUSION_SECONDS, times - 1) if times else 0.0
        _remember(self._faults, endpoint, (times + 1, now + seconds))

    def note_well(self, endpoint: str) -> None:
        """It was not at fault in a round."""
        self._faults.pop(endpoint, None)

    def excluded(self, now: float) -> dict[str, float]:
        """The peers that are excluded at present, and until when."""
        return {name: until for name, (_, until) in self._faults.items() if now < until}

    def is_new(self, difference: str) -> bool:
        """Whether a schema difference was not found before, in any topic: every search may find the same one again."""
        new = difference not in self._logged
        _remember(self._logged, difference, None)
        return new


def _remember(kept: OrderedDict[str, Value], endpoint: str, value: Value) -> None:
    kept[endpoint] = value
    kept.move_to_end(endpoint)
    if len(kept) > MAX_REMEMBERED:
        kept.popitem(last=False)
