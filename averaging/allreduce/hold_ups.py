"""Which members hold a round up by progress that is just fast enough for their own deadlines, and for how long. Pure.

Each part and each reply has a deadline, and a member that always stays just below it takes the whole time of the round.
At the round's deadline it would be too late to go on without it: everybody else gives up at the same moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence


def blocking(delivered: Mapping[str, int], reach: Sequence[int]) -> set[str]:
    """The senders of a shard for which another sender has to wait.

    Args:
        delivered: how many parts each sender has delivered, of those that are not lost.
        reach: how many parts a sender may send while another sender has delivered so many, see
            `send_window.reach`; the last is the number of parts.
    """
    front = max(delivered.values(), default=0)
    return {name for name, count in delivered.items() if count < reach[-1] and front >= reach[count]}


class HoldUps:
    """Adds up for how long each member holds a round up, and tells who has done so for too long.

    Args:
        patience: seconds from the beginning of the round in which nothing counts.
        allowed: seconds that each member may take from then on.
        on_probation: whether the patience is not for a member, since it has let it pass in an earlier round.
    """

    def __init__(self, patience: float, allowed: float, on_probation: Callable[[str], bool]) -> None:
        self._patience, self.allowed, self._on_probation = patience, allowed, on_probation
        self._held: Counter[str] = Counter()  # in seconds
        self._looked = 0.0

    def look(self, blocking: Collection[str], now: float) -> dict[str, str]:
        """Notes who holds the round up now.

        Args:
            blocking: these members.
            now: in seconds since the round began.

        Returns:
            Who has done so for too long, and how long that is, in words.
        """
        passed, self._looked = now - self._looked, now
        late: dict[str, str] = {}
        for name in blocking:
            if now < self._patience and not self._on_probation(name):
                continue
            self._held[name] += passed  # type: ignore[assignment]
            if self._held[name] >= self.allowed:
                when = "of this round" if now < self._patience else f"since {self._patience:.1f} s of the round passed"
                late[name] = f"held the others up for {self._held[name]:.1f} s {when}"
        return late
