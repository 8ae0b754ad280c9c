"""Selects the groups of the next batch from the queue. Pure.

The sums that a set of sizes can reach are the bits of one integer: bit `n` is set if some of the sizes add up to `n`.
Adding a size to the set is then one shift.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def exact_sum(sizes: Sequence[int], target: int) -> list[int] | None:
    """Returns the ascending indices of sizes that add up to `target`, or None.

    The indices lie in the shortest prefix of `sizes` that contains such a set. Within it, earlier ones are preferred.
    """
    end = _shortest_prefix(sizes, target)
    if end is None:
        return None
    suffix_sums = [1]  # suffix_sums[n]: the sums of the last n sizes of the prefix
    for size in reversed(sizes[:end]):
        suffix_sums.append(_add(suffix_sums[-1], size, target))
    picked = []
    for index in range(end):
        rest = target - sizes[index]
        if rest >= 0 and suffix_sums[end - index - 1] >> rest & 1:
            picked.append(index)
            target = rest
    return picked


def form_batch(
    sizes: Sequence[int], envs: Sequence[int | None], target: int, reserved: Mapping[int, int]
) -> list[int] | None:
    """Returns the ascending indices of the groups in the next batch, or None if no batch can be formed.

    Args:
        sizes: sequences of each group in the queue, oldest group first.
        envs: the environment of each group.
        target: sequences of a batch.
        reserved: by environment, the sequences of the batch that are reserved for it. If an environment has fewer in
            the queue, there is no batch. If its groups do not add up to its reservation, it gets the next larger number
            of sequences that fits, otherwise the next smaller one.
    """
    if not reserved:
        return exact_sum(sizes, target)
    own: dict[int, list[int]] = {env: [] for env in reserved}
    others: list[int] = []
    for index, env in enumerate(envs):
        (others if env is None or env not in own else own[env]).append(index)
    if any(sum(sizes[index] for index in own[env]) < count for env, count in reserved.items()):
        return None
    # The environment with the oldest group comes first, so that no environment always comes last.
    order = sorted((env for env in reserved if own[env]), key=lambda env: own[env][0])
    sums = {env: _sums((sizes[index] for index in own[env]), target) for env in order}
    at_least = {env: sums[env] >> reserved[env] << reserved[env] for env in order}
    smallest = {env: (at_least[env] & -at_least[env]).bit_length() - 1 for env in order}  # -1: nothing fits
    if all(count >= 0 for count in smallest.values()) and (picked := _fill(sizes, own, smallest, target)) is not None:
        return picked
    others_sums = _sums((sizes[index] for index in others), target)
    # Next, larger numbers that keep all reservations. Only if there are none, a reservation may be cut.
    for possible in (at_least, sums):
        if (allocation := _allocate(possible, reserved, others_sums, target)) is not None:
            return _fill(sizes, own, allocation, target)
    return None


def reservations(batch_size: int, fractions: Mapping[int, float]) -> dict[int, int]:
    """Returns the sequences of a batch reserved for each environment. Fractions with a sum above 1 are scaled down."""
    wanted = {env: int(batch_size * fraction) for env, fraction in fractions.items()}
    total = max(batch_size, sum(wanted.values()))
    return {env: count for env, want in wanted.items() if (count := want * batch_size // total) > 0}


def _fill(
    sizes: Sequence[int], own: Mapping[int, list[int]], allocation: Mapping[int, int], target: int
) -> list[int] | None:
    """Picks the oldest groups of each environment for its allocation, and the oldest others that fill up the batch."""
    picked: set[int] = set()
    for env, count in allocation.items():
        picked.update(own[env][index] for index in exact_sum([sizes[index] for index in own[env]], count) or ())
    left = [index for index in range(len(sizes)) if index not in picked]
    rest = target - sum(allocation.values())
    filling = exact_sum([sizes[index] for index in left], rest) if rest >= 0 else None
    return None if filling is None else sorted(picked.union(left[index] for index in filling))


def _allocate(
    possible: Mapping[int, int], reserved: Mapping[int, int], others: int, target: int
) -> dict[int, int] | None:
    """Chooses one possible sum for each environment so that the others can fill up the batch; None if they cannot."""
    reach = [others]  # the sums of the others, then of the others and the last environment, and so on
    for sums in reversed([*possible.values()]):
        reach.append(_combine(sums, reach[-1], target))
    if not reach.pop() >> target & 1:
        return None
    allocation = {}
    for env, sums in possible.items():
        rest = reach.pop()
        fits = [count for count in range(target + 1) if sums >> count & 1 and rest >> (target - count) & 1]
        allocation[env] = next((count for count in fits if count >= reserved[env]), fits[-1])
        target -= allocation[env]
    return allocation


def _shortest_prefix(sizes: Sequence[int], target: int) -> int | None:
    """Returns the length of the shortest prefix in which some sizes add up to `target`."""
    sums = 1
    for end, size in enumerate(sizes):
        if sums >> target & 1:
            return end
        sums = _add(sums, size, target)
    return len(sizes) if sums >> target & 1 else None


def _sums(sizes: Iterable[int], target: int) -> int:
    sums = 1
    for size in sizes:
        sums = _add(sums, size, target)
    return sums


def _add(sums: int, size: int, target: int) -> int:
    return sums if size > target else sums | sums << size & (2 << target) - 1


def _combine(some: int, others: int, target: int) -> int:
    """Returns the sums of one element of `some` and one of `others`."""
    combined = 0
    while some:
        lowest = some & -some
        combined |= others * lowest
        some ^= lowest
    return combined & (2 << target) - 1
