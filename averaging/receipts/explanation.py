"""Explains receipts as text: one line per round and a summary. Receipts of several peers are merged. Pure."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from averaging.common import MAX_NAMES, counted, duration, listed, size
from averaging.errors import printable
from averaging.receipts.drift import Drift
from averaging.receipts.receipt import Dropped, LateArrival, Outcome, Receipt, Straggler, step_rate_text

# Finds members that arrive late at their groups regularly, and suggests remedies. Pure.


AS_FAST = 0.8
"""A peer is slow if its step rate is below this fraction of the others' median."""


def last_to_arrive(receipts: Iterable[Receipt]) -> LateArrival | None:
    """Returns the member that most receipts of one group name as the last, with the median of their seconds."""
    reports: dict[str, list[float]] = defaultdict(list)
    for receipt in receipts:
        late = receipt.last_to_arrive
        if late is not None and late.endpoint in receipt.members:
            reports[late.endpoint].append(late.seconds)
    if not reports:
        return None
    name = max(reports, key=lambda name: (len(reports[name]), max(reports[name])))
    return LateArrival(name, statistics.median(reports[name]))


def describe_late(rounds: Sequence[Sequence[Receipt]]) -> Iterator[str]:
    """Yields lines about late arrivals and their remedies.

    Args:
        rounds: the receipts of each round.
    """
    late: dict[str, list[float]] = defaultdict(list)
    for receipts in rounds:
        if last := last_to_arrive(receipts):
            late[last.endpoint].append(last.seconds)
    for name, seconds in sorted(late.items(), key=lambda item: -sum(item[1]))[:MAX_NAMES]:
        there = [receipts for receipts in rounds if any(name in receipt.members for receipt in receipts)]
        line = f"last to arrive: {name} in {len(seconds)} of {counted(len(there), 'round')}"
        line += f", {duration(statistics.median(seconds))} after the others (median), total {duration(sum(seconds))}"
        if share := _share(rounds, name):
            line += f", {share:.0%} of the time of the others"
        yield line
        if _is_regular(len(seconds), len(there)):
            yield from _why(there, name)
    alone = [name for name in _slow_and_last(rounds) if name not in late]
    for name in alone:
        yield f"last to arrive: {name} according to its own receipts, which do not show how long the others waited"
        yield from _why(rounds, name)
    if not late and not alone:
        yield "last to arrive: no peer regularly"


def _is_regular(count: int, rounds: int) -> bool:
    return count >= 2 and 2 * count >= rounds


def _slow_and_last(rounds: Sequence[Sequence[Receipt]]) -> list[str]:
    """Returns slow peers that were the last to look for a group in most of their rounds.

    Being last is not enough: peers of equal speed are sometimes last by chance.
    """
    there: Counter[str] = Counter()
    last: Counter[str] = Counter()
    for receipts in rounds:
        for receipt in receipts:
            others = [one for one in receipt.accounts if one.endpoint != receipt.endpoint and one.mode == "node"]
            there[receipt.endpoint] += 1
            last[receipt.endpoint] += bool(others) and all(one.waited is None for one in others)
    rates = _rates(rounds)
    return [name for name, count in last.items() if _is_regular(count, there[name]) and _is_slow(name, rates)]


def _is_slow(name: str, rates: Mapping[str, float]) -> bool:
    """Whether the step rate of a peer is known to be clearly below the median of the others."""
    others = [rate for other, rate in rates.items() if other != name]
    return name in rates and bool(others) and rates[name] < AS_FAST * statistics.median(others)


def _share(rounds: Sequence[Sequence[Receipt]], name: str) -> float:
    """Fraction of the other peers' time in which they waited for `name` alone; 0 if unknown."""
    waited = 0.0
    begin: dict[str, float] = {}
    end: dict[str, float] = {}
    for receipts in rounds:
        last = last_to_arrive(receipts)
        for receipt in receipts:
            if receipt.endpoint == name:
                continue
            begin[receipt.endpoint] = min(receipt.started, begin.get(receipt.endpoint, receipt.started))
            ended = receipt.started + receipt.seconds
            end[receipt.endpoint] = max(ended, end.get(receipt.endpoint, ended))
            if last is not None and last.endpoint == name:
                waited += last.seconds
    whole = sum(end[peer] - began for peer, began in begin.items())
    return min(1.0, waited / whole) if whole > 0 else 0.0


def _why(rounds: Sequence[Sequence[Receipt]], name: str) -> Iterator[str]:
    """Yields the step rates of a late peer and the others, if known, and a hint."""
    rates = _rates(rounds)
    others = [rate for other, rate in rates.items() if other != name]
    topic = Counter(receipts[0].topic.partition("/")[0] for receipts in rounds).most_common(1)[0][0]
    if name not in rates or not others:
        yield f"hint: {_remedy(name, topic, '')}"
        return
    own, median = rates[name], statistics.median(others)
    yield f"step rate: {name} {step_rate_text(own, topic)}, the others {step_rate_text(median, topic)} (median)"
    if _is_slow(name, rates):
        yield f"hint: {_remedy(name, topic, f', about {own / median:.2g} times as many as the others make')}"
    else:
        yield (
            f"hint: {name} is as fast as the others; it may make more local steps between rounds, or stop for "
            "evaluations and checkpoints"
        )


def _remedy(name: str, topic: str, count: str) -> str:
    """Returns remedies for a slow peer.

    Args:
        name: the peer.
        topic: what is averaged, without its phase. It shows which strategy is used.
        count: text about the number of local steps that it should make; empty if unknown.
    """
    if topic == "gradients":
        return (
            f"the others wait for one batch of {name}; use a smaller batch_size there, or a larger "
            "target_batch_size at all peers"
        )
    remedies = [
        f"use fewer local steps between rounds (sync_every=) at {name}{count}",
        "or a smaller batch",
        "or use GradientAveraging, in which unequal peers share a batch",
    ]
    if not topic.startswith("pseudogradient"):  # DiLoCo needs all peers in one group
        remedies.insert(2, "or set a smaller group_size at all peers, so that groups begin without it")
    return "; ".join(remedies)


def _rates(rounds: Sequence[Sequence[Receipt]]) -> dict[str, float]:
    """Median step rate of each peer that announced one."""
    rates: dict[str, list[float]] = defaultdict(list)
    for receipts in rounds:
        for receipt in receipts:
            for account in receipt.accounts:
                if account.step_rate is not None:
                    rates[account.endpoint].append(account.step_rate)
    return {name: statistics.median(found) for name, found in rates.items()}


@dataclass(frozen=True, slots=True)
class Round:
    """One round, from the receipts of all its peers that are available.

    Attributes:
        receipts: one per peer of the same group; a single one if no group was found.
    """

    receipts: tuple[Receipt, ...]

    @property
    def name(self) -> str:
        """For example `round 17`, or `round 3/17 of TOPIC`, since peers that joined later count from another round."""
        topic = self.receipts[0].topic
        numbers = sorted({receipt.round for receipt in self.receipts})
        return f"round {'/'.join(map(str, numbers))}" + (f" of {topic}" if topic else "")

    @property
    def members(self) -> tuple[str, ...]:
        """The group; empty without one."""
        return self.receipts[0].members

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
            for one in receipt.dropped:
                reports[one.endpoint][receipt.endpoint] = one
        reporters = {receipt.endpoint for receipt in self.receipts}
        lost = {name for name, by in reports.items() if 2 * len(by) > len(reporters - {name})}
        credible = {name: {who: one for who, one in by.items() if who not in lost} for name, by in reports.items()}
        return {name: by for name, by in credible.items() if by} or dict(reports)

    @property
    def straggler(self) -> Straggler | None:
        """The longest wait for a member. Late parts take precedence, because they may cause late averages."""
        found = [receipt.straggler for receipt in self.receipts if receipt.straggler is not None]
        found = [one for one in found if one.endpoint not in self.dropped]
        return max(found, key=lambda one: (one.what == "parts", one.seconds), default=None)

    @property
    def drift(self) -> dict[str, list[Drift]]:
        """What differs at which peers although it should not, by endpoint, but for rounding."""
        found: dict[str, list[Drift]] = defaultdict(list)
        for one in dict.fromkeys(drift for receipt in self.receipts for drift in receipt.drifted):
            if all((one.kind, one.name) != (other.kind, other.name) for other in found[one.endpoint]):
                found[one.endpoint].append(one)
        return dict(found)

    @property
    def states(self) -> dict[str, list[str]]:
        """Endpoints by state digest, which must be the same at all members; empty unless two peers have a digest."""
        found: dict[str, list[str]] = defaultdict(list)
        for receipt in self.receipts:
            if receipt.state:
                found[receipt.state].append(receipt.endpoint)
        return dict(found) if sum(map(len, found.values())) > 1 else {}

    @property
    def digests(self) -> dict[str, dict[str, list[str]]]:
        """For each reducer with a digest at two peers or more: the endpoints by digest of its averages."""
        reducers: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for receipt in self.receipts:
            for account in receipt.accounts:
                if account.digest:
                    reducers[account.endpoint][account.digest].append(receipt.endpoint)
        return {name: dict(found) for name, found in reducers.items() if sum(map(len, found.values())) > 1}


def merge(receipts: Iterable[Receipt]) -> list[Round]:
    """Returns the rounds of receipts, which may have any order, sorted by their start."""
    groups: dict[tuple[object, ...], dict[str, Receipt]] = defaultdict(dict)
    for receipt in receipts:
        alone = (receipt.endpoint, receipt.round, receipt.started)
        # The same receipt may be in two files: one written by the peer, one by `averaging watch`.
        groups[(receipt.group_id,) if receipt.group_id else alone].setdefault(receipt.endpoint, receipt)
    rounds = [Round(tuple(sorted(found.values(), key=_began))) for found in groups.values()]
    return sorted(rounds, key=lambda one: _began(one.receipts[0]))


def explain(receipts: Sequence[Receipt], *, summary_only: bool = False) -> Iterator[str]:
    """Yields printable lines about the receipts."""
    rounds = merge(receipts)
    peers = {receipt.endpoint for receipt in receipts}
    if not rounds:
        yield "no receipts: there was no round"
        return
    yield printable(_header(rounds, peers))
    if not summary_only:
        for one in rounds:
            yield describe(one, peers)
    yield from map(printable, _summary(rounds, peers))


def describe(one: Round, peers: Iterable[str] = ()) -> str:
    """Returns one line about a round.

    Args:
        one: the round.
        peers: all peers with receipts. If there are several, the line says which peers its facts are from.
    """
    several = len(set(peers)) > 1
    first = one.receipts[0]
    facts = [_result(one)]
    if not first.members and several:
        facts.append(f"receipt of {first.endpoint}")
    facts += [
        f"{receipt.endpoint} {_how_it_failed(receipt)}"
        for receipt in one.receipts
        if one.outcome is Outcome.AVERAGED and not receipt.averaged
    ]
    facts += [_drop(one, name, several) for name in one.dropped]
    if late := last_to_arrive(one.receipts):
        facts.append(str(late))
    if straggler := one.straggler:
        facts.append(f"waited {straggler.seconds:.1f} s for the {straggler.what} of {straggler.endpoint}")
    facts += [
        f"{counted(receipt.kept_local, 'element')} kept the local value{_at(receipt, several)}"
        for receipt in one.receipts
        if receipt.kept_local and receipt.averaged
    ]
    facts += [f"DRIFT: {one}" for found in one.drift.values() for one in found]
    if several and first.members:
        facts += _agreement(one)
        missing = sorted((set(peers) & set(one.members)) - {receipt.endpoint for receipt in one.receipts})
        if missing:
            facts.append(f"no receipt of {listed(missing)}")
    return printable(f"{one.name}: {'; '.join(facts)}")


def _result(one: Round) -> str:
    first = one.receipts[0]
    if one.outcome is not Outcome.AVERAGED:
        return _how_it_failed(first)
    here = len(one.members) - len(one.dropped)
    longest = max(one.receipts, key=lambda receipt: receipt.seconds)
    return (
        f"{here} of {len(one.members)} in {duration(longest.seconds)} "
        f"(all-reduce {duration(max(receipt.allreduce_seconds for receipt in one.receipts))})"
    )


def _how_it_failed(receipt: Receipt) -> str:
    outcome = {Outcome.NO_GROUP: "no group", Outcome.CANCELLED: "cancelled"}.get(receipt.outcome, "failed")
    return f"{outcome} after {receipt.seconds:.1f} s: {receipt.reason or 'no reason given'}"


def _drop(one: Round, name: str, several: bool) -> str:
    observers = one.dropped[name]
    by = ""
    if several:
        reporters = {receipt.endpoint for receipt in one.receipts} - {name}
        by = "" if reporters <= observers.keys() else f" by {listed(sorted(observers))}"
    reasons = list(dict.fromkeys(dropped.reason for dropped in observers.values()))
    more = "".join(f"; or {reason}" for reason in reasons[1:MAX_NAMES])
    return f"{name} dropped{by}, {reasons[0]}{more}"


def _agreement(one: Round) -> list[str]:
    """Returns one item for each reducer whose averages differ between peers, and one if states differ."""
    differing = [
        f"DIFFERENT AVERAGES of {reducer}: "
        + ", ".join(f"{digest} at {listed(names)}" for digest, names in found.items())
        for reducer, found in one.digests.items()
        if len(found) > 1
    ]
    if len(one.states) > 1:
        states = ", ".join(f"{digest} at {listed(names)}" for digest, names in one.states.items())
        differing.append(f"DIFFERENT STATES: {states}")
    if one.digests and not differing:
        return [f"all {len({name for found in one.digests.values() for who in found.values() for name in who})} agree"]
    return differing


def _header(rounds: Sequence[Round], peers: Iterable[str]) -> str:
    receipts = [receipt for one in rounds for receipt in one.receipts]
    runs = sorted({receipt.run_id for receipt in receipts})
    begin, end = min(map(_began, receipts)), max(receipt.started + receipt.seconds for receipt in receipts)
    whose = f"{'runs' if len(runs) > 1 else 'run'} {', '.join(runs)}"
    return f"{whose}, receipts of {listed(sorted(peers))}, from {_moment(begin)} to {_moment(end)} UTC"


def _summary(rounds: Sequence[Round], peers: set[str]) -> Iterator[str]:
    outcomes = Counter(one.outcome for one in rounds)
    names = {
        Outcome.AVERAGED: "averaged",
        Outcome.NO_GROUP: "without a group",
        Outcome.FAILED: "failed",
        Outcome.CANCELLED: "cancelled",
    }
    counts = ", ".join(f"{outcomes[outcome]} {name}" for outcome, name in names.items() if outcomes[outcome])
    yield f"total of {counted(len(rounds), 'round')}: {counts}"
    yield from _summary_of_drops(rounds)
    yield from _summary_of_time(rounds)
    yield from _summary_of_drift(rounds)
    receipts = [receipt for one in rounds for receipt in one.receipts]
    sent, received = sum(one.bytes_sent for one in receipts), sum(one.bytes_received for one in receipts)
    yield f"bytes: {size(sent)} sent, {size(received)} received"
    if len(peers) > 1:
        averages = [any(len(found) > 1 for found in one.digests.values()) for one in rounds if one.digests]
        yield _summary_of_agreement("averages", averages)
        yield _summary_of_agreement("states", [len(one.states) > 1 for one in rounds if one.states])


def _summary_of_agreement(what: str, differing: Sequence[bool]) -> str:
    """Returns a line about the rounds in which peers can be compared; `differing` has whether they differ in each."""
    if not differing:
        return f"{what}: no round has receipts of several peers to compare"
    verdict = f"DIFFERENT in {sum(differing)}" if any(differing) else "the same in all"
    return f"{what}: {verdict} of {counted(len(differing), 'round')} that can be compared"


def _summary_of_drops(rounds: Sequence[Round]) -> Iterator[str]:
    codes: dict[str, Counter[str]] = defaultdict(Counter)
    for one in rounds:
        for name, observers in one.dropped.items():
            codes[name][next(iter(observers.values())).code.value.replace("_", " ")] += 1
    for name, found in sorted(codes.items(), key=lambda item: -item[1].total()):
        why = ", ".join(f"{code} {count}" for code, count in found.most_common())
        yield f"dropped: {name} in {counted(found.total(), 'round')} ({why})"
    if not codes:
        yield "dropped: none"


def _summary_of_drift(rounds: Sequence[Round]) -> Iterator[str]:
    found: dict[str, list[Drift]] = defaultdict(list)
    for one in rounds:
        for name, drift in one.drift.items():
            found[name].append(drift[0])
    for name, drift in sorted(found.items(), key=lambda item: -len(item[1])):
        yield f"drift: {name} in {counted(len(drift), 'round')}, first: {drift[0]}"


def _summary_of_time(rounds: Sequence[Round]) -> Iterator[str]:
    phases: dict[str, list[float]] = defaultdict(list)
    for one in rounds:
        for receipt in one.receipts:
            for phase, seconds in receipt.phases.items():
                phases[phase].append(seconds)
    whole = sum(map(sum, phases.values()))
    if whole > 0:
        slowest = max(phases, key=lambda phase: sum(phases[phase]))
        took = phases[slowest]
        yield (
            f"slowest phase: {slowest}, {duration(sum(took))} of {duration(whole)} ({sum(took) / whole:.0%}; "
            f"median {duration(statistics.median(took))})"
        )
    yield from describe_late([one.receipts for one in rounds if one.members])
    waits: dict[str, list[float]] = defaultdict(list)
    for one in rounds:
        if straggler := one.straggler:
            waits[straggler.endpoint].append(straggler.seconds)
    for name, held in sorted(waits.items(), key=lambda item: -sum(item[1])):
        yield (
            f"straggler: {name} in {counted(len(held), 'round')}, maximum {max(held):.1f} s, total {sum(held):.1f} s"
        )
        if len(held) >= 2 and 2 * len(held) >= len(rounds) and all(_has_full_share(one, name) for one in rounds):
            yield (
                f"hint: {name} reduces as much as the others; if its link is slower, set `bandwidth` at every peer to "
                "that of its own link"
            )
    if not waits:
        yield "straggler: none in the all-reduce"


def _has_full_share(one: Round, name: str) -> bool:
    """Whether no member is known to have reduced more than `name` in a round."""
    shares = [{account.endpoint: account.share for account in receipt.accounts} for receipt in one.receipts]
    return all(found.get(name, 1.0) >= 0.99 * max(found.values(), default=0.0) for found in shares)


def _began(receipt: Receipt) -> float:
    return receipt.started


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "an impossible time"


def _at(receipt: Receipt, several: bool) -> str:
    return f" at {receipt.endpoint}" if several else ""
