"""Checks what all processes report while a run goes on, and sums it up."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from averaging.receipts.receipt_log import loads
from tests.endurance.ledgers import GroupLedger, Growth, MeanLedger, SampleLedger
from tests.endurance.plan import SILENT, FaultKind, Strike
from tests.support.ledger import Ledger, LedgerError, recovery_limit

MOST_WAITING = 300.0
"""Seconds after which a scored group that the feed has taken must be trained, unless no batch was trained meanwhile."""

MOST_QUIET = 120.0
"""Seconds beyond the bound after which a peer without a fault must have finished a round, whatever else happened."""


@dataclass
class Window:
    """The time after one fault in one run of peers.

    Attributes:
        waiting: peers without a fault that have not finished a round since.
        usual: seconds of a usual round at that time.
        mixed: whether another fault hit the same run meanwhile.
        lateness: by how many seconds the harness was late meanwhile, because the machine was busy.
        ended: when the last of those that were waited for had finished a round.
    """

    strike: Strike
    began: float
    waiting: set[str]
    usual: float
    deadline: float
    mixed: bool = False
    lateness: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class Recovered:
    """How long the others took after one fault.

    Attributes:
        bound: two usual rounds, one deadline, and what the machine was late by itself.
    """

    strike: Strike
    run: str
    seconds: float
    bound: float
    mixed: bool


class Recovery:
    """The time from a fault until all others of its run have finished a round: two usual rounds and a deadline.

    Args:
        deadlines: returns the deadline in seconds of a kind of fault.
        slowness: how many times as long as an idle machine this one takes; deadlines count so many times.
    """

    def __init__(self, deadlines: Callable[[FaultKind], float], slowness: float = 1.0) -> None:
        self._deadlines, self._slowness = deadlines, slowness
        self._ends: dict[tuple[str, str], float] = {}
        self._usual: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=200))
        self._windows: dict[str, list[Window]] = defaultdict(list)
        self._settled: dict[str, float] = defaultdict(float)  # when the end of a fault is over, too
        self.done: list[Recovered] = []

    def usual(self, run: str) -> float:
        """Seconds between two rounds of a peer, while its run has no fault; the median."""
        return statistics.median(self._usual[run]) if self._usual[run] else 0.0

    def strike(self, strike: Strike, run: str, others: Collection[str], now: float, *, hit: int = 1) -> None:
        """Notes a fault, the peers of the run that have none, and how many it hits: several are several faults."""
        for window in self._windows[run]:
            window.mixed = True
        if others:
            mixed = bool(self._windows[run]) or hit > 1 or now < self._settled[run]
            window = Window(
                strike, now, set(others), self.usual(run), self._deadlines(strike.kind) * self._slowness, mixed
            )
            self._windows[run].append(window)

    def heal(self, strike: Strike, run: str, now: float) -> None:
        """Notes that a fault has ended, which may cost the others as much as its beginning: an address changes back."""
        for window in self._windows[run]:
            window.mixed |= window.strike is not strike
        limit = recovery_limit(self.usual(run), self._deadlines(strike.kind) * self._slowness)
        self._settled[run] = max(self._settled[run], now + limit)

    def hit(self, run: str, peer: str) -> None:
        """Notes that a peer is hit itself, or has ended, so that nobody waits for it."""
        for window in self._windows[run]:
            window.waiting.discard(peer)

    def round(self, run: str, peer: str, seconds: float, moment: float) -> None:
        """Notes that a peer has finished a round with an average, which took so long.

        A round that had begun before a fault does not count: it may have had its result already.
        """
        last = self._ends.get((run, peer))
        self._ends[run, peer] = moment
        if last is not None and not self._windows[run]:
            self._usual[run].append(moment - last)
        for window in self._windows[run]:
            if moment - seconds >= window.began and peer in window.waiting:
                window.waiting.discard(peer)
                window.ended = max(window.ended, moment)

    def tick(self, now: float, late: float) -> Iterator[str]:
        """Closes the windows that are over; `late` is by how many seconds this process itself was delayed."""
        for run, windows in self._windows.items():
            for window in list(windows):
                window.lateness += late
                seconds = (now if window.waiting else max(window.ended, window.began)) - window.began
                bound = recovery_limit(window.usual, window.deadline) + window.lateness
                if not window.waiting:
                    windows.remove(window)
                    self.done.append(Recovered(window.strike, run, seconds, bound, window.mixed))
                    if seconds > bound and not window.mixed:
                        yield (
                            f"after {window.strike} the others of {run} needed {seconds:.1f} s; two usual rounds of "
                            f"{window.usual:.1f} s and a deadline of {window.deadline:.1f} s are {bound:.1f} s"
                        )
                elif seconds > MOST_QUIET + bound:
                    windows.remove(window)
                    yield (
                        f"{', '.join(sorted(window.waiting))} of {run} have no fault and have finished no round in "
                        f"{seconds:.0f} s after {window.strike}"
                    )


def broken(check: Callable[[], None]) -> Iterator[str]:
    """What a check of `tests.support.ledger` has found, if anything."""
    try:
        check()
    except LedgerError as error:
        yield str(error)


@dataclass
class Judge:
    """Takes the events of all processes.

    Attributes:
        violations: what has been found.
    """

    recovery: Recovery
    violations: list[str] = field(default_factory=list)
    rounds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    lanes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    drops: int = 0
    versions: Counter[str] = field(default_factory=Counter)
    ledgers: dict[str, Ledger] = field(default_factory=lambda: defaultdict(Ledger))
    samples: dict[str, SampleLedger] = field(
        default_factory=lambda: {"gradients": SampleLedger(), "sites": SampleLedger(sharded=True)}
    )
    means: MeanLedger = field(default_factory=MeanLedger)
    groups: GroupLedger = field(default_factory=GroupLedger)
    growth: Growth = field(default_factory=Growth)
    last_batch: float = 0.0
    _endpoints: dict[str, str] = field(default_factory=dict)
    _late_groups: bool = False
    _now: float = 0.0

    def take(self, plane: str, who: str, rank: int, life: int, slot: int, event: Mapping[str, Any], now: float) -> None:
        """Takes one event of one process."""
        self._now = now
        self.violations.extend(self._check(plane, who, rank, life, slot, event, now))

    def _check(
        self, plane: str, who: str, rank: int, life: int, slot: int, event: Mapping[str, Any], now: float
    ) -> Iterator[str]:
        name = f"{who}.{rank}" if plane == "sites" else who
        match event["event"]:
            case "ready" if plane in self.samples:
                self.samples[plane].know(event["endpoint"], slot)
                if rank == 0:
                    self.samples[plane].know(event["site"], slot)
                self._endpoints[who] = event["endpoint"]
            case "ready" if plane == "local":
                self._endpoints[who] = event["endpoint"]
            case "wrong":
                yield f"{name}: {event['message']}"
            case "dropped" if rank == 0:
                self.samples[plane].drop(event["first"], event["last"])
            case "stepped":
                ledger = self.ledgers[plane]
                yield from broken(partial(ledger.parameters, f"{event['after']} at rank {rank}", event["digest"], name))
                receipt = None if event["receipt"] is None else loads(json.dumps(event["receipt"]))
                yield from self.samples[plane].note(name, slot, event, receipt, now)
            case "round" if "receipt" in event:  # not that of the auxiliary, which is a command
                yield from self._note_round(plane, who, life, event)
            case "before" if plane == "local":
                self.means.before(self._endpoints[who], event["value"])
            case "after":
                yield from self.means.after(self._endpoints[who], event["group"], event["values"], now)
            case "version":
                self.versions[who] += 1
                ledger, version = self.ledgers[plane], event["version"]
                yield from broken(partial(ledger.content, "weights", version, event["digest"], name))
                yield from broken(partial(ledger.never_back, "version of the weights", name, life, version))
            case "posted":
                self.groups.acknowledged(event["group"], now)
            case "batch" if who == "learner":
                self.last_batch = now
                yield from self.groups.batch(event["step"], event["groups"])
            case "failure":
                self.failures[f"{plane}: {event['message'][:60]}"] += 1

    def _note_round(self, plane: str, who: str, life: int, event: Mapping[str, Any]) -> Iterator[str]:
        receipt = loads(json.dumps(event["receipt"]))
        self.outcomes[f"{plane} {receipt.outcome.value}"] += 1
        yield from broken(partial(self.ledgers[plane].receipt, receipt.endpoint, life, receipt))
        if plane == "local":
            self.means.note_round(receipt)
        else:
            self.samples[plane].note_round(receipt, self._now)
        if receipt.averaged:
            self.rounds[plane] += 1
            self.drops += len(receipt.dropped)
            self.lanes.update({account.lane for account in receipt.accounts if account.lane})
            self.recovery.round(plane, who, receipt.seconds, event["moment"])

    def settle(self, now: float) -> None:
        """Checks the rounds whose members have had time to report; all of them if `now` is infinite."""
        for ledger in self.samples.values():
            self.violations.extend(ledger.settle(now))
        self.violations.extend(self.means.settle(now))

    def tick(self, now: float, late: float) -> None:
        """Checks what is due."""
        self.settle(now)
        self.violations.extend(self.recovery.tick(now, late))
        waiting = self.groups.waiting(now)
        if waiting and waiting[0] > MOST_WAITING and self.last_batch > now - 10 and not self._late_groups:
            self._late_groups = True
            self.violations.append(f"a scored group waits for {waiting[0]:.0f} s although batches are trained")

    def summary(self) -> dict[str, Any]:
        """The figures so far."""
        clean = [one for one in self.recovery.done if not one.mixed]
        return {
            "rounds": dict(self.rounds),
            "outcomes": dict(self.outcomes),
            "lanes": dict(self.lanes),
            "steps": {run: ledger.steps for run, ledger in self.samples.items()},
            "samples": {run: ledger.samples for run, ledger in self.samples.items()},
            "given_up_samples": {run: ledger.dropped_samples for run, ledger in self.samples.items()},
            "checked_means": self.means.rounds,
            "drops": self.drops,
            "groups_trained": self.groups.trained,
            "versions": sum(self.versions.values()),
            "usual_round": {run: round(self.recovery.usual(run), 2) for run in ("gradients", "local", "sites")},
            "recoveries": len(self.recovery.done),
            "judged": len(clean),
            "all_median": round(statistics.median(one.seconds for one in self.recovery.done), 2) if clean else None,
            "all_most": round(max((one.seconds for one in self.recovery.done), default=0.0), 2),
            "fits": {
                what: {
                    "lives": len(lines),
                    "most_grown": round(max((line.grown for line in lines), default=0.0)),
                }
                for what in Growth.ALLOWED
                for lines in [[fits[what] for fits in self.growth.fits.values() if what in fits]]
            },
            "recovery_median": round(statistics.median(one.seconds for one in clean), 2) if clean else None,
            "recovery_most": round(max((one.seconds for one in clean), default=0.0), 2),
            "over_bound": sum(one.seconds > one.bound for one in clean),
            "violations": len(self.violations),
        }


def deadline_of(kind: FaultKind, group_wait: float, stall_timeout: float) -> float:
    """The deadline that bounds how long others wait: of silence, or of a member that is expected and does not come."""
    return group_wait + (stall_timeout if kind in SILENT else 0.0)
