"""How long to wait for other peers.

Read in this order: `fair_timeout` (seconds that do not count this peer's own pauses), `learned_deadlines` (deadlines
from the earlier behaviour of each peer).
"""

from averaging.timing.fair_timeout import TICKS, FairClock, FairTimeout, expire, interval_of, learned_timeout
from averaging.timing.learned_deadlines import (
    SLOW_LINK,
    VERDICT_SECONDS,
    Deadline,
    Deadlines,
    Learned,
    Phase,
    size_class,
)

__all__ = [
    "SLOW_LINK",
    "TICKS",
    "VERDICT_SECONDS",
    "Deadline",
    "Deadlines",
    "FairClock",
    "FairTimeout",
    "Learned",
    "Phase",
    "expire",
    "interval_of",
    "learned_timeout",
    "size_class",
]
