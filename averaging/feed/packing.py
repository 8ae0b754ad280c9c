"""Which groups of the queue make the next batch. Pure.

A set of sizes that add up to `n` is kept as bit `n` of an integer, so that adding a size is one shift.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def exact(sizes: Sequence[int], target: int) -> list[int] | None:
    """The indices of sizes that add up to `target`, ascending; None if there are none.

    They lie in the shortest front part of `sizes` that holds such a set, and earlier indices are preferred in it.
    """
    end = _shortest_front(sizes, target)
    if end is None:
        return None
    behind = [1]  # the sums of the sizes behind each index, from the last index on
    for size in reversed(sizes[:end]):
        behind.append(_add(behind[-1], size, target))
    picked = []
    for index in range(end):
        rest = target - sizes[index]
        if rest >= 0 and behind[end - index - 1] >> rest & 1:
            picked.append(index)
            target = rest
    return picked


def pack(
    sizes: Sequence[int], envs: Sequence[int | None], target: int, reserved: Mapping[int, int]
) -> list[int] | None:
    """The indices of the groups in the next batch, ascending; None if no batch can be formed.

    Args:
        sizes: sequences of each group in the queue, oldest group first.
        envs: the environment of each group.
        target: sequences of a batch.
        reserved: sequences of the batch that belong to an environment. An environment that has fewer in the queue is
            waited for. One whose groups do not fit into its share gets the next larger share that fits, else the next
            smaller one.
    """
    if not reserved:
        return exact(sizes, target)
    own: dict[int, list[int]] = {env: [] for env in reserved}
    others: list[int] = []
    for index, env in enumerate(envs):
        (others if env is None or env not in own else own[env]).append(index)
    if any(sum(sizes[index] for index in own[env]) < share for env, share in reserved.items()):
        return None
    # The environment with the oldest group comes first, so that none is always the last to get its share.
    order = sorted((env for env in reserved if own[env]), key=lambda env: own[env][0])
    sums = {env: _sums((sizes[index] for index in own[env]), target) for env in order}
    at_least = {env: sums[env] >> reserved[env] << reserved[env] for env in order}
    given = {env: (at_least[env] & -at_least[env]).bit_length() - 1 for env in order}  # the least that keeps the share
    if all(share >= 0 for share in given.values()) and (picked := _filled(sizes, own, given, target)) is not None:
        return picked
    others_sums = _sums((sizes[index] for index in others), target)
    # Else with all shares kept if that is possible, and otherwise without.
    for possible in (at_least, sums):
        if (divided := _divided(possible, reserved, others_sums, target)) is not None:
            return _filled(sizes, own, divided, target)
    return None


def _filled(
    sizes: Sequence[int], own: Mapping[int, list[int]], given: Mapping[int, int], target: int
) -> list[int] | None:
    """The oldest groups of each environment for what it is given, and the oldest ones that fill up the batch."""
    picked: set[int] = set()
    for env, share in given.items():
        picked.update(own[env][index] for index in exact([sizes[index] for index in own[env]], share) or ())
    left = [index for index in range(len(sizes)) if index not in picked]
    rest = target - sum(given.values())
    filling = exact([sizes[index] for index in left], rest) if rest >= 0 else None
    return None if filling is None else sorted(picked.union(left[index] for index in filling))


def _divided(
    possible: Mapping[int, int], reserved: Mapping[int, int], others: int, target: int
) -> dict[int, int] | None:
    """What each environment is given, so that those without a share can fill up the batch; None if they cannot."""
    reach = [others]  # the sums of the others, then of them and the last environment, and so on
    for sums in reversed([*possible.values()]):
        reach.append(_combine(sums, reach[-1], target))
    if not reach.pop() >> target & 1:
        return None
    given = {}
    for env, sums in possible.items():
        after = reach.pop()
        fits = [share for share in range(target + 1) if sums >> share & 1 and after >> (target - share) & 1]
        given[env] = next((share for share in fits if share >= reserved[env]), fits[-1])
        target -= given[env]
    return given


def shares(batch_size: int, proportions: Mapping[int, float]) -> dict[int, int]:
    """Sequences of a batch that are reserved for each environment; proportions that sum to over 1 are scaled."""
    wanted = {env: int(batch_size * proportion) for env, proportion in proportions.items()}
    total = max(batch_size, sum(wanted.values()))
    return {env: share for env, want in wanted.items() if (share := want * batch_size // total) > 0}


def _shortest_front(sizes: Sequence[int], target: int) -> int | None:
    """How many sizes from the front are needed to reach `target` exactly."""
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
    """The sums of one out of `some` and one out of `others`."""
    combined = 0
    while some:
        lowest = some & -some
        combined |= others * lowest
        some ^= lowest
    return combined & (2 << target) - 1
