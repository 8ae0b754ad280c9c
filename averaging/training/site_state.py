"""How all ranks of a site take over one state: each shard from the same donor, and each rank that holds a shard."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from averaging.common import EventLoopThread
from averaging.errors import AveragingError, SiteError, StateError
from averaging.peer import FetchedState, Peer
from averaging.state import ExtraState, State
from averaging.training.fetch import BackgroundDownload
from averaging.training.site import Site

ATTEMPTS = 5
"""Downloads until all shards have the same version: a donor may average between the first shard and the last."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a shard's state comes from, and which one it is: equal for all shards of one state."""

    donor: str
    version: int
    local_step: int
    history: tuple[Any, ...]


class SiteState:
    """The states that the ranks of one site take over.

    Args:
        site: the site.
        peer: the peer of this rank.
        thread: in which the peer runs.
        share: see `TrainingState.shared`.
        check: see `TrainingState.check`.
        take_over: see `TrainingState.take_over`.
    """

    def __init__(
        self,
        site: Site,
        peer: Peer,
        thread: EventLoopThread,
        share: Callable[[], ExtraState],
        check: Callable[[Mapping[str, Any]], None],
        take_over: Callable[[State], None],
    ) -> None:
        self._site, self._peer, self._thread = site, peer, thread
        self._share, self._check, self._apply = share, check, take_over

    def found(self, search: Callable[[], BackgroundDownload | None]) -> BackgroundDownload | None:
        """The download that `search` finds at the leader; the other shards are downloaded from the same donor.

        Raises:
            Exception: whatever `search` raises, at all ranks.
        """
        if self._site.size == 1:
            return search()
        held: BackgroundDownload | None = None

        def look() -> str | None:
            nonlocal held
            held = search()
            return None if held is None else self._thread.wait(held.result).donor

        donor = self._site.agreed(look)
        if donor is None or held is not None:
            return held
        return self.fetch([donor])

    def fetch(self, sites: Sequence[str]) -> BackgroundDownload:
        """Begins to download this rank's shard from the first of these sites that delivers it."""
        fetch = BackgroundDownload(sites, time.monotonic())
        if self._site.owns:
            fetch.result = self._thread.start(self._download(sites))
        return fetch

    async def _download(self, sites: Sequence[str]) -> FetchedState:
        names = self._peer.shard
        donors = list(sites) if names is None else await names.endpoints_of(sites)
        return await self._peer.fetch_state(donors, self._check)

    def take_over(self, fetch: BackgroundDownload) -> None:
        """Takes over a download at all ranks.

        Raises:
            StateError: a shard could not be downloaded, or does not fit; nothing was changed.
            RoundError: the application held the tensors' lock for more than `round_timeout`; nothing was changed.
            SiteError: only some of the shards were taken over.
        """
        if self._site.shards == 1:
            self._site.agreed(lambda: self._write(fetch))
        else:
            self._write_all(self._of_one_version(fetch))
        if self._site.size > 1:
            self._copy()

    def _write(self, fetch: BackgroundDownload) -> None:
        self._thread.run(self._peer.take_over(self._thread.wait(fetch.result), self._apply))

    def _of_one_version(self, fetch: BackgroundDownload) -> BackgroundDownload:
        """The download of this rank, once the downloads of all shards are parts of one state."""

        def source() -> _Source | None:
            return self._source(self._thread.wait(fetch.result)) if self._site.owns else None

        for _ in range(ATTEMPTS):
            sources = [found for found in self._site.together(source) if found is not None]
            if len(set(sources)) == 1:
                return fetch
            fetch = self.fetch([sources[0].donor])
        raise StateError(
            f"the shards of {sources[0].donor} were parts of different states in {ATTEMPTS} attempts: it averages "
            "faster than this site downloads"
        )

    def _source(self, fetched: FetchedState) -> _Source:
        names, user = self._peer.shard, fetched.state.user
        donor = fetched.donor if names is None else names.site_of(fetched.donor) or fetched.donor
        strategy = user.get("strategy")
        history = strategy.get("history") if isinstance(strategy, dict) else None
        return _Source(donor, fetched.state.version, user.get("local_step", 0), (str(history),))

    def _write_all(self, fetch: BackgroundDownload) -> None:
        def write() -> AveragingError | None:
            try:
                if self._site.owns:
                    self._write(fetch)
            except AveragingError as error:
                return error
            return None

        failures = self._site.together(write)
        first = next((failure for failure in failures if failure is not None), None)
        if first is None:
            return
        if all(failure is not None for failure in failures):
            raise first
        raise SiteError(
            f"only some shards of this site have taken over the state of the run ({first}); end all processes of the "
            "site, so that torchrun starts it again"
        ) from first

    def _copy(self) -> None:
        """Copies the owner's state to the ranks that hold the same shard."""
        site = self._site
        own = dict(zip(self._peer.tensor_names, self._peer.own_tensors, strict=True))
        sent: dict[str, torch.Tensor] = {}

        def describe() -> tuple[int, Any, list[tuple[str, torch.dtype, torch.Size]]]:
            extras = self._share()
            sent.update(own, **extras.tensors)
            return self._peer.version, extras.user, [(name, one.dtype, one.shape) for name, one in sent.items()]

        version, user, described = site.of_the_owner(describe)
        if not site.owns:
            sent = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in described}
        site.copy(list(sent.values()))
        if site.owns:
            return
        with self._peer.tensors(), torch.no_grad():
            self._apply(State(max(1, version), sent, user))
            for name, tensor in own.items():
                tensor.copy_(sent[name])
