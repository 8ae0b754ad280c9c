"""Receives a model: whole, as nearly always, or in parts, each from the rank that publishes it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

from averaging.common import Backoff, spelled
from averaging.errors import AveragingError, ProtocolViolationError, TensorError
from averaging.weights.layout import (
    Shard,
    WeightLayout,
    WeightManifest,
    WeightSpec,
    check_own,
    is_wanted,
    missing_part,
    whole_of,
)
from averaging.weights.receiver import MAX_PAUSE, MIN_PAUSE, FollowerOptions, VersionReceiver
from averaging.weights.snapshot import DividedSnapshot, WeightSnapshot

logger = logging.getLogger("averaging.weights")

REMEMBERED = 4
"""Versions whose parts are looked for."""


class ModelReceiver(VersionReceiver):
    """Receives the versions of a model. It is a `VersionReceiver`, and no more if they are of the whole model.

    As soon as the joined publisher announces a part, which names the publishers of the others, one more
    `VersionReceiver` follows each of these. A version is complete when each wanted part has the digest that the joined
    publisher named for it. So parts of two versions are never mixed.

    Args:
        options: options for the joined publisher.
        own: returns the part of each tensor that the follower holds, so that other models are refused, and of a model
            in parts only what it holds is received; None to take whatever is published.
        base: weights that are here already.
        on_progress: callback with received and expected bytes of all parts, before they are encoded.
    """

    def __init__(
        self,
        options: FollowerOptions,
        own: Callable[[], Sequence[WeightSpec]] | None = None,
        base: WeightSnapshot | None = None,
        on_progress: Callable[[int, int], None] = lambda received, total: None,
    ) -> None:
        super().__init__(options, self._note, base, partial(self._advance, ""), wanted=self._is_wanted)
        self._own, self._report = own, on_progress
        self._checked: WeightLayout | None = None  # of the last version that fitted the model when it was announced
        self._progress: dict[str, tuple[int, int]] = {}  # by the endpoint of the part; that of the first is ""
        # The rest is used for a model in parts only.
        self._announced: deque[WeightManifest] = deque(maxlen=REMEMBERED)  # the newest last
        self._manifests: dict[bytes, WeightManifest] = {}  # of all parts, by digest
        self._parts: dict[str, VersionReceiver] = {}  # of the other parts, by endpoint
        self._complete: WeightSnapshot | DividedSnapshot | None = None  # the newest version
        self._part_failure: AveragingError | None = None
        self._former_bytes = 0  # received by parts that are followed no more

    @property
    def newest(self) -> WeightSnapshot | DividedSnapshot | None:
        """The newest version that is here completely."""
        if not self._announced:
            return self.store.newest
        for manifest in reversed(tuple(self._announced)):
            if self._complete is not None and manifest.version <= self._complete.manifest.version:
                break
            if (snapshot := self._put_together(manifest)) is not None:
                self._complete = snapshot
                break
        return self._complete

    @property
    def failure(self) -> AveragingError | None:
        """Why following has ended for good."""
        parts = tuple(self._parts.values())
        return super().failure or self._part_failure or next((part.failure for part in parts if part.failure), None)

    @property
    def connected(self) -> bool:
        """Whether a publisher of each part is connected."""
        return super().connected and all(part.connected for part in tuple(self._parts.values()))

    @property
    def bytes_received(self) -> int:
        """Bytes of encoded pieces."""
        return super().bytes_received + self._former_bytes + sum(p.bytes_received for p in tuple(self._parts.values()))

    @property
    def bytes_sent(self) -> int:
        """Bytes handed on."""
        return super().bytes_sent + sum(part.bytes_sent for part in tuple(self._parts.values()))

    async def tell(self, version: int | None, part_of: int = 0) -> None:
        await asyncio.gather(
            super().tell(version, part_of), *(part.tell(version, part_of) for part in self._parts.values())
        )

    def _work(self) -> list[Coroutine[None, None, None]]:
        return [*super()._work(), self._follow_parts()]

    def _note(self, manifest: WeightManifest) -> None:
        """Checks a version that the joined publisher announces, and remembers it if it is a part."""
        if self._own is not None and manifest.layout is not self._checked:
            check_own(self._own(), manifest, is_part=manifest.is_divided)
            self._checked = manifest.layout
        if not manifest.shards and manifest.has_parts:
            raise TensorError(
                f"{', '.join(self._options.join)} publishes a part of a model, and names no others; join the publisher "
                "of rank 0"
            )
        if manifest.is_described and (manifest.is_divided or self._announced):
            # From here on `newest` is what is complete in all parts. Until then it stays what came before.
            if not self._announced:
                self._complete = self.store.newest
            self._announced.append(manifest)
            self._remember(manifest)

    def _note_part(self, manifest: WeightManifest) -> None:
        if self._own is not None:
            check_own(self._own(), manifest, is_part=True)
        self._remember(manifest)

    def _remember(self, manifest: WeightManifest) -> None:
        self._manifests[manifest.digest] = manifest
        # Each part is within `max_bytes` if it was announced; this is about all of them.
        parts = [self._manifests.get(shard.digest) for shard in self._announced[-1].shards]
        total = sum(part.layout.nbytes for part in parts if part is not None)
        if total > self._options.max_bytes:
            limit = spelled("max_bytes", self._options.max_bytes)
            raise ProtocolViolationError(f"{total} bytes of weights in {len(parts)} parts, more than {limit}")
        if len(self._manifests) > REMEMBERED * (2 + 2 * len(self._parts)):
            named = {shard.digest for announced in self._announced for shard in announced.shards}
            named |= {manifest.digest, *(announced.digest for announced in self._announced)}
            self._manifests = {digest: known for digest, known in self._manifests.items() if digest in named}

    def _is_wanted(self, manifest: WeightManifest) -> bool:
        return self._own is None or not manifest.is_divided or is_wanted(self._own(), manifest.layout)

    def _advance(self, endpoint: str, received: int, total: int) -> None:
        """Reports the progress of all parts."""
        self._progress[endpoint] = received, total
        counts = self._progress.values()
        self._report(sum(done for done, _ in counts), sum(of_all for _, of_all in counts))
        if all(done == of_all for done, of_all in counts):
            self._progress.clear()

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
            source = self if number == 0 else self._parts.get(shard.endpoint)
            snapshot = None if source is None else source.store.complete(shard.digest)
            if snapshot is None:
                return None
            snapshots.append(snapshot)
        # Only with the layouts of all parts: each fits the model alone, and together they could lack elements.
        _check_complete(own, manifests)
        return DividedSnapshot(manifest, tuple(snapshots)) if manifest.is_divided else snapshots[0]

    async def _follow_parts(self) -> None:
        """Follows the parts that the joined publisher names, and no others."""
        running: dict[str, asyncio.Task[None]] = {}

        def named() -> set[str]:
            return set() if self.announced is None else {shard.endpoint for shard in self.announced.shards[1:]}

        async with asyncio.TaskGroup() as tasks:
            while True:
                endpoints = named()
                for endpoint in running.keys() - endpoints:
                    running.pop(endpoint).cancel()
                for endpoint in endpoints - running.keys():
                    running[endpoint] = tasks.create_task(self._follow_part(endpoint))
                await self.store.changes.wait(lambda: named() != running.keys())

    async def _follow_part(self, endpoint: str) -> None:
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        options = self._options.of_part(endpoint, loopback=self.announced_locally)
        base = self._complete if isinstance(self._complete, WeightSnapshot) else None
        while True:
            part = VersionReceiver(
                options,
                self._note_part,
                base,
                partial(self._advance, endpoint),
                wanted=self._is_wanted,
                changes=self.store.changes,
            )
            self._parts[endpoint] = part
            try:
                async with part:
                    await self.store.changes.wait(lambda part=part: part.failure is not None)  # type: ignore[misc]
                return  # `failure` ends the follower
            except ProtocolViolationError as error:
                self._part_failure = error
                self.store.changes.happened()
                return
            except AveragingError as error:
                logger.warning("the publisher %s of a part cannot be followed: %s; trying again", endpoint, error)
                await asyncio.sleep(backoff.next_delay())
            finally:
                self._progress.pop(endpoint, None)
                if self._parts.get(endpoint) is part and part.failure is None:
                    self._former_bytes += part.bytes_received
                    del self._parts[endpoint]


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
