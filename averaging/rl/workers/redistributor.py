"""Plans which worker sends which tensors to which others, and divides samples over ranks. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from averaging.errors import DataLostError
from averaging.rl.workers.payload import Step

# Which workers hold which tensors of which samples. Pure.


class OwnerTracker:
    """The master's record of the tensors at the workers."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, set[str]]] = {}  # sample, tensor, workers

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, worker: str, ids: Iterable[str], keys: Iterable[str]) -> None:
        """Records that a worker holds these tensors of these samples."""
        keys = list(keys)
        for sample in ids:
            of_sample = self._owners.setdefault(sample, {})
            for key in keys:
                of_sample.setdefault(key, set()).add(worker)

    def replace(self, worker: str, ids: Iterable[str], keys: Iterable[str]) -> None:
        """Records that a worker has computed these tensors; copies elsewhere are outdated."""
        keys = list(keys)
        for sample in ids:
            of_sample = self._owners.setdefault(sample, {})
            for key in keys:
                of_sample[key] = {worker}

    def owners(self, sample: str, key: str) -> frozenset[str]:
        """The workers that hold a tensor; none if it is unknown."""
        return frozenset(self._owners.get(sample, {}).get(key, ()))

    def remove(self, ids: Iterable[str]) -> None:
        """Forgets samples."""
        for sample in ids:
            self._owners.pop(sample, None)

    def remove_worker(self, worker: str) -> None:
        """Forgets everything that a lost worker held."""
        for of_sample in self._owners.values():
            for key in [key for key, workers in of_sample.items() if worker in workers]:
                of_sample[key].discard(worker)
                if not of_sample[key]:
                    del of_sample[key]

    def missing(self, ids: Iterable[str], keys: Iterable[str]) -> dict[str, list[str]]:
        """The tensors that no worker holds: names by sample."""
        keys = list(keys)
        found = {sample: [key for key in keys if not self.owners(sample, key)] for sample in ids}
        return {sample: lacking for sample, lacking in found.items() if lacking}


T = TypeVar("T")


class Redistributor:
    """Plans the transfers before a call.

    Args:
        tracker: Who holds what.
    """

    def __init__(self, tracker: OwnerTracker) -> None:
        self._tracker = tracker

    def plan(self, wanted: Mapping[str, Sequence[str]], keys: Sequence[str]) -> list[Step]:
        """The steps after which every worker holds these tensors of its samples.

        Each missing tensor is received once, from an owner. If a tensor has several owners, the one with the fewest
        transfers so far sends it. Tensors that a worker holds are not sent to it.

        Args:
            wanted: Samples by worker.
            keys: Names of the tensors.

        Raises:
            DataLostError: No worker holds one of the tensors.
        """
        load: Counter[str] = Counter()
        transfers: defaultdict[tuple[str, tuple[str, ...], str], list[str]] = defaultdict(list)
        for worker, ids in wanted.items():
            for sample in dict.fromkeys(ids):
                missing: defaultdict[str, list[str]] = defaultdict(list)  # names by source
                for key in keys:
                    owners = self._tracker.owners(sample, key)
                    if worker in owners:
                        continue
                    if not owners:
                        raise DataLostError("", f"no worker holds {key!r} of sample {sample}, which {worker} needs")
                    source = min(owners, key=lambda owner: (load[owner], owner))
                    load[source] += 1
                    missing[source].append(key)
                for source, names in missing.items():
                    transfers[source, tuple(names), worker].append(sample)
        return _steps(transfers)


def _steps(transfers: Mapping[tuple[str, tuple[str, ...], str], list[str]]) -> list[Step]:
    """The steps of transfers, which are given as samples by (source, names of tensors, receiver)."""
    receivers: defaultdict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
    for (source, keys, worker), ids in transfers.items():
        receivers[source, keys, tuple(ids)].append(worker)
    fan_out = Counter((source, keys) for (source, keys, _), workers in receivers.items() if len(workers) == 1)
    steps: list[Step] = []
    others: defaultdict[tuple[str, str, tuple[str, ...]], dict[str, list[str]]] = defaultdict(dict)
    for (source, keys, shared), workers in receivers.items():
        if len(workers) > 1:
            steps.append(Step("bcast", source, [source], workers, [list(shared)], list(keys)))
        elif fan_out[source, keys] > 1:
            others["scatter", source, keys][workers[0]] = list(shared)
        else:
            others["gather", workers[0], keys][source] = list(shared)
    for (kind, root, keys), ids_of in others.items():
        srcs, dsts = ([root], list(ids_of)) if kind == "scatter" else (list(ids_of), [root])
        steps.append(Step(kind, root, srcs, dsts, list(ids_of.values()), list(keys)))
    return steps


def part_of(items: Sequence[T], rank: int, parts: int) -> Sequence[T]:
    """One of so many consecutive parts whose sizes differ by at most one."""
    size, longer = divmod(len(items), parts)
    start = rank * size + min(rank, longer)
    return items[start : start + size + (rank < longer)]


def balance(lengths: Mapping[str, int], ranks: Sequence[int]) -> dict[int, list[str]]:
    """Divides samples over ranks, so that their numbers differ by at most one and their lengths sum to about the same.

    Args:
        lengths: Length of each sample, by id.
        ranks: The ranks.

    Returns:
        The samples of each rank, in their order in `lengths`.
    """
    order = {sample: place for place, sample in enumerate(lengths)}
    found: dict[int, list[str]] = {rank: [] for rank in ranks}
    total: Counter[int] = Counter()
    most, longer = divmod(len(lengths), len(ranks))
    for sample in sorted(lengths, key=lambda sample: (-lengths[sample], order[sample])):
        full = sum(len(ids) > most for ids in found.values())  # ranks that have one more than the others
        open_ranks = [rank for rank in ranks if len(found[rank]) < most + (full < longer)]
        rank = min(open_ranks, key=lambda rank: (total[rank], rank))
        found[rank].append(sample)
        total[rank] += lengths[sample]
    return {rank: sorted(ids, key=order.__getitem__) for rank, ids in found.items()}
