"""Which workers hold which tensors of which samples. Pure."""

from __future__ import annotations

from collections.abc import Iterable


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
