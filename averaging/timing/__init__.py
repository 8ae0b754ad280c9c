"""How long to wait for other peers."""

from averaging.timing.deadlines import (
    SLOW_LINK,
    TICKS,
    VERDICT_SECONDS,
    Deadline,
    Deadlines,
    FairClock,
    FairTimeout,
    Learned,
    Phase,
    expire,
    interval_of,
    is_set_within,
    learned_timeout,
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
    "is_set_within",
    "learned_timeout",
    "size_class",
]
