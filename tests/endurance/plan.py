"""Which fault comes when, drawn by a seed. Pure."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

REST_SECONDS = 12.0
"""Seconds after the end of a fault in which its victim gets no other one, so that it can start and take part again."""


class FaultKind(StrEnum):
    """What can happen to a process or a link."""

    KILL = "sigkill"
    STOP = "sigstop"
    TERM = "sigterm"
    CUT = "cut"  # What is sent is lost silently, in both directions, as with a cable that was pulled out.
    STALL = "stall"  # Nothing is read any more, so that flow control stops the senders.
    RESET = "reset"
    CORRUPT = "corrupt-byte"
    CLOCK = "clock-step"
    LOOP = "event-loop-blocked"
    GIL = "gil-held"


LASTS: Mapping[FaultKind, tuple[float, float]] = {
    FaultKind.STOP: (3.0, 60.0),
    FaultKind.CUT: (3.0, 20.0),
    FaultKind.STALL: (3.0, 20.0),
    FaultKind.CLOCK: (20.0, 60.0),
    FaultKind.LOOP: (20.0, 20.0),
    FaultKind.GIL: (20.0, 20.0),
}
"""Bounds of the seconds that a fault lasts; 0 for others."""

SILENT = frozenset({FaultKind.STOP, FaultKind.CUT, FaultKind.STALL, FaultKind.LOOP, FaultKind.GIL})
"""Faults that others notice by a deadline only, since no connection is closed."""

LINK_KINDS = frozenset({FaultKind.CUT, FaultKind.STALL, FaultKind.RESET, FaultKind.CORRUPT})

CLOCK_STEP = 20.0

GROUP_WAIT, STALL_TIMEOUT = 2.0, 5.0
"""Options of all peers, in seconds: the longest waits for a group, and for a silent member."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a fault can hit. At most a third of a plane, such as a run, has faults at once, or one target."""

    name: str
    plane: str
    kinds: frozenset[FaultKind]


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault."""

    number: int  # from 1
    at: float  # seconds since the start
    kind: FaultKind
    victim: str
    seconds: float = 0.0  # how long it lasts
    detail: float = 0.0  # seconds of a clock step, and bytes after which a fault of a link begins; else 0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.0f} s" if self.seconds else ""
        return f"{self.at:7.1f} s  {self.kind.value} of {self.victim}{lasting}"


def draw(seed: int, seconds: float, targets: Sequence[Target], every: float) -> list[Strike]:
    """Draws the faults of a run; the same for the same arguments.

    Args:
        seed: source of everything random.
        seconds: how long faults come.
        targets: what can be hit.
        every: mean seconds between two faults.
    """
    rng = random.Random(seed)
    kinds = [kind for kind in FaultKind if any(kind in target.kinds for target in targets)]
    size = {plane: sum(target.plane == plane for target in targets) for plane in {target.plane for target in targets}}
    free: dict[str, float] = {}
    strikes: list[Strike] = []
    now = 0.0
    while kinds and (now := now + rng.uniform(0.5, 1.5) * every) < seconds:
        kind = rng.choice(kinds)
        hit = [target.plane for target in targets if free.get(target.name, 0.0) > now]
        possible = [
            target
            for target in targets
            if kind in target.kinds
            and free.get(target.name, 0.0) <= now
            and hit.count(target.plane) < max(1, size[target.plane] // 3)
        ]
        if not possible:
            continue
        victim = rng.choice(possible)
        lasts = round(rng.uniform(*LASTS.get(kind, (0.0, 0.0))), 1)
        detail = 0.0
        if kind is FaultKind.CLOCK:
            detail = rng.choice((-CLOCK_STEP, CLOCK_STEP))
        elif kind in LINK_KINDS:
            detail = float(rng.randrange(200_000))
        free[victim.name] = now + lasts + REST_SECONDS
        strikes.append(Strike(len(strikes) + 1, round(now, 2), kind, victim.name, lasts, detail))
    return strikes
