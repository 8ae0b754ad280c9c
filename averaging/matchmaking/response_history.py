"""Which peers answer when they are asked to lead, remembered from search to search. Pure.

All times are seconds of one clock that never steps back, such as the event loop's.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum
from typing import TypeVar

FIRST_SECONDS, LAST_SECONDS = 1800.0, 6 * 3600.0
"""Seconds for which a deserter is remembered, doubled each further time; and the most."""

VAIN_LEAST = 0.25
"""Seconds. A request that led to no group counts as one in vain if it took longer: others refuse at once."""

DISBANDED_SECONDS = 1.0
"""A group that is disbanded counts as if it had taken as long: this peer has sent its own followers away for it."""

VAIN_TIMES, VAIN_SECONDS = 3, 3.0
"""Who was asked in vain so many times in a row, and has cost so many seconds by that, is taken for a deserter."""

MAX_REMEMBERED = 1024
"""Peers that are remembered of each kind."""

Value = TypeVar("Value")


class Standing(IntEnum):
    """What speaks against asking a peer to lead. Peers of a lower standing are asked first."""

    SOUND = 0
    """Nothing."""
    DOUBTFUL = 1
    """It never answered this peer, and peers that were asked for the first time lately did not answer."""
    SILENT = 2
    """It did not answer the last request in time."""
    DESERTER = 3
    """It accepted this peer as its follower, and then neither began nor disbanded the group in time, or it has refused
    this peer, or disbanded its group, again and again after a long time."""
    NOTORIOUS = 4
    """It did so several times in a row."""


class ResponseHistory:
    """Remembers for each peer how it answered the last requests of this peer.

    Attributes:
        strangers: how many peers in a row, each asked for the first time, did not answer.
    """

    def __init__(self) -> None:
        self.strangers = 0
        # Peers that answer have a place of their own, so that many new names do not take it. The latest is the last.
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._unanswered: OrderedDict[str, int] = OrderedDict()
        self._vain: OrderedDict[str, tuple[int, float]] = OrderedDict()  # requests in a row, and the seconds lost
        self._deserted: OrderedDict[str, tuple[int, float]] = OrderedDict()  # how often, and until when that counts

    def answered(self, endpoint: str) -> None:
        """It answered a request, early or late."""
        if endpoint not in self._answered:
            self.strangers = 0
        self._unanswered.pop(endpoint, None)
        _remember(self._answered, endpoint, None)

    def unanswered_by(self, endpoint: str) -> None:
        """It let its head start pass."""
        if endpoint not in self._answered and endpoint not in self._unanswered:
            self.strangers += 1
        _remember(self._unanswered, endpoint, self.unanswered(endpoint) + 1)

    def deserted_by(self, endpoint: str, now: float) -> None:
        """It accepted this peer, and its declared time passed without a decision."""
        times, _ = self._deserted.get(endpoint, (0, 0.0))
        seconds = min(FIRST_SECONDS * 2 ** min(times, 10), LAST_SECONDS)
        _remember(self._deserted, endpoint, (times + 1, now + seconds))

    def in_vain(self, endpoint: str, seconds: float, now: float, *, disbanded: bool) -> None:
        """A request to it took so long and led to no group: it refused, or accepted this peer and `disbanded` then."""
        if disbanded:
            seconds = max(seconds, DISBANDED_SECONDS)
        if seconds < VAIN_LEAST:
            return
        times, lost = self._vain.get(endpoint, (0, 0.0))
        times, lost = times + 1, lost + seconds
        if times >= VAIN_TIMES and lost >= VAIN_SECONDS:
            self.deserted_by(endpoint, now)
            lost = 0.0
        _remember(self._vain, endpoint, (times, lost))

    def led(self, endpoint: str) -> None:
        """It began a group with this peer."""
        self._deserted.pop(endpoint, None)
        self._vain.pop(endpoint, None)

    def vain(self, endpoint: str) -> int:
        """How many requests in a row were in vain."""
        return self._vain.get(endpoint, (0, 0.0))[0]

    def doubts(self, endpoint: str) -> int:
        """How many requests speak against it: its own, and if it never answered those of the peers that are like it."""
        if endpoint in self._answered:
            return self.unanswered(endpoint)
        return len(self._unanswered) if endpoint in self._unanswered else self.strangers

    def unanswered(self, endpoint: str) -> int:
        """How many requests in a row it did not answer in time."""
        return self._unanswered.get(endpoint, 0)

    def standing(self, endpoint: str, now: float) -> Standing:
        """What speaks against asking it now."""
        times, until = self._deserted.get(endpoint, (0, now))
        if now < until:
            return Standing.DESERTER if times == 1 else Standing.NOTORIOUS
        if endpoint in self._unanswered:
            return Standing.SILENT
        return Standing.DOUBTFUL if self.doubts(endpoint) else Standing.SOUND


def _remember(kept: OrderedDict[str, Value], endpoint: str, value: Value) -> None:
    kept[endpoint] = value
    kept.move_to_end(endpoint)
    if len(kept) > MAX_REMEMBERED:
        kept.popitem(last=False)
