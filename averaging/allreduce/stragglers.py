"""Who held a round back. Pure.

The last one to deliver is not yet a straggler: senders are held back by flow control, so that they arrive nearly
together even if one of them sets the pace for all. What tells is how long everybody else was done or far ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from averaging.observe.receipts import Straggler

STANDS_OUT_SECONDS = 0.1
"""Nobody is named who held the others back for less."""

STANDS_OUT_FRACTION = 0.25
"""Nor anybody who held them back for a smaller fraction of the round."""


class Lag:
    """For how long a shard's senders waited for one of them.

    Args:
        senders: by name.
        reach: how far a sender of the shard may get while another one has delivered so many parts, see `pace.reach`.
            Each delivers all of them in order.

    Attributes:
        seconds: by sender, for so long all others were done or as far ahead of it as they may be.
    """

    def __init__(self, senders: Iterable[str], reach: Sequence[int]) -> None:
        self._next = dict.fromkeys(senders, 0)
        self._reach = reach
        self._slowest, self._since = "", 0.0
        self.seconds: dict[str, float] = {}

    def ready(self, now: float) -> None:
        """This member can answer from now on; before, nobody held the others back but itself."""
        self.seconds.clear()
        self._since = now

    def delivered(self, name: str, now: float) -> None:
        """A part of a sender is in; of one that was dropped it does not count."""
        if name in self._next:
            self._next[name] += 1
            self._turn(now)

    def dropped(self, name: str, now: float) -> None:
        """A sender is waited for no longer."""
        if self._next.pop(name, None) is not None:
            self._turn(now)

    def _turn(self, now: float) -> None:
        if self._slowest:
            self.seconds[self._slowest] = self.seconds.get(self._slowest, 0.0) + now - self._since
        self._slowest, self._since = self._find(), now

    def _find(self) -> str:
        if len(self._next) < 2:
            return ""  # ahead of nobody
        name = min(self._next, key=lambda name: self._next[name])
        at = self._next[name]
        waits = at < self._reach[-1] and all(
            reached >= self._reach[at] for other, reached in self._next.items() if other != name
        )
        return name if waits else ""


def find_straggler(
    lag: Mapping[str, float],
    parts_in: Mapping[str, float],
    averages_in: Mapping[str, float],
    seconds: float,
    dropped: Collection[str],
) -> Straggler | None:
    """The member that stands out, as one member saw the round.

    Args:
        lag: seconds for which each sender held the others back, where there are several.
        parts_in: when the last part of each sender was in.
        averages_in: when the last average of each reducer was in.
        seconds: of the whole round.
        dropped: who is named already.
    """
    bound = max(STANDS_OUT_SECONDS, STANDS_OUT_FRACTION * seconds)
    held = {name: value for name, value in lag.items() if name not in dropped}
    if not held and len(parts_in) == 1 and parts_in.keys() == averages_in.keys():
        # Two peers: the other one had answered all before its own last part came.
        held = {name: parts_in[name] - averages_in[name] for name in parts_in if name not in dropped}
    slowest = max(held, key=lambda name: held[name], default="")
    if slowest and held[slowest] >= bound:
        return Straggler(slowest, held[slowest], "parts")
    order = sorted((moment, name) for name, moment in averages_in.items() if name not in dropped)
    if len(order) >= 2:
        (before, _), (last, name) = order[-2:]
        if last - before >= bound:
            return Straggler(name, last - before, "averages")
    return None
