"""Finds the member that the others had to wait for in a round. Pure.

The last member to deliver is not necessarily a straggler: the send window makes all members finish at nearly the same
time, even if one of them limits the rate. The measure is how long all others were done or at the end of their window.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from averaging.observe.receipts import Straggler

MIN_LAG_SECONDS = 0.1
"""A member that the others waited for less than this is not a straggler."""

MIN_LAG_FRACTION = 0.25
"""A member that the others waited for a smaller fraction of the round than this is not a straggler."""


class Lag:
    """Measures how long a shard's senders waited for one of them.

    Args:
        senders: their names. Each delivers all parts in order.
        send_limits: how many parts a sender may deliver, by how many the slowest one has delivered, see
            `send_window.send_limits`.

    Attributes:
        seconds: by sender, the time during which all others had finished or had full windows because of it.
    """

    def __init__(self, senders: Iterable[str], send_limits: Sequence[int]) -> None:
        self._next = dict.fromkeys(senders, 0)
        self._send_limits = send_limits
        self._slowest, self._since = "", 0.0
        self.seconds: dict[str, float] = {}

    def ready(self, now: float) -> None:
        """Restarts the measurement when this member can answer; until then the others waited for it."""
        self.seconds.clear()
        self._since = now

    def delivered(self, name: str, now: float) -> None:
        """Records a part of a sender; ignored if the sender was dropped."""
        if name in self._next:
            self._next[name] += 1
            self._update(now)

    def dropped(self, name: str, now: float) -> None:
        """Stops counting a sender."""
        if self._next.pop(name, None) is not None:
            self._update(now)

    def _update(self, now: float) -> None:
        if self._slowest:
            self.seconds[self._slowest] = self.seconds.get(self._slowest, 0.0) + now - self._since
        self._slowest, self._since = self._find(), now

    def _find(self) -> str:
        if len(self._next) < 2:
            return ""
        name = min(self._next, key=lambda name: self._next[name])
        at = self._next[name]
        waits = at < self._send_limits[-1] and all(
            reached >= self._send_limits[at] for other, reached in self._next.items() if other != name
        )
        return name if waits else ""


def find_straggler(
    lag: Mapping[str, float],
    parts_in: Mapping[str, float],
    averages_in: Mapping[str, float],
    seconds: float,
    dropped: Collection[str],
) -> Straggler | None:
    """The straggler of a round as one member observed it; None if there is none.

    Args:
        lag: `Lag.seconds`; empty with fewer than two senders.
        parts_in: when the last part of each sender arrived.
        averages_in: when the last average of each reducer arrived.
        seconds: duration of the round.
        dropped: members that were dropped, which are not named again.
    """
    bound = max(MIN_LAG_SECONDS, MIN_LAG_FRACTION * seconds)
    waited = {name: value for name, value in lag.items() if name not in dropped}
    if not waited and len(parts_in) == 1 and parts_in.keys() == averages_in.keys():
        # Two peers: the other one had returned all averages before its own last part arrived.
        waited = {name: parts_in[name] - averages_in[name] for name in parts_in if name not in dropped}
    slowest = max(waited, key=lambda name: waited[name], default="")
    if slowest and waited[slowest] >= bound:
        return Straggler(slowest, waited[slowest], "parts")
    order = sorted((moment, name) for name, moment in averages_in.items() if name not in dropped)
    if len(order) >= 2:
        (before, _), (last, name) = order[-2:]
        if last - before >= bound:
            return Straggler(name, last - before, "averages")
    return None
