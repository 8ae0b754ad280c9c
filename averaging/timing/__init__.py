"""How long to wait for other peers."""

from averaging.timing.deadlines import (
    SLOW_LINK as SLOW_LINK,
    TICKS as TICKS,
    VERDICT_SECONDS as VERDICT_SECONDS,
    Deadline as Deadline,
    Deadlines as Deadlines,
    FairClock as FairClock,
    FairTimeout as FairTimeout,
    Learned as Learned,
    Phase as Phase,
    expire as expire,
    interval_of as interval_of,
    is_set_within as is_set_within,
    learned_timeout as learned_timeout,
    size_class as size_class,
)
