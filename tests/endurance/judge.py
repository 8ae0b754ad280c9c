"""Checks what all processes report while a run goes on, and sums it up."""

import json
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from averaging.receipts.receipt_log import loads
from tests.endurance.ledgers import GroupLedger, Growth, MeanLedger, SampleLedger
from tests.endurance.plan import GROUP_WAIT, SILENT, STALL_TIMEOUT, Strike
from tests.support.ledger import Ledger, LedgerError, recovery_limit

MOST_WAITING = 300.0
"""Seconds after which a scored group that the feed has taken must be trained, unless no batch was trained meanwhile."""

MOST_QUIET = 120.0
"""Seconds beyond two usual rounds and a deadline after which a peer without a fault must have finished a round. A busy
machine may take that long; what it usually takes is in the summary."""


@dataclass
class Window:
    """The time after one fault in one run of peers."""

    strike: Strike
    began: float
    waiting: set[str]  # peers without a fault that have not finished a round since
    bound: float  # two usual rounds at that time, and the longest wait for a silent peer, in seconds
    ended: float = 0.0  # when the last of those that were waited for had finished a round


class Recovery:
    """The time from each fault until all others of its run have finished a round.

    Attributes:
        seconds: of those that are over.
        over: how many of them took longer than two usual rounds and a deadline.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.over = 0
        self._ends: dict[tuple[str, str], float] = {}
        self._usual: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=200))
        self._windows: dict[str, list[Window]] = defaultdict(list)

    def usual(self, run: str) -> float:
        """Seconds between two rounds of a peer, while its run has no fault; the median."""
        return statistics.median(self._usual[run]) if self._usual[run] else 0.0

    def strike(self, strike: Strike, run: str, others: Collection[str], now: float) -> None:
        """Notes a fault, and the peers of the run that have none."""
        deadline = GROUP_WAIT + (STALL_TIMEOUT if strike.kind in SILENT else 0.0)
        bound = recovery_limit(self.usual(run), deadline)
        self._windows[run].append(Window(strike, now, set(others), bound))

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

    def tick(self, now: float) -> Iterator[str]:
        """Closes the windows that are over."""
        for run, windows in self._windows.items():
            for window in list(windows):
                if not window.waiting:
                    windows.remove(window)
                    seconds = max(0.0, window.ended - window.began)
                    self.seconds.append(seconds)
                    self.over += seconds > window.bound
                elif now - window.began > MOST_QUIET + window.bound:
                    windows.remove(window)
                    yield (
                        f"{', '.join(sorted(window.waiting))} of {run} have no fault and have finished no round in "
                        f"{now - window.began:.0f} s after {window.strike}"
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
        rounds: of each run, counted at every member.
    """

    violations: list[str] = field(default_factory=list)
    rounds: Counter[str] = field(default_factory=Counter)
    recovery: Recovery = field(default_factory=Recovery)
    growth: Growth = field(default_factory=Growth)
    _counts: Counter[str] = field(default_factory=Counter)
    _ledgers: dict[str, Ledger] = field(default_factory=lambda: defaultdict(Ledger))
    _samples: dict[str, SampleLedger] = field(
        default_factory=lambda: {"gradients": SampleLedger(), "sites": SampleLedger(sharded=True)}
    )
    _means: MeanLedger = field(default_factory=MeanLedger)
    _groups: GroupLedger = field(default_factory=GroupLedger)
    _endpoints: dict[str, str] = field(default_factory=dict)
    _last_batch: float = 0.0
    _late_groups: bool = False

    def take(self, plane: str, who: str, rank: int, life: int, slot: int, event: Mapping[str, Any], now: float) -> None:
        self.violations.extend(self._check(plane, who, rank, life, slot, event, now))

    def _check(
        self, plane: str, who: str, rank: int, life: int, slot: int, event: Mapping[str, Any], now: float
    ) -> Iterator[str]:
        name, ledger = f"{who}.{rank}" if plane == "sites" else who, self._ledgers[plane]
        match event["event"]:
            case "ready" if plane in self._samples:
                self._samples[plane].know(event["endpoint"], slot)
                if rank == 0:
                    self._samples[plane].know(event["site"], slot)
            case "ready" if plane == "local":
                self._endpoints[who] = event["endpoint"]
            case "wrong":
                yield f"{name}: {event['message']}"
            case "dropped" if rank == 0:
                self._samples[plane].drop(event["first"], event["last"])
            case "stepped":
                yield from broken(partial(ledger.parameters, f"{event['after']} at rank {rank}", event["digest"], name))
                receipt = None if event["receipt"] is None else loads(json.dumps(event["receipt"]))
                yield from self._samples[plane].note(name, slot, event, receipt, now)
            case "round" if "receipt" in event:  # not that of the auxiliary, which is a command
                yield from self._note_round(plane, who, life, event, now)
            case "before" if plane == "local":
                self._means.before(self._endpoints[who], event["value"])
            case "after":
                yield from self._means.after(self._endpoints[who], event["group"], event["values"], now)
            case "version":
                self._counts["versions"] += 1
                yield from broken(partial(ledger.content, "weights", event["version"], event["digest"], name))
                yield from broken(partial(ledger.never_back, "version of the weights", name, life, event["version"]))
            case "posted":
                self._groups.acknowledged(event["group"], now)
            case "batch" if who == "learner":
                self._last_batch = now
                yield from self._groups.batch(event["step"], event["groups"])

    def _note_round(self, plane: str, who: str, life: int, event: Mapping[str, Any], now: float) -> Iterator[str]:
        receipt = loads(json.dumps(event["receipt"]))
        self._counts[f"{plane} {receipt.outcome.value}"] += 1
        yield from broken(partial(self._ledgers[plane].receipt, receipt.endpoint, life, receipt))
        if plane == "local":
            self._means.note_round(receipt)
        else:
            self._samples[plane].note_round(receipt, now)
        if receipt.averaged:
            self.rounds[plane] += 1
            self._counts["drops"] += len(receipt.dropped)
            self._counts.update(f"lane {account.lane}" for account in receipt.accounts if account.lane)
            self.recovery.round(plane, who, receipt.seconds, event["moment"])

    def tick(self, now: float) -> None:
        """Checks what is due, such as the rounds whose members have had time to report."""
        self._settle(now)
        self.violations.extend(self.recovery.tick(now))
        waiting = self._groups.waiting(now)
        if waiting and waiting[0] > MOST_WAITING and self._last_batch > now - 10 and not self._late_groups:
            self._late_groups = True
            self.violations.append(f"a scored group waits for {waiting[0]:.0f} s although batches are trained")

    def end(self) -> None:
        """Checks all that is left."""
        self._settle(math.inf)
        if self.rounds and not self._counts["lane sealed"]:
            self.violations.append("no part travelled on a direct connection, which TLS seals")

    def _settle(self, now: float) -> None:
        for ledger in self._samples.values():
            self.violations.extend(ledger.settle(now))
        self.violations.extend(self._means.settle(now))

    def summary(self) -> dict[str, Any]:
        """The figures so far."""
        seconds = self.recovery.seconds
        return {
            "rounds": dict(self.rounds),
            "counts": dict(sorted(self._counts.items())),
            "steps": {run: (ledger.steps, ledger.samples) for run, ledger in self._samples.items()},
            "given_up_samples": sum(ledger.dropped_samples for ledger in self._samples.values()),
            "checked_means": self._means.rounds,
            "groups_trained": self._groups.trained,
            "usual_round": {run: round(self.recovery.usual(run), 2) for run in self.rounds},
            "recoveries": len(seconds),
            "recovery_median_most": (round(statistics.median(seconds), 2), round(max(seconds), 2)) if seconds else None,
            "beyond_two_rounds_and_a_deadline": self.recovery.over,
            "violations": len(self.violations),
        }
