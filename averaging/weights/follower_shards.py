"""Follows the parts of a divided model, each from the rank that publishes it, and puts versions together."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

from averaging.common import Backoff, parse_address, spelled
from averaging.errors import AveragingError, ProtocolViolationError, TensorError
from averaging.weights.follower_tasks import MAX_PAUSE, MIN_PAUSE, FollowerOptions, FollowerTasks
from averaging.weights.layout import Shard, WeightManifest, WeightSpec
from averaging.weights.shards import put_together
from averaging.weights.snapshot import WeightSnapshot, seal, view_state

logger = logging.getLogger("averaging.rl.synchronizer")

REMEMBERED = 4
"""Versions whose parts are looked for."""


@dataclass(frozen=True)
class Received:
    """A version that is here completely: the whole model, or all parts that this follower wants.

    Attributes:
        manifest: of the publisher that was joined.
        snapshots: of the parts.
    """

    manifest: WeightManifest
    snapshots: tuple[WeightSnapshot, ...]

    def parts(self) -> Iterator[tuple[WeightSpec, torch.Tensor]]:
        """Each tensor or part of one. They share the memory of the snapshots and must not be written."""
        for snapshot in self.snapshots:
            yield from snapshot.parts()

    def whole(self) -> WeightSnapshot:
        """All tensors of the model, sorted by name, if no part is left out. Those of a divided one are put together."""
        if self.divided:
            return seal(view_state(dict(sorted(put_together(self.parts()).items()))), self.manifest.version, None)
        (snapshot,) = self.snapshots
        layout = snapshot.manifest.layout
        return snapshot.arranged(replace(layout, tensors=tuple(sorted(layout.tensors, key=lambda spec: spec.name))))

    @property
    def divided(self) -> bool:
        """Whether it comes in parts, so that the manifest is that of one of them."""
        return len(self.manifest.shards) > 1 or _has_parts(self.manifest)


class ShardTasks:
    """Follows one publisher, and those of the other parts that it names, while it is entered.

    It has the attributes of `FollowerTasks`, of which it is one for each part. A version is complete when each wanted
    part has the digest that the joined publisher named for it. So parts of two versions are never mixed.

    Args:
        options: of the joined publisher.
        check: called with each manifest; raises TensorError if it belongs to another model.
        wanted: whether a part is received.
        complete: called with the manifests of all parts of a version; raises TensorError if they lack something.
        base: weights that are here already, of which each part uses what it has.
        on_progress: called with received and expected bytes of all parts, before they are encoded.
    """

    def __init__(
        self,
        options: FollowerOptions,
        check: Callable[[WeightManifest], None],
        wanted: Callable[[WeightManifest], bool],
        complete: Callable[[Sequence[WeightManifest]], None],
        *,
        base: WeightSnapshot | None = None,
        on_progress: Callable[[int, int], None] = lambda received, total: None,
    ) -> None:
        self._options, self._check, self._wanted, self._complete = options, check, wanted, complete
        self._announced: deque[WeightManifest] = deque(maxlen=REMEMBERED)  # the newest last
        self._base, self._on_progress = base, on_progress
        self._progress: dict[str, tuple[int, int]] = {}  # by the endpoint of the part; that of the root is ""
        self._root = FollowerTasks(options, self._note, base, partial(self._advance, ""), wanted=wanted)
        self.store = self._root.store
        self._parts: dict[str, FollowerTasks] = {}  # of the other parts, by endpoint
        self._manifests: dict[bytes, WeightManifest] = {}  # of all parts, by digest
        self._newest: Received | None = None
        self._failure: AveragingError | None = None
        self._former_bytes = 0  # received by parts that are followed no more
        self._stack = AsyncExitStack()

    @property
    def addresses(self) -> Sequence[str]:
        """See `FollowerTasks`."""
        return self._root.addresses

    @property
    def announced(self) -> WeightManifest | None:
        """See `FollowerTasks`."""
        return self._root.announced

    @property
    def failure(self) -> AveragingError | None:
        """See `FollowerTasks`."""
        return (
            self._failure
            or self._root.failure
            or next((part.failure for part in self._parts.values() if part.failure), None)
        )

    @property
    def connected(self) -> bool:
        """See `FollowerTasks`; to the publishers of all parts."""
        return self._root.connected and all(part.connected for part in self._parts.values())

    @property
    def bytes_received(self) -> int:
        """See `FollowerTasks`."""
        parts = tuple(self._parts.values())
        return self._root.bytes_received + self._former_bytes + sum(part.bytes_received for part in parts)

    @property
    def bytes_sent(self) -> int:
        """Bytes handed on."""
        return self.store.sent + sum(part.store.sent for part in tuple(self._parts.values()))

    @property
    def endpoint(self) -> str:
        """See `FollowerTasks`; of the joined publisher's part."""
        return self._root.endpoint

    @property
    def newest(self) -> Received | None:
        """The newest version that is here completely."""
        for manifest in reversed(tuple(self._announced)):
            if self._newest is not None and manifest.version <= self._newest.manifest.version:
                break
            if (found := self._put_together(manifest)) is not None:
                self._newest, self._base = found, None
                break
        return self._newest

    async def __aenter__(self) -> Self:
        """See `FollowerTasks`."""
        failure: AveragingError | None = None
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            keeping = tasks.create_task(self._keep_parts(tasks))
            stack.callback(keeping.cancel)
            try:
                await stack.enter_async_context(self._root)
            except AveragingError as error:
                failure = error
            else:
                self._stack = stack.pop_all()
        if failure is not None:
            raise failure  # outside of the TaskGroup, which would make a group of it
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def wait_newer(self, version: int | None, timeout: float | None) -> bool:
        """See `FollowerTasks`."""

        def is_newer() -> bool:
            newest = self.newest
            return newest is not None and (version is None or newest.manifest.version > version)

        await self.store.changes.wait(lambda: is_newer() or self.failure is not None, timeout)
        return is_newer()

    def _note(self, manifest: WeightManifest) -> None:
        if not manifest.shards and _has_parts(manifest):
            raise TensorError(
                f"{', '.join(self._options.join)} publishes a part of a model, and names no others; join the publisher "
                "of rank 0"
            )
        self._check(manifest)
        self._announced.append(manifest)
        self._manifests[manifest.digest] = manifest
        self._check_size()

    def _note_part(self, manifest: WeightManifest) -> None:
        self._check(manifest)
        self._manifests[manifest.digest] = manifest
        self._check_size()
        if len(self._manifests) > REMEMBERED * (2 + 2 * len(self._parts)):
            named = {shard.digest for one in self._announced for shard in one.shards} | {manifest.digest}
            self._manifests = {digest: one for digest, one in self._manifests.items() if digest in named}

    def _check_size(self) -> None:
        """Each part is within `max_bytes` if it was announced; this is about all of them."""
        parts = [self._manifests.get(shard.digest) for shard in self._announced[-1].shards] if self._announced else []
        total = sum(part.layout.nbytes for part in parts if part is not None)
        if total > self._options.max_bytes:
            limit = spelled("max_bytes", self._options.max_bytes)
            raise ProtocolViolationError(f"{total} bytes of weights in {len(parts)} parts, more than {limit}")

    def _advance(self, endpoint: str, received: int, total: int) -> None:
        self._progress[endpoint] = received, total
        counts = self._progress.values()
        self._on_progress(sum(one for one, _ in counts), sum(one for _, one in counts))
        if all(one == of_all for one, of_all in counts):
            self._progress.clear()

    def _put_together(self, manifest: WeightManifest) -> Received | None:
        manifests, snapshots = [], []
        for number, shard in enumerate(manifest.shards or (Shard("", manifest.digest),)):
            part = self._manifests.get(shard.digest)
            if part is None:
                return None
            manifests.append(part)
            if not self._wanted(part):
                continue
            source = self._root if number == 0 else self._parts.get(shard.endpoint)
            snapshot = None if source is None else source.store.complete(shard.digest)
            if snapshot is None:
                return None
            snapshots.append(snapshot)
        self._complete(manifests)
        return Received(manifest, tuple(snapshots))

    async def _keep_parts(self, tasks: asyncio.TaskGroup) -> None:
        """Follows the parts that the joined publisher names, and no others."""
        running: dict[str, asyncio.Task[None]] = {}

        def named() -> tuple[Shard, ...]:
            announced = self._root.announced
            return () if announced is None else announced.shards[1:]

        try:
            while True:
                endpoints = {shard.endpoint for shard in named()}
                for endpoint in running.keys() - endpoints:
                    running.pop(endpoint).cancel()
                for endpoint in endpoints - running.keys():
                    running[endpoint] = tasks.create_task(self._follow_part(endpoint))
                await self.store.changes.wait(lambda: {shard.endpoint for shard in named()} != running.keys())
        finally:
            for task in running.values():
                task.cancel()

    async def _follow_part(self, endpoint: str) -> None:
        listen, backoff = self._options.listen, Backoff(MIN_PAUSE, MAX_PAUSE)
        if listen is not None and (parse_address(listen)[1] != 0 or self._options.advertise is not None):
            listen = None  # the port is that of the first part; so this one is not handed on
        options = replace(
            self._options,
            join=[endpoint],
            given=self._options.join,
            loopback=self._root.announced_locally,
            listen=listen,
            advertise=None,
        )
        while True:
            part = FollowerTasks(
                options,
                self._note_part,
                self._base,
                partial(self._advance, endpoint),
                wanted=self._wanted,
                changes=self.store.changes,
            )
            self._parts[endpoint] = part
            try:
                async with part:
                    await self.store.changes.wait(lambda part=part: part.failure is not None)  # type: ignore[misc]
                return  # `failure` ends the follower
            except ProtocolViolationError as error:
                self._failure = error
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


def _has_parts(manifest: WeightManifest) -> bool:
    return any(spec.whole for spec in manifest.layout.tensors)
