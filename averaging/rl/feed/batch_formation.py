"""Selects the groups of the next batch from the queue. Pure.

The sums that a set of sizes can reach are the bits of one integer: bit `n` is set if some of the sizes add up to `n`.
Adding a size to the set is then one shift.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache


def reachable(counts: Mapping[int, int], target: int) -> int:
    """Returns the sums up to `target` of some of the groups, given as number of groups by size."""
    mask, sums = (2 << target) - 1, 1
    for size, count in sorted(counts.items()):
        # Groups of one size are added together, by powers of two.
        left, part = min(count, target // size), 1
        while left > 0:
            part = min(part, left)
            sums |= sums << size * part & mask
            left -= part
            part *= 2
    return sums


@lru_cache
def can_fill(sizes: frozenset[int], target: int) -> bool:
    return bool(reachable({size: target // size for size in sizes}, target) >> target)


def exact_sum(sizes: Sequence[int], target: int) -> list[int] | None:
    """Returns the ascending indices of sizes that add up to `target`, or None.

    The indices lie in the shortest prefix of `sizes` that contains such a set. Within it, earlier ones are preferred.
    """
    mask, sums = (2 << target) - 1, 1
    useful: list[int] = []
    seen: Counter[int] = Counter()
    for index, size in enumerate(sizes):
        if sums >> target:
            break
        seen[size] += 1
        if seen[size] * size <= target:  # a sum holds no more of one size
            useful.append(index)
            sums |= sums << size & mask
    if not sums >> target:
        return None
    behind = [1]  # the sums of the groups from each one on, the last one first
    for index in reversed(useful):
        behind.append(behind[-1] | behind[-1] << sizes[index] & mask)
    picked = []
    for index in useful:
        behind.pop()
        # A group is taken if those behind it can make the rest.
        if sizes[index] <= target and behind[-1] >> (target - sizes[index]) & 1:
            picked.append(index)
            target -= sizes[index]
    return picked


def form_batch(
    sizes: Sequence[int], envs: Sequence[int | None], target: int, reserved: Mapping[int, int]
) -> list[int] | None:
    """Returns the ascending indices of the groups in the next batch, or None if no batch can be formed.

    Args:
        sizes: sequences of each group in the queue, oldest group first.
        envs: the environment of each group.
        target: sequences of a batch.
        reserved: sequences of the batch that are reserved for each environment. If an environment has fewer in
            the queue, there is no batch. If its groups do not add up to its reservation, it gets the next larger number
            of sequences that fits, otherwise the next smaller one.
    """
    if not reserved:
        return exact_sum(sizes, target)
    queued: dict[int, list[int]] = {env: [] for env in reserved}
    others: Counter[int] = Counter()
    for index, env in enumerate(envs):
        if env is None or env not in queued:
            others[sizes[index]] += 1
        else:
            queued[env].append(index)
    if any(sum(sizes[index] for index in queued[env]) < count for env, count in reserved.items()):
        return None
    # The environment with the oldest group comes first, so that no environment always comes last.
    order = sorted((env for env in reserved if queued[env]), key=lambda env: queued[env][0])
    sums = {env: reachable(Counter(sizes[index] for index in queued[env]), target) for env in order}
    at_least = {env: sums[env] >> reserved[env] << reserved[env] for env in order}
    smallest = {env: (at_least[env] & -at_least[env]).bit_length() - 1 for env in order}  # -1: nothing fits
    if min(smallest.values(), default=0) >= 0 and (picked := _fill(sizes, queued, smallest, target)) is not None:
        return picked
    # Next, larger numbers that keep all reservations. Only if there are none, a reservation may be cut.
    for possible in (at_least, sums):
        allocation = _allocate(possible, reserved, reachable(others, target), target)
        if allocation is not None:
            return _fill(sizes, queued, allocation, target)
    return None


def reservations(batch_size: int, fractions: Mapping[int, float]) -> dict[int, int]:
    """Returns the sequences of a batch reserved for each environment. Fractions with a sum above 1 are scaled down."""
    wanted = {env: int(batch_size * fraction) for env, fraction in fractions.items()}
    total = max(batch_size, sum(wanted.values()))
    return {env: count for env, want in wanted.items() if (count := want * batch_size // total) > 0}


def _fill(
    sizes: Sequence[int], queued: Mapping[int, list[int]], allocation: Mapping[int, int], target: int
) -> list[int] | None:
    """Picks the oldest groups of each environment for its allocation, and the oldest others that fill up the batch."""
    picked: set[int] = set()
    for env, count in allocation.items():
        picked.update(queued[env][index] for index in exact_sum([sizes[index] for index in queued[env]], count) or ())
    left = [index for index in range(len(sizes)) if index not in picked]
    rest = target - sum(allocation.values())
    filling = exact_sum([sizes[index] for index in left], rest) if rest >= 0 else None
    return None if filling is None else sorted(picked.union(left[index] for index in filling))


def _allocate(
    possible: Mapping[int, int], reserved: Mapping[int, int], others: int, target: int
) -> dict[int, int] | None:
    """Chooses one possible sum for each environment so that the others can fill up the batch; None if they cannot."""
    mask = (2 << target) - 1
    reach = [others]  # the sums of the others, then of the others and the last environment, and so on
    for sums in reversed([*possible.values()]):
        combined = 0
        for number in _elements(sums):
            combined |= reach[-1] << number & mask
        reach.append(combined)
    if not reach.pop() >> target & 1:
        return None
    allocation = {}
    for env, sums in possible.items():
        behind = reach.pop()
        fits = [number for number in _elements(sums) if number <= target and behind >> (target - number) & 1]
        allocation[env] = next((number for number in fits if number >= reserved[env]), fits[-1])
        target -= allocation[env]
    return allocation


def _elements(sums: int) -> list[int]:
    return [number for number, bit in enumerate(bin(sums)[:1:-1]) if bit == "1"]
