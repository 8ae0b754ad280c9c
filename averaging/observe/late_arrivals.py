"""Finds members that arrive late at their groups regularly, and suggests remedies. Pure."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from averaging.common.sanitize import MAX_NAMES, counted, duration
from averaging.observe.receipts import LateArrival, Receipt, step_rate_text

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
        f"use fewer local steps between rounds (every=) at {name}{count}",
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
