"""What must hold over all processes beyond `tests.support.ledger`, checked from what the averages really hold. Pure.

The violations that a class finds are results of its methods, as texts, so that a run goes on after one.
"""

import bisect
import itertools
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from averaging.receipts import Receipt

SETTLE_SECONDS = 75.0
"""Age at which a round is checked: by then also a member that was stopped in it has reported, or will not count."""

TOLERANCE = 1e-9
"""Relative error of an average of float64."""


def subsets(members: Collection[str], may_be_missing: Collection[str]) -> Iterator[tuple[str, ...]]:
    """All members, and all but some of those that may be missing."""
    missing = [member for member in members if member in set(may_be_missing)]
    for count in range(len(missing) + 1):
        for out in itertools.combinations(missing, count):
            yield tuple(member for member in members if member not in out)


def near(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


@dataclass
class Step:
    """A global step of `GradientAveraging`, from the reports of its members."""

    samples: dict[str, int]  # of each member, by endpoint, as the receipts say
    since: float  # the first report
    dropped: set[str] = field(default_factory=set)  # by anybody
    reports: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class SampleLedger:
    """The samples of a run with `GradientAveraging`: each is in one step at most, and in one unless somebody says why.

    What a step contains is read from its average, see `trainer`. Steps of different histories do not count together: a
    peer that takes over the state of another history has not trained with the steps that are only in its own.

    Args:
        sharded: whether the members are sites, whose shards may lack members that only some receipts name.
    """

    def __init__(self, *, sharded: bool = False) -> None:
        self.sharded = sharded
        self.steps = self.samples = self.dropped_samples = 0
        self._slots: dict[str, int] = {}
        self._open: dict[str, Step] = {}
        self._dropped: dict[str, tuple[float, set[str]]] = {}
        self._parents: dict[str, str] = {}
        self._counted: dict[int, list[tuple[int, int, str]]] = defaultdict(list)

    def know(self, endpoint: str, slot: int) -> None:
        self._slots[endpoint] = slot

    def note_round(self, receipt: Receipt, now: float) -> None:
        """Notes any receipt with a group: also a member whose round failed may have dropped others."""
        if receipt.dropped:
            dropped = self._dropped.setdefault(receipt.group_id.hex(), (now, set()))[1]
            dropped |= {lost.endpoint for lost in receipt.dropped}

    def drop(self, first: int, last: int) -> None:
        """Notes samples that a trainer has given up because it took over another state."""
        self.dropped_samples += last - first + 1

    def note(
        self, who: str, slot: int, report: Mapping[str, Any], receipt: Receipt | None, now: float
    ) -> Iterator[str]:
        """Notes a step that one process reports, and the receipt of its round; None if it was made alone."""
        self._parents[report["after"]] = report["before"]
        if receipt is None:
            self.steps += 1
            yield from self._check_alone(who, slot, report)
            yield from self._count(slot, report["first"], report["last"], report["after"])
            return
        samples = {name: int(user["samples"]) for name, user in receipt.gathered.items()}
        step = self._open.setdefault(receipt.group_id.hex(), Step(samples, now))
        step.dropped |= {lost.endpoint for lost in receipt.dropped}
        step.reports[who] = {**report, "slot": slot}

    def settle(self, now: float) -> Iterator[str]:
        """Checks the steps whose members have had time to report."""
        due = [group for group, step in self._open.items() if now - step.since > SETTLE_SECONDS]
        for group in due:
            step = self._open.pop(group)
            step.dropped |= self._dropped.get(group, (now, set()))[1]
            yield from self._check(group, step)
        for group in [group for group, (since, _) in self._dropped.items() if now - since > 2 * SETTLE_SECONDS]:
            del self._dropped[group]

    def _check(self, group: str, step: Step) -> Iterator[str]:
        self.steps += 1
        slots = {name: self._slots[name] for name in step.samples if name in self._slots}
        if len(slots) < len(step.samples):
            yield f"group {group[:8]} has members that nobody has started: {set(step.samples) - set(slots)}"
            return
        own = {report["slot"]: (report["first"], report["last"]) for report in step.reports.values()}
        missing = step.samples if self.sharded else step.dropped
        weights = sorted(
            {sum(step.samples[name] for name in some) for some in subsets(list(step.samples), missing) if some}
        )
        found: dict[int, tuple[int, int]] = dict(own)
        after = next(iter(step.reports.values()))["after"]
        for who, report in step.reports.items():
            for name, slot in slots.items():
                for copy in report["copies"]:
                    count = step.samples[name]
                    interval = interval_of(copy[slot], count, weights, own.get(slot))
                    if interval is None:
                        may_lack = name in missing and not any(copy[slot])
                        if not may_lack:
                            yield (
                                f"group {group[:8]}: the average at {who} holds {copy[slot]} of {name}, which gave "
                                f"{count} samples {own.get(slot, 'unknown')} of {weights}; dropped: {step.dropped}"
                            )
                    elif slot not in own:
                        found[slot] = interval
            allowed = [
                sum((slots[name] + 1) * step.samples[name] for name in some) / sum(step.samples[name] for name in some)
                for some in subsets(list(step.samples), missing)
                if some
            ]
            for value in report["body"]:
                if not any(near(value, one) for one in allowed):
                    yield f"group {group[:8]}: {value} at {who} is the average of no members: {step.samples}"
        for slot, (first, last) in found.items():
            yield from self._count(slot, first, last, after)

    @staticmethod
    def _check_alone(who: str, slot: int, report: Mapping[str, Any]) -> Iterator[str]:
        mean = (report["first"] + report["last"]) / 2
        for copy in report["copies"]:
            if not near(copy[slot][0], 1.0) or not near(copy[slot][1], mean):
                yield f"{who} made a step alone with {copy[slot]} instead of its own samples"

    def _count(self, slot: int, first: int, last: int, after: str) -> Iterator[str]:
        counted = self._counted[slot]
        if (first, last, after) in counted[-200:]:
            return
        for other_first, other_last, other in counted:
            if first <= other_last and other_first <= last and self._is_ancestor(other, after):
                yield f"samples {max(first, other_first)} … of trainer {slot} are in two steps, {other} and {after}"
        self.samples += last - first + 1
        bisect.insort(counted, (first, last, after))
        del counted[:-2000]

    def _is_ancestor(self, one: str, other: str) -> bool:
        return one in self._ancestors(other) or other in self._ancestors(one)

    def _ancestors(self, state: str) -> Iterator[str]:
        for _ in range(5000):
            if (parent := self._parents.get(state)) is None:
                return
            yield parent
            state = parent


def interval_of(
    found: Sequence[float], count: int, weights: Iterable[int], own: tuple[int, int] | None
) -> tuple[int, int] | None:
    """The samples of one member in an average.

    Args:
        found: mean number of its samples per sample of the step, and likewise of their sum.
        count: samples that it has given.
        weights: samples that the step may have had.
        own: the first and last of them, if the member has reported them.

    Returns:
        The first and the last; None if these numbers are no average with so many samples of the member.
    """
    weights = list(weights)
    if not any(near(found[0] * weight, count) for weight in weights):
        return None
    for weight in weights:
        first = found[1] * weight / count - (count - 1) / 2 if count else 0.0
        if abs(first - round(first)) < 1e-3 and (own is None or own == (round(first), round(first) + count - 1)):
            return round(first), round(first) + count - 1
    return None


@dataclass
class MeanRound:
    """A round of `LocalSGD`."""

    since: float  # the first report
    # Of each member its receipt, its value before, and those that it holds after it.
    reports: dict[str, tuple[Receipt, float, Sequence[float]]] = field(default_factory=dict)
    before: dict[str, list[float]] = field(default_factory=dict)  # the last values when the first member had reported


class MeanLedger:
    """The rounds of a run with `LocalSGD`: every value is a mean of members, or the own value if elements were kept."""

    def __init__(self) -> None:
        self.rounds = 0
        self._before: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=3))
        self._receipts: dict[str, tuple[Receipt, float]] = {}
        self._open: dict[bytes, MeanRound] = {}

    def before(self, endpoint: str, value: float) -> None:
        self._before[endpoint].append(value)

    def note_round(self, receipt: Receipt) -> None:
        self._receipts[receipt.endpoint] = receipt, self._before[receipt.endpoint][-1]

    def after(self, endpoint: str, group: str, values: Sequence[float], now: float) -> Iterator[str]:
        """Notes what a member holds after a round."""
        receipt, own = self._receipts.pop(endpoint)
        if receipt.group_id.hex() != group:
            yield f"{endpoint} reports group {group[:8]} after the receipt of {receipt.group_id.hex()[:8]}"
        elif receipt.averaged:
            noted = self._open.setdefault(receipt.group_id, MeanRound(now))
            noted.reports[endpoint] = receipt, own, values
            for name in receipt.members:
                noted.before.setdefault(name, list(self._before[name]))
        elif not all(near(value, own) for value in values):
            yield f"{endpoint} holds {values} after a round that failed; it had {own}"

    def settle(self, now: float) -> Iterator[str]:
        """Checks the rounds whose members have had time to report."""
        for group in [group for group, noted in self._open.items() if now - noted.since > SETTLE_SECONDS]:
            yield from self._check(group.hex()[:8], self._open.pop(group))

    def _check(self, group: str, noted: MeanRound) -> Iterator[str]:
        self.rounds += 1
        receipts = [receipt for receipt, _, _ in noted.reports.values()]
        members = [one.endpoint for one in receipts[0].accounts if one.mode != "auxiliary"]
        dropped = {lost.endpoint for receipt in receipts for lost in receipt.dropped}
        # A member that has not reported was killed or stopped; its value is one of its last.
        values = [[noted.reports[name][1]] if name in noted.reports else noted.before[name] for name in members]
        means = {
            statistics.fmean(chosen[members.index(name)] for name in some)
            for chosen in itertools.product(*values)
            for some in subsets(members, dropped)
            if some
        }
        for who, (receipt, own, held) in noted.reports.items():
            allowed = means | {own} if receipt.kept_local else means
            if all(values) and not all(any(near(value, mean) for mean in allowed) for value in held):
                had = dict(zip(members, values, strict=True))
                yield f"group {group}: {who} holds {held}, which is no average of {had}"


class GroupLedger:
    """The scored groups of a feed: each that was acknowledged is trained once."""

    def __init__(self) -> None:
        self.trained = 0
        self._acknowledged: dict[int, float] = {}
        self._steps: dict[int, tuple[int, ...]] = {}
        self._step_of: dict[int, int] = {}

    def acknowledged(self, group: int, now: float) -> None:
        if group not in self._step_of:
            self._acknowledged[group] = now

    def batch(self, step: int, groups: Sequence[int]) -> Iterator[str]:
        """Notes the groups of a batch; the same batch may come again after a restart."""
        known = self._steps.setdefault(step, tuple(groups))
        if sorted(known) != sorted(groups):
            yield f"batch {step} has groups {sorted(groups)}, and had {sorted(known)} before"
        for group in groups:
            if self._step_of.setdefault(group, step) != step:
                yield f"group {group} is trained in step {self._step_of[group]} and in step {step}"
            self._acknowledged.pop(group, None)
        self.trained = len(self._step_of)

    def waiting(self, now: float) -> list[float]:
        """The ages of the groups that are acknowledged and not trained yet, the oldest first."""
        return sorted((now - since for since in self._acknowledged.values()), reverse=True)


class Growth:
    """Memory and descriptors of each life of a process: flat, by a line through all of its measurements."""

    ALLOWED: Mapping[str, tuple[float, float, float]] = {
        "memory": (120.0, 32 << 20, 0.10),
        # A connection without calls, for example through a proxy that was cut, is closed after ten minutes only.
        "descriptors": (660.0, 24.0, 0.15),
    }
    """Seconds after a start that do not count, since allocators and caches fill; growth that is allowed, and as a share
    of the mean, if that is more."""

    LEAST = 240.0
    """Seconds of measurements from which something is concluded."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self._reported: set[tuple[str, str]] = set()

    def note(self, who: str, age: float, values: Mapping[str, float]) -> Iterator[str]:
        """Notes a measurement of one life of a process, `age` seconds after its start."""
        for what, value in values.items():
            (warm, most, share), points = self.ALLOWED[what], self._points[who, what]
            if age < warm:
                continue
            points.append((age, value))
            lasted = age - points[0][0]
            if len(points) % 20 or lasted < self.LEAST or (who, what) in self._reported:
                continue
            ages, measured = zip(*points, strict=True)
            grown, level = statistics.linear_regression(ages, measured).slope * lasted, statistics.fmean(measured)
            if grown > max(most, share * level):
                self._reported.add((who, what))
                yield f"the {what} of {who} grew by {grown:,.0f} in {lasted:.0f} s (mean {level:,.0f})"
