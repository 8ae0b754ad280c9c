"""Explains receipts as text: one line per round and a summary. Receipts of several peers are merged. Pure."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from averaging.common import MAX_NAMES, counted, duration, listed, size
from averaging.errors import printable
from averaging.receipts.drift import Drift
from averaging.receipts.receipt import Dropped, LateArrival, Outcome, Receipt, Straggler

T = TypeVar("T")

AS_FAST = 0.8  # a peer is slow if its step rate is below this fraction of the others' median

LOCAL_STEPS = (
    "use fewer local steps between rounds (sync_every=) at {0}, in proportion to its step rate, or a smaller batch; or "
    "use GradientAveraging, in which unequal peers share a batch"
)
REMEDIES = {
    "GradientAveraging": "the others wait for one batch of {0}; use a smaller batch_size there, or a larger "
    "target_batch_size at all peers",
    # Other strategies need all peers in one group.
    "LocalSGD": f"{LOCAL_STEPS}; or set a smaller group_size at all peers, so that groups begin without it",
}
"""For a slow peer, by the strategy of the run."""


def last_to_arrive(receipts: Iterable[Receipt]) -> LateArrival | None:
    """Returns the member that most receipts of one group name as the last, with the median of their seconds."""
    reports = _grouped(
        (late.endpoint, late.seconds)
        for receipt in receipts
        if (late := receipt.last_to_arrive) is not None and late.endpoint in receipt.members
    )
    if not reports:
        return None
    name = max(reports, key=lambda name: (len(reports[name]), max(reports[name])))
    return LateArrival(name, statistics.median(reports[name]))


def describe_late(rounds: Sequence[Sequence[Receipt]]) -> Iterator[str]:
    """Yields lines about members that arrive late at their groups, and remedies for those that do so regularly."""
    late = _grouped((last.endpoint, last.seconds) for receipts in rounds if (last := last_to_arrive(receipts)))
    for name, seconds in sorted(late.items(), key=lambda item: -sum(item[1]))[:MAX_NAMES]:
        there = [receipts for receipts in rounds if any(name in receipt.members for receipt in receipts)]
        yield (
            f"last to arrive: {name} in {len(seconds)} of {counted(len(there), 'round')}, "
            f"{duration(statistics.median(seconds))} after the others (median), total {duration(sum(seconds))}"
        )
        if _is_regular(len(seconds), len(there)):
            yield from _why(there, name)
    if not late:
        yield "last to arrive: no peer regularly"


def _is_regular(count: int, rounds: int) -> bool:
    return count >= 2 and 2 * count >= rounds


def _why(rounds: Sequence[Sequence[Receipt]], name: str) -> Iterator[str]:
    """Yields the step rates of a late peer and the others, if known, and a hint."""
    teller = rounds[0][0]
    announced = _grouped(
        (account.endpoint, account.step_rate)
        for receipts in rounds
        for receipt in receipts
        for account in receipt.accounts
        if account.step_rate is not None
    )
    rates = {peer: statistics.median(values) for peer, values in announced.items()}
    rate = rates.pop(name, None)
    if rate is not None and rates:
        others = statistics.median(rates.values())
        yield f"step rate: {name} {teller.rate_text(rate)}, the others {teller.rate_text(others)} (median)"
        if rate >= AS_FAST * others:
            yield f"hint: {name} is as fast as the others; it may make more local steps, or stop for evaluations"
            return
    yield f"hint: {REMEDIES.get(teller.strategy, LOCAL_STEPS).format(name)}"


@dataclass(frozen=True, slots=True)
class Round:
    """One round, from the receipts of all its peers that are available."""

    receipts: tuple[Receipt, ...]  # one per peer of the same group; a single one if no group was found

    @property
    def name(self) -> str:
        """For example `round 17`, or `round 3/17 of TOPIC`, since peers that joined later count from another round."""
        topic = self.receipts[0].topic
        numbers = sorted({receipt.round for receipt in self.receipts})
        return f"round {'/'.join(map(str, numbers))}" + (f" of {topic}" if topic else "")

    @property
    def members(self) -> tuple[str, ...]:
        return self.receipts[0].members

    @property
    def present(self) -> set[str]:
        return set(self.members) - self.dropped.keys()

    @property
    def outcome(self) -> Outcome:
        """Averaged if it is for any peer, else the outcome of the first receipt."""
        outcomes = [receipt.outcome for receipt in self.receipts]
        return Outcome.AVERAGED if Outcome.AVERAGED in outcomes else outcomes[0]

    @property
    def dropped(self) -> dict[str, dict[str, Dropped]]:
        """The dropped members, each with the members that dropped it.

        Reports of members that most others dropped are ignored: such a member lost its connection to all others.
        """
        reports: dict[str, dict[str, Dropped]] = defaultdict(dict)
        for receipt in self.receipts:
            for dropped in receipt.dropped:
                reports[dropped.endpoint][receipt.endpoint] = dropped
        reporters = {receipt.endpoint for receipt in self.receipts}
        lost = {name for name, by in reports.items() if 2 * len(by) > len(reporters - {name})}
        credible = {
            name: {who: report for who, report in by.items() if who not in lost} for name, by in reports.items()
        }
        return {name: by for name, by in credible.items() if by} or dict(reports)

    @property
    def straggler(self) -> Straggler | None:
        """The longest wait for a member. Late parts take precedence, because they may cause late averages."""
        stragglers = [receipt.straggler for receipt in self.receipts if receipt.straggler is not None]
        present = [straggler for straggler in stragglers if straggler.endpoint not in self.dropped]
        return max(present, key=lambda straggler: (straggler.what == "parts", straggler.seconds), default=None)

    @property
    def drift(self) -> dict[str, list[Drift]]:
        """What differs at which peers although it should not, by endpoint, but for rounding."""
        drifts = [drift for receipt in self.receipts for drift in receipt.drifted]
        first = {(drift.endpoint, drift.kind, drift.name): drift for drift in reversed(drifts)}
        return _grouped((drift.endpoint, drift) for drift in reversed(first.values()))

    @property
    def states(self) -> dict[str, list[str]]:
        """Endpoints by state digest, which must be the same at all members; empty unless two peers have a digest."""
        states = _grouped((receipt.state, receipt.endpoint) for receipt in self.receipts if receipt.state)
        return states if sum(map(len, states.values())) > 1 else {}

    @property
    def digests(self) -> dict[str, dict[str, list[str]]]:
        """For each reducer with a digest at two peers or more: the endpoints by digest of its averages."""
        reports = _grouped(
            (account.endpoint, (account.digest, receipt.endpoint))
            for receipt in self.receipts
            for account in receipt.accounts
            if account.digest
        )
        return {reducer: _grouped(pairs) for reducer, pairs in reports.items() if len(pairs) > 1}


def _grouped(pairs: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def merge(receipts: Iterable[Receipt]) -> list[Round]:
    """Returns the rounds of receipts, which may have any order, sorted by their start."""
    groups: dict[tuple[object, ...], dict[str, Receipt]] = defaultdict(dict)
    for receipt in receipts:
        alone = (receipt.endpoint, receipt.round, receipt.started)
        # The same receipt may be in two files: one written by the peer, one by `averaging watch`.
        groups[(receipt.group_id,) if receipt.group_id else alone].setdefault(receipt.endpoint, receipt)
    rounds = [Round(tuple(sorted(group.values(), key=lambda receipt: receipt.started))) for group in groups.values()]
    return sorted(rounds, key=lambda round_: round_.receipts[0].started)


def explain(receipts: Sequence[Receipt], *, summary_only: bool = False) -> Iterator[str]:
    """Yields printable lines about the receipts."""
    rounds = merge(receipts)
    peers = {receipt.endpoint for receipt in receipts}
    if not rounds:
        yield "no receipts: there was no round"
        return
    runs = sorted({receipt.run_id for receipt in receipts})
    begin, end = min(each.started for each in receipts), max(each.ended for each in receipts)
    yield printable(
        f"{'runs' if len(runs) > 1 else 'run'} {', '.join(runs)}, receipts of {listed(sorted(peers))}, "
        f"from {_moment(begin)} to {_moment(end)} UTC"
    )
    if not summary_only:
        yield from (describe(round_, peers) for round_ in rounds)
    yield from map(printable, _summary(rounds, peers))


def describe(round_: Round, peers: Iterable[str] = ()) -> str:
    """Returns one line about a round. If several `peers` have receipts, it says which of them its facts are from."""
    several = len(set(peers)) > 1
    first = round_.receipts[0]
    facts = [_result(round_)]
    if not first.members and several:
        facts.append(f"receipt of {first.endpoint}")
    facts += [
        f"{receipt.endpoint} {_how_it_failed(receipt)}"
        for receipt in round_.receipts
        if round_.outcome is Outcome.AVERAGED and not receipt.averaged
    ]
    facts += [_drop(round_, name, several) for name in round_.dropped]
    facts += [f"{name} has left the run" for name in sorted({n for receipt in round_.receipts for n in receipt.left})]
    if late := last_to_arrive(round_.receipts):
        facts.append(str(late))
    facts += [f"{account.endpoint} {account.lateness}" for account in first.accounts if account.lateness]
    if straggler := round_.straggler:
        facts.append(f"waited {straggler.seconds:.1f} s for the {straggler.what} of {straggler.endpoint}")
    facts += [
        f"{counted(receipt.kept_local, 'element')} kept the local value{_at(receipt, several)}"
        for receipt in round_.receipts
        if receipt.kept_local and receipt.averaged
    ]
    facts += [f"{receipt.clamped_text}{_at(receipt, several)}" for receipt in round_.receipts if receipt.clamped]
    facts += [f"DRIFT: {drift}" for drifts in round_.drift.values() for drift in drifts]
    if several and first.members:
        facts += _agreement(round_)
        missing = sorted((set(peers) & set(round_.members)) - {receipt.endpoint for receipt in round_.receipts})
        if missing:
            facts.append(f"no receipt of {listed(missing)}")
    return printable(f"{round_.name}: {'; '.join(facts)}")


def _result(round_: Round) -> str:
    first = round_.receipts[0]
    if round_.outcome is not Outcome.AVERAGED:
        return _how_it_failed(first)
    longest = max(round_.receipts, key=lambda receipt: receipt.seconds)
    return (
        f"{len(round_.present)} of {len(round_.members)} in {duration(longest.seconds)} "
        f"(all-reduce {duration(max(receipt.allreduce_seconds for receipt in round_.receipts))})"
    )


def _how_it_failed(receipt: Receipt) -> str:
    outcome = {Outcome.NO_GROUP: "no group", Outcome.CANCELLED: "cancelled"}.get(receipt.outcome, "failed")
    return f"{outcome} after {receipt.seconds:.1f} s: {receipt.reason or 'no reason given'}"


def _drop(round_: Round, name: str, several: bool) -> str:
    observers = round_.dropped[name]
    by = ""
    if several:
        reporters = {receipt.endpoint for receipt in round_.receipts} - {name}
        by = "" if reporters <= observers.keys() else f" by {listed(sorted(observers))}"
    reasons = list(dict.fromkeys(dropped.reason for dropped in observers.values()))
    more = "".join(f"; or {reason}" for reason in reasons[1:MAX_NAMES])
    return f"{name} dropped{by}, {reasons[0]}{more}"


def _agreement(round_: Round) -> list[str]:
    """Returns one item for each reducer whose averages differ between peers, and one if states differ."""
    differing = [
        f"DIFFERENT AVERAGES of {reducer}: "
        + ", ".join(f"{digest} at {listed(names)}" for digest, names in digests.items())
        for reducer, digests in round_.digests.items()
        if len(digests) > 1
    ]
    if len(round_.states) > 1:
        states = ", ".join(f"{digest} at {listed(names)}" for digest, names in round_.states.items())
        differing.append(f"DIFFERENT STATES: {states}")
    if round_.digests and not differing:
        return [f"all {len(_compared(round_.digests.values()))} agree"]
    return differing


def _compared(reports: Iterable[Mapping[str, Sequence[str]]]) -> set[str]:
    return {name for digests in reports for names in digests.values() for name in names}


def _summary(rounds: Sequence[Round], peers: set[str]) -> Iterator[str]:
    outcomes = Counter(round_.outcome for round_ in rounds)
    names = {outcome: outcome.value for outcome in Outcome} | {Outcome.NO_GROUP: "without a group"}
    counts = ", ".join(f"{outcomes[outcome]} {name}" for outcome, name in names.items() if outcomes[outcome])
    yield f"total of {counted(len(rounds), 'round')}: {counts}"
    yield from _summary_of_drops(rounds)
    yield from _summary_of_time(rounds)
    yield from _summary_of_drift(rounds)
    traffic = [(each.bytes_sent, each.bytes_received) for round_ in rounds for each in round_.receipts]
    sent, received = map(sum, zip(*traffic, strict=True))
    yield f"bytes: {size(sent)} sent, {size(received)} received"
    if len(peers) > 1:
        yield _summary_of_agreement("averages", [(round_, [*round_.digests.values()]) for round_ in rounds])
        yield _summary_of_agreement("states", [(round_, [round_.states]) for round_ in rounds])
        yield from _last_states(rounds)


def _last_states(rounds: Sequence[Round]) -> Iterator[str]:
    last = {receipt.endpoint: receipt.state for each in rounds for receipt in each.receipts if receipt.state}
    holders = _grouped((digest, name) for name, digest in last.items())
    if len(holders) > 1:
        held = "; ".join(f"{digest} at {listed(sorted(names))}" for digest, names in sorted(holders.items()))
        yield f"last states: DIFFERENT, by the last receipt of each: {held}"
    elif holders:
        yield f"last states: the same at all {len(last)} that say it"


def _summary_of_agreement(what: str, reports: Sequence[tuple[Round, list[dict[str, list[str]]]]]) -> str:
    """Returns a line about the rounds in which peers can be compared, by the endpoints of each digest."""
    compared = [(round_, digests) for round_, digests in reports if any(digests)]
    if not compared:
        return f"{what}: no round has receipts of several peers to compare"
    differing = sum(any(len(seen) > 1 for seen in digests) for _, digests in compared)
    verdict = f"DIFFERENT in {differing}" if differing else "the same in all"
    partly = sum(not round_.present <= _compared(digests) for round_, digests in compared)
    limits = f", {partly} of them only between some of the members" if partly else ""
    others = sum(round_.outcome is Outcome.AVERAGED and not any(digests) for round_, digests in reports)
    limits += f"; {others} cannot" if others else ""
    return f"{what}: {verdict} of {counted(len(compared), 'round')} that can be compared{limits}"


def _summary_of_drops(rounds: Sequence[Round]) -> Iterator[str]:
    codes: dict[str, Counter[str]] = defaultdict(Counter)
    for round_ in rounds:
        for name, observers in round_.dropped.items():
            codes[name][next(iter(observers.values())).code.value.replace("_", " ")] += 1
    for name, counts in sorted(codes.items(), key=lambda item: -item[1].total()):
        why = ", ".join(f"{code} {count}" for code, count in counts.most_common())
        yield f"dropped: {name} in {counted(counts.total(), 'round')} ({why})"
    if not codes:
        yield "dropped: none"


def _summary_of_drift(rounds: Sequence[Round]) -> Iterator[str]:
    first = _grouped((name, drift[0]) for round_ in rounds for name, drift in round_.drift.items())
    for name, drift in sorted(first.items(), key=lambda item: -len(item[1])):
        yield f"drift: {name} in {counted(len(drift), 'round')}, first: {drift[0]}"


def _summary_of_time(rounds: Sequence[Round]) -> Iterator[str]:
    phases = _grouped(item for round_ in rounds for receipt in round_.receipts for item in receipt.phases.items())
    whole = sum(map(sum, phases.values()))
    if whole > 0:
        slowest = max(phases, key=lambda phase: sum(phases[phase]))
        took = phases[slowest]
        yield (
            f"slowest phase: {slowest}, {duration(sum(took))} of {duration(whole)} ({sum(took) / whole:.0%}; "
            f"median {duration(statistics.median(took))})"
        )
    yield from describe_late([round_.receipts for round_ in rounds if round_.members])
    waits = _grouped((straggler.endpoint, straggler.seconds) for round_ in rounds if (straggler := round_.straggler))
    for name, waited in sorted(waits.items(), key=lambda item: -sum(item[1])):
        total = f"maximum {max(waited):.1f} s, total {sum(waited):.1f} s"
        yield f"straggler: {name} in {counted(len(waited), 'round')}, {total}"
        if _is_regular(len(waited), len(rounds)) and all(_has_full_share(round_, name) for round_ in rounds):
            yield (
                f"hint: {name} reduces as much as the others; if its link is slower, set `bandwidth` at every peer to "
                "that of its own link"
            )
    if not waits:
        yield "straggler: none in the all-reduce"


def _has_full_share(round_: Round, name: str) -> bool:
    """Whether no member is known to have reduced more than `name` in a round."""
    shares = [{account.endpoint: account.share for account in receipt.accounts} for receipt in round_.receipts]
    return all(share.get(name, 1.0) >= 0.99 * max(share.values(), default=0.0) for share in shares)


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "an impossible time"


def _at(receipt: Receipt, several: bool) -> str:
    return f" at {receipt.endpoint}" if several else ""
