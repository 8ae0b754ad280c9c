"""Which members hold a round up with progress just fast enough for their own deadlines, and for how long. Pure.

Each part and each reply has a deadline. A member that always stays just below it could use up the whole time of the
round, and at the round's deadline it would be too late to finish without it, because all members give up then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence


def blocking(delivered: Mapping[str, int], send_limits: Sequence[int]) -> set[str]:
    """The senders of a shard for which another sender has to wait.

    Args:
        delivered: number of parts that each sender has delivered, without dropped senders.
        send_limits: how many parts a sender may send, by the number that another sender has delivered, see
            `send_window.send_limits`. The last one is the number of parts.
    """
    front = max(delivered.values(), default=0)
    return {name for name, count in delivered.items() if count < send_limits[-1] and front >= send_limits[count]}


class HoldUps:
    """Adds up for how long each member holds a round up.

    Args:
        grace: seconds from the start of the round that do not count.
        allowed: seconds that each member may take after that.
        on_probation: whether a member gets no grace, because it has used it up in an earlier round.
    """

    def __init__(self, grace: float, allowed: float, on_probation: Callable[[str], bool]) -> None:
        self._grace, self.allowed, self._on_probation = grace, allowed, on_probation
        self._held: defaultdict[str, float] = defaultdict(float)  # seconds
        self._last_update = 0.0

    def update(self, holding: Collection[str], now: float) -> dict[str, str]:
        """Adds the time since the last update for the members that hold the round up now.

        Args:
            holding: these members.
            now: seconds since the start of the round.

        Returns:
            The members that have done so for too long, with the reason for the receipt.
        """
        passed, self._last_update = now - self._last_update, now
        late: dict[str, str] = {}
        for name in holding:
            if now < self._grace and not self._on_probation(name):
                continue
            self._held[name] += passed
            if self._held[name] >= self.allowed:
                when = "of this round" if now < self._grace else f"after {self._grace:.1f} s of the round"
                late[name] = f"held the others up for {self._held[name]:.1f} s {when}"
        return late
