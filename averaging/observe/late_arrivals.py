"""Members that arrive late at their groups, round after round, and what can be done about it. Pure."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from averaging.common.sanitize import MAX_NAMES, counted, duration
from averaging.observe.receipts import LateArrival, Receipt, step_rate_text

AS_FAST = 0.8
"""A peer whose step rate is at least such a fraction of the others' is not late because of its steps."""


def last_to_arrive(receipts: Iterable[Receipt]) -> LateArrival | None:
    """Who arrived last at one group, by most of its receipts; and how much later, by the median of these."""
    told: dict[str, list[float]] = defaultdict(list)
    for receipt in receipts:
        late = receipt.last_to_arrive
        if late is not None and late.endpoint in receipt.members:
            told[late.endpoint].append(late.seconds)
    if not told:
        return None
    name = max(told, key=lambda name: (len(told[name]), max(told[name])))
    return LateArrival(name, statistics.median(told[name]))


def describe_late(rounds: Sequence[Sequence[Receipt]]) -> Iterator[str]:
    """What is to be said of late arrivals in several rounds.

    Args:
        rounds: the receipts of each.
    """
    late: dict[str, list[float]] = defaultdict(list)
    for receipts in rounds:
        if last := last_to_arrive(receipts):
            late[last.endpoint].append(last.seconds)
    for name, seconds in sorted(late.items(), key=lambda item: -sum(item[1]))[:MAX_NAMES]:
        there = [receipts for receipts in rounds if any(name in receipt.members for receipt in receipts)]
        told = f"last to arrive: {name} in {len(seconds)} of {counted(len(there), 'round')}"
        told += f", {duration(statistics.median(seconds))} after the others (median), {duration(sum(seconds))} in all"
        if share := _share(rounds, name):
            told += f", {share:.0%} of the time of the others"
        yield told
        if _is_regular(len(seconds), len(there)):
            yield from _why(there, name)
    alone = [name for name in _slow_and_last(rounds) if name not in late]
    for name in alone:
        yield f"last to arrive: {name}, by its own receipts, which cannot tell how long the others waited"
        yield from _why(rounds, name)
    if not late and not alone:
        yield "last to arrive: nobody stands out"


def _is_regular(count: int, rounds: int) -> bool:
    return count >= 2 and 2 * count >= rounds


def _slow_and_last(rounds: Sequence[Sequence[Receipt]]) -> list[str]:
    """Peers with a lower step rate than the others that found all others looking already in most of their rounds.

    Peers of equal speed find that, too, when they happen to be the last, so that alone says nothing.
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
    """Whether the step rate of a peer is known to be lower than that of the others, of whom the median counts."""
    others = [rate for other, rate in rates.items() if other != name]
    return name in rates and bool(others) and rates[name] < AS_FAST * statistics.median(others)


def _share(rounds: Sequence[Sequence[Receipt]], name: str) -> float:
    """The fraction of their time for which groups of the other peers waited for `name` alone; 0 if nothing is known."""
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
    """Its step rate beside that of the others, if both are known, and what to do."""
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
            f"hint: the steps of {name} are as fast as those of the others; it may make more of them between rounds, "
            "or stop for evaluations and checkpoints"
        )


def _remedy(name: str, topic: str, count: str) -> str:
    """What to do about a slow peer.

    Args:
        name: the peer.
        topic: what is averaged, without its phase; it tells the strategy.
        count: how many local steps it should make, in words, if that is known.
    """
    if topic == "gradients":
        return (
            f"the others wait for one batch of {name}; give it a smaller batch_size, or all peers a larger "
            "target_batch_size, of which its batch is a smaller part"
        )
    remedies = [
        f"give {name} fewer local steps between rounds (every=){count}",
        "or a smaller batch",
        "or use GradientAveraging, in which unequal peers share a batch",
    ]
    if not topic.startswith("pseudogradient"):  # DiLoCo needs all peers in one group
        remedies.insert(2, "or give all peers a group_size with which groups begin without it")
    return "; ".join(remedies)


def _rates(rounds: Sequence[Sequence[Receipt]]) -> dict[str, float]:
    """The step rate of each peer that announced one: the median of what the receipts tell."""
    told: dict[str, list[float]] = defaultdict(list)
    for receipts in rounds:
        for receipt in receipts:
            for account in receipt.accounts:
                if account.step_rate is not None:
                    told[account.endpoint].append(account.step_rate)
    return {name: statistics.median(found) for name, found in told.items()}
