"""Selects the groups of the next batch from the queue. Pure.

The sums that a set of sizes can reach are the bits of one integer: bit `n` is set if some of the sizes add up to `n`.
Adding a size to the set is then one shift. Groups of one size are added together, by powers of two, so the time depends
on the number of different sizes and not on that of the groups, and only a few such integers exist at one time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

MAX_SEARCH = 1 << 22
"""Limit of environments with a reservation times sequences of a batch, up to which all allocations are searched.

The search takes 1 s at this limit."""

Bits = NDArray[np.bool_]


def reachable(counts: Mapping[int, int], target: int, sums: int = 1) -> int:
    """Returns the sums up to `target` of one element of `sums` and some of the groups.

    Args:
        counts: number of groups by size.
        target: the largest sum that matters.
        sums: bit `n` is set if `n` is a sum already.
    """
    mask = (2 << target) - 1
    sums &= mask
    for size, count in sorted(counts.items()):
        left, part = min(count, target // size), 1
        while left > 0:
            part = min(part, left)
            sums |= sums << size * part & mask
            left -= part
            part *= 2
    return sums


@lru_cache
def can_fill(sizes: frozenset[int], target: int) -> bool:
    """Returns whether any number of groups of these sizes can add up to `target`."""
    return bool(reachable({size: target // size for size in sizes}, target) >> target)


def exact_sum(sizes: Sequence[int], target: int) -> list[int] | None:
    """Returns the ascending indices of sizes that add up to `target`, or None.

    The indices lie in the shortest prefix of `sizes` that contains such a set. Within it, earlier ones are preferred.
    """
    useful = _useful(sizes, target)
    end = _shortest_prefix([sizes[index] for index in useful], target)
    if end is None:
        return None
    picked: list[int] = []
    _pick(sizes, useful[:end], target, 1, picked, set())
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
            of sequences that fits, otherwise the next smaller one. Beyond `MAX_SEARCH`, if the groups do not
            fit together so, the oldest groups form the batch.
    """
    if not reserved:
        return exact_sum(sizes, target)
    queued: dict[int, list[int]] = {env: [] for env in reserved}
    others: list[int] = []
    for index, env in enumerate(envs):
        (others if env is None or env not in queued else queued[env]).append(index)
    if any(sum(sizes[index] for index in queued[env]) < count for env, count in reserved.items()):
        return None
    # The environment with the oldest group comes first, so that no environment always comes last.
    order = sorted((env for env in reserved if queued[env]), key=lambda env: queued[env][0])
    sums = {env: reachable(Counter(sizes[index] for index in queued[env]), target) for env in order}
    at_least = {env: sums[env] >> reserved[env] << reserved[env] for env in order}
    smallest = {env: (at_least[env] & -at_least[env]).bit_length() - 1 for env in order}  # -1: nothing fits
    if min(smallest.values(), default=0) >= 0 and (picked := _fill(sizes, queued, smallest, target)) is not None:
        return picked
    if len(order) * target > MAX_SEARCH:
        return exact_sum(sizes, target)
    others_sums = reachable(Counter(sizes[index] for index in others), target)
    # Next, larger numbers that keep all reservations. Only if there are none, a reservation may be cut.
    for possible in (at_least, sums):
        if (allocation := _allocate(possible, reserved, others_sums, target)) is not None:
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
    bits = {env: _bits(sums, target) for env, sums in possible.items()}
    reach = [_bits(others, target)]  # the sums of the others, then of the others and the last environment, and so on
    for sums in reversed([*bits.values()]):
        reach.append(_combine(sums, reach[-1]))
    if not reach.pop()[target]:
        return None
    allocation = {}
    for env, sums in bits.items():
        fits = np.flatnonzero(sums[: target + 1] & reach.pop()[target::-1])
        enough = fits[fits >= reserved[env]]
        allocation[env] = int(enough[0] if len(enough) else fits[-1])
        target -= allocation[env]
    return allocation


def _useful(sizes: Sequence[int], target: int) -> list[int]:
    """Returns the indices of sizes without those that never help: a sum holds at most `target // size` of one size."""
    seen: Counter[int] = Counter()
    useful = []
    for index, size in enumerate(sizes):
        seen[size] += 1
        if seen[size] * size <= target:
            useful.append(index)
    return useful


def _shortest_prefix(sizes: Sequence[int], target: int) -> int | None:
    """Returns the length of the shortest prefix in which some sizes add up to `target`."""
    # Shorter prefixes have a smaller total.
    low = next((end for end, total in enumerate(accumulate(sizes, initial=0)) if total >= target), None)
    if low is None:
        return None
    sums = reachable(Counter(sizes[:low]), target)
    if sums >> target:
        return low
    step = 1
    while True:  # the prefix of length `low` has no such set; first the step doubles, then it is halved
        high = min(low + step, len(sizes))
        further = reachable(Counter(sizes[low:high]), target, sums)
        if further >> target:
            break
        if high == len(sizes):
            return None
        low, sums, step = high, further, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        further = reachable(Counter(sizes[low:middle]), target, sums)
        if further >> target:
            high = middle
        else:
            low, sums = middle, further
    return high


def _pick(
    sizes: Sequence[int], indices: Sequence[int], target: int, after: int, picked: list[int], rejected: set[int]
) -> int:
    """Adds to `picked` the first indices, in lexicographic order, that add up to an element of `target - after`.

    If a size is rejected once, it is rejected ever after: a later solution with it could have taken the earlier index.
    So most ranges are taken or skipped as a whole, and only those with a rejection are divided.

    Args:
        sizes: all sizes.
        indices: ascending indices of `sizes` to choose from.
        target: the sum that these and later indices must reach.
        after: the sums of the sizes behind `indices`.
        picked: receives the chosen indices.
        rejected: the sizes that were rejected; more are added.

    Returns:
        The rest of `target`.
    """
    usable = [index for index in indices if sizes[index] <= target and sizes[index] not in rejected]
    total = sum(sizes[index] for index in usable)
    if total <= target and after >> (target - total) & 1:
        picked += usable
        return target - total
    if len(usable) == 1:
        rejected.add(sizes[usable[0]])
    if len(usable) <= 1:
        return target
    middle = len(usable) // 2
    between = reachable(Counter(sizes[index] for index in usable[middle:]), target, after)
    target = _pick(sizes, usable[:middle], target, between, picked, rejected)
    return _pick(sizes, usable[middle:], target, after, picked, rejected)


def _bits(sums: int, target: int) -> Bits:
    """Returns an array of `target + 1` truth values, of which number `n` says whether `n` is among the sums."""
    packed = np.frombuffer(sums.to_bytes(target // 8 + 1, "little"), np.uint8)
    return np.unpackbits(packed, count=target + 1, bitorder="little").astype(np.bool_)


def _combine(some: Bits, others: Bits) -> Bits:
    """Returns the sums of one element of `some` and one of `others`, as long as the two arrays."""
    length = 1 << (2 * len(some) - 1).bit_length()
    ways = np.fft.irfft(np.fft.rfft(some, length) * np.fft.rfft(others, length), length)
    return ways[: len(some)] > 0.5
