"""A model in parts: each part comes from the rank that publishes it, and a version is complete when all are here."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from averaging.common import Backoff, spelled
from averaging.errors import AveragingError, ProtocolViolationError, TensorError
from averaging.weights.layout import (
    Shard,
    WeightManifest,
    WeightSpec,
    is_wanted,
    missing_part,
    put_together,
    whole_of,
)
from averaging.weights.snapshot import WeightSnapshot, seal, view_state

if TYPE_CHECKING:
    from averaging.weights.receiver import FollowerOptions, VersionReceiver

logger = logging.getLogger("averaging.weights")

MIN_PAUSE, MAX_PAUSE = 0.1, 2.0
"""Seconds between two attempts to reach publishers; the pause doubles."""

REMEMBERED = 4
"""Versions whose parts are looked for."""


@dataclass(frozen=True)
class DividedSnapshot:
    """A version in parts, all that this follower wants of it.

    Attributes:
        manifest: of the publisher that was joined.
        snapshots: of the parts.
    """

    manifest: WeightManifest
    snapshots: tuple[WeightSnapshot, ...]

    @property
    def manifests(self) -> list[WeightManifest]:
        """The manifests of the parts."""
        return [snapshot.manifest for snapshot in self.snapshots]

    def parts(self) -> Iterator[tuple[WeightSpec, torch.Tensor]]:
        """Each tensor or part of one. They share the memory of the snapshots and must not be written."""
        for snapshot in self.snapshots:
            yield from snapshot.parts()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The whole tensors by name, put together if no part is left out."""
        return put_together(self.parts())

    def whole(self) -> WeightSnapshot:
        """All tensors of the model, sorted by name."""
        return seal(view_state(dict(sorted(self.tensors().items()))), self.manifest.version, None)


class PartReceivers:
    """Receives the other parts of a model, of which `root` receives the first, and puts versions together.

    A version is complete when each wanted part has the digest that the joined publisher named for it. So parts of two
    versions are never mixed.

    Args:
        root: the receiver of the joined publisher's part.
        options: its options.
        own: what the follower holds of each tensor; None if it takes the whole model.
        base: weights that are here already, of which each part uses what it has.
        on_progress: called with received and expected bytes of all parts, before they are encoded.

    Attributes:
        others: receivers of the other parts, by endpoint.
        failure: why following has ended for good.
        former_bytes: received by parts that are followed no more.
    """

    def __init__(
        self,
        root: VersionReceiver,
        options: FollowerOptions,
        own: Callable[[], Sequence[WeightSpec]] | None,
        base: WeightSnapshot | None,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._root, self._options, self._own, self._on_progress = root, options, own, on_progress
        self._announced: deque[WeightManifest] = deque(maxlen=REMEMBERED)  # the newest last
        self._base = base
        self._progress: dict[str, tuple[int, int]] = {}  # by the endpoint of the part; that of the root is ""
        self._manifests: dict[bytes, WeightManifest] = {}  # of all parts, by digest
        self._newest: WeightSnapshot | DividedSnapshot | None = base
        self.others: dict[str, VersionReceiver] = {}
        self.failure: AveragingError | None = None
        self.former_bytes = 0

    @property
    def newest(self) -> WeightSnapshot | DividedSnapshot | None:
        """The newest version that is here completely."""
        for manifest in reversed(tuple(self._announced)):
            if self._newest is not None and manifest.version <= self._newest.manifest.version:
                break
            if (snapshot := self._put_together(manifest)) is not None:
                self._newest, self._base = snapshot, None
                break
        return self._newest

    def announce(self, manifest: WeightManifest) -> None:
        """Takes a version that the joined publisher announces.

        Raises:
            TensorError: it is a part, and does not name the others.
            ProtocolViolationError: the parts together are too large.
        """
        if not manifest.shards and manifest.has_parts:
            raise TensorError(
                f"{', '.join(self._options.join)} publishes a part of a model, and names no others; join the publisher "
                "of rank 0"
            )
        self._announced.append(manifest)
        self.note(manifest)

    def note(self, manifest: WeightManifest) -> None:
        """Takes a version of any part.

        Raises:
            ProtocolViolationError: the parts together are too large.
        """
        self._manifests[manifest.digest] = manifest
        # Each part is within `max_bytes` if it was announced; this is about all of them.
        parts = [self._manifests.get(shard.digest) for shard in self._announced[-1].shards] if self._announced else []
        total = sum(part.layout.nbytes for part in parts if part is not None)
        if total > self._options.max_bytes:
            limit = spelled("max_bytes", self._options.max_bytes)
            raise ProtocolViolationError(f"{total} bytes of weights in {len(parts)} parts, more than {limit}")
        if len(self._manifests) > REMEMBERED * (2 + 2 * len(self.others)):
            named = {shard.digest for each in self._announced for shard in each.shards}
            named |= {manifest.digest, *(each.digest for each in self._announced)}
            self._manifests = {digest: each for digest, each in self._manifests.items() if digest in named}

    def advance(self, endpoint: str, received: int, total: int) -> None:
        """Takes the progress of the part of one endpoint; empty for that of the root."""
        self._progress[endpoint] = received, total
        counts = self._progress.values()
        self._on_progress(sum(done for done, _ in counts), sum(of_all for _, of_all in counts))
        if all(done == of_all for done, of_all in counts):
            self._progress.clear()

    async def run(self) -> None:
        """Follows the parts that the joined publisher names, and no others, until it is cancelled."""
        running: dict[str, asyncio.Task[None]] = {}

        def named() -> set[str]:
            announced = self._root.announced
            return set() if announced is None else {shard.endpoint for shard in announced.shards[1:]}

        async with asyncio.TaskGroup() as tasks:
            while True:
                endpoints = named()
                for endpoint in running.keys() - endpoints:
                    running.pop(endpoint).cancel()
                for endpoint in endpoints - running.keys():
                    running[endpoint] = tasks.create_task(self._follow(endpoint))
                await self._root.store.changes.wait(lambda: named() != running.keys())

    def _put_together(self, manifest: WeightManifest) -> WeightSnapshot | DividedSnapshot | None:
        own = None if self._own is None else self._own()
        manifests, snapshots = [], []
        for number, shard in enumerate(manifest.shards or (Shard("", manifest.digest),)):
            part = self._manifests.get(shard.digest)
            if part is None:
                return None
            manifests.append(part)
            if own is not None and not is_wanted(own, part.layout):
                continue
            source = self._root if number == 0 else self.others.get(shard.endpoint)
            snapshot = None if source is None else source.store.complete(shard.digest)
            if snapshot is None:
                return None
            snapshots.append(snapshot)
        _check_complete(own, manifests)
        if not manifest.is_divided:
            return snapshots[0]
        return DividedSnapshot(manifest, tuple(snapshots))

    async def _follow(self, endpoint: str) -> None:
        """Follows one part, again and again."""
        root, backoff = self._root, Backoff(MIN_PAUSE, MAX_PAUSE)
        options = self._options.of_part(endpoint, loopback=root.announced_locally)
        while True:
            part = root.of_part(options, self._base, partial(self.advance, endpoint), self.note)
            self.others[endpoint] = part
            try:
                async with part:
                    await root.store.changes.wait(lambda part=part: part.failure is not None)  # type: ignore[misc]
                return  # `failure` ends the follower
            except ProtocolViolationError as error:
                self.failure = error
                root.store.changes.happened()
                return
            except AveragingError as error:
                logger.warning("the publisher %s of a part cannot be followed: %s; trying again", endpoint, error)
                await asyncio.sleep(backoff.next_delay())
            finally:
                self._progress.pop(endpoint, None)
                if self.others.get(endpoint) is part and part.failure is None:
                    self.former_bytes += part.bytes_received
                    del self.others[endpoint]


def _check_complete(own: Sequence[WeightSpec] | None, manifests: Sequence[WeightManifest]) -> None:
    """Checks that the parts of a version are a whole model: the follower's own, or any.

    Raises:
        TensorError: elements are missing, or there twice.
    """
    layouts = [manifest.layout for manifest in manifests]
    wholes = {spec.name: whole_of(spec) for layout in layouts for spec in layout.tensors}
    difference = missing_part(list(wholes.values()) if own is None else own, layouts)
    if difference is None:
        return
    if own is None:
        raise TensorError(f"the published parts are not one model: {difference}; see that all ranks publish the same")
    raise TensorError(f"the publishers publish another model: {difference}; follow with the same model")
