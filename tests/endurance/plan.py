"""Which fault comes when: drawn by a seed, written to a log, and read back from it. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

VERSION = 1

REST_SECONDS = 12.0
"""Seconds after the end of a fault in which its victim gets no other one, so that it can start and take part again."""


class FaultKind(StrEnum):
    """What can happen to a process, a link, a host, a disk or a cluster."""

    KILL = "sigkill"
    STOP = "sigstop"
    TERM = "sigterm"
    CUT = "cut"
    """What is sent is lost silently, in both directions, as with a cable that was pulled out."""
    STALL = "stall"
    """Nothing is read any more, so that flow control stops the senders."""
    RESET = "reset"
    CORRUPT = "corrupt-byte"
    MTU = "mtu-hole"
    """Long packets are lost, and nobody says so."""
    ADDRESS = "address-change"
    CLOCK = "clock-step"
    DISK = "disk-full"
    LOOP = "event-loop-blocked"
    GIL = "gil-held"
    ETCD = "etcd-leader-killed"


LASTS: Mapping[FaultKind, tuple[float, float]] = {
    FaultKind.STOP: (3.0, 60.0),
    FaultKind.CUT: (3.0, 20.0),
    FaultKind.STALL: (3.0, 20.0),
    FaultKind.MTU: (5.0, 20.0),
    FaultKind.ADDRESS: (5.0, 20.0),
    FaultKind.CLOCK: (20.0, 60.0),
    FaultKind.DISK: (5.0, 30.0),
    FaultKind.LOOP: (20.0, 20.0),
    FaultKind.GIL: (20.0, 20.0),
    FaultKind.ETCD: (3.0, 15.0),
}
"""Bounds of the seconds that a fault lasts; 0 for others."""

SILENT = frozenset(
    {
        FaultKind.STOP,
        FaultKind.CUT,
        FaultKind.STALL,
        FaultKind.MTU,
        FaultKind.ADDRESS,
        FaultKind.LOOP,
        FaultKind.GIL,
        FaultKind.ETCD,
    }
)
"""Faults that others notice by a deadline only: no connection is closed, or nobody answers until there is a leader."""

CLOCK_STEP = 20.0


@dataclass(frozen=True, slots=True)
class Target:
    """What a fault can hit.

    Attributes:
        plane: the part of the system to which it belongs, such as a run. At most a third of a plane has faults at once,
            and at least one target can have one.
        kinds: the faults that it can have.
    """

    name: str
    plane: str
    kinds: frozenset[FaultKind]


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault.

    Attributes:
        number: from 1.
        at: seconds since the start.
        seconds: how long it lasts.
        detail: seconds of a clock step, and bytes after which a fault of a link begins; else 0.
    """

    number: int
    at: float
    kind: FaultKind
    victim: str
    seconds: float = 0.0
    detail: float = 0.0

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
    while kinds:
        now += rng.uniform(0.5, 1.5) * every
        if now >= seconds:
            break
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
        elif kind in (FaultKind.CUT, FaultKind.STALL, FaultKind.RESET, FaultKind.CORRUPT):
            detail = float(rng.randrange(200_000))
        free[victim.name] = now + lasts + REST_SECONDS
        strikes.append(Strike(len(strikes) + 1, round(now, 2), kind, victim.name, lasts, detail))
    return strikes


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a log.

    Attributes:
        seconds: how long faults come.
        every: mean seconds between two of them.
        only: the parts of the system that run.
        omitted: kinds of faults that this machine or user cannot make, with the reason.
    """

    seed: int
    seconds: float
    every: float
    only: Collection[str] = ()
    omitted: Mapping[str, str] = field(default_factory=dict)


class LogError(Exception):
    """A file is no log of an endurance run."""


def header_line(header: Header) -> str:
    """The header as a line of a log."""
    return json.dumps({"endurance": VERSION, **asdict(header), "only": sorted(header.only)})


def strike_line(strike: Strike) -> str:
    """A fault as a line of a log."""
    return json.dumps({"strike": asdict(strike)})


def read_log(lines: Iterable[str]) -> tuple[Header, list[Strike]]:
    """Reads the header and the faults; other lines say what was observed. A last line that is cut off is ignored.

    Raises:
        LogError: it is no log, or of another version.
    """
    found = [line for line in lines if line.strip()]
    header = Header(**_fields(found[0] if found else "", "endurance"))
    strikes = []
    for number, line in enumerate(found[1:], start=2):
        try:
            content = json.loads(line)
        except ValueError:
            if number == len(found):
                break
            raise LogError(f"line {number} of the log is no JSON") from None
        if isinstance(content, dict) and "strike" in content:
            try:
                strike = Strike(**content["strike"])
                strikes.append(Strike(**(asdict(strike) | {"kind": FaultKind(strike.kind)})))
            except (TypeError, ValueError) as error:
                raise LogError(f"line {number} of the log is no fault: {error}") from None
    return header, strikes


def _fields(line: str, mark: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
        version = content.pop(mark)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise LogError("this is no log of an endurance run: its first line is not a header") from None
    if version != VERSION or content.keys() != Header.__dataclass_fields__.keys():
        raise LogError(f"the log has version {version!r}; this release reads version {VERSION}")
    return dict(content)
