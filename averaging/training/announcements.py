"""What the other peers of a run announce of their progress and their samples, as the training thread reads it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from averaging.common import EventLoopThread, SignalSafeFuture, on_loop
from averaging.errors import ClosedError
from averaging.peer import Peer, Topic
from averaging.training.site import Site

data_logger = logging.getLogger("averaging.data")

T = TypeVar("T")

MAX_CACHED = 64
"""Cached queries. There are ever new ones, since the phase of a topic changes with every step."""

FRESH_SECONDS = 0.02
"""Age at which a result is queried again. Without a cache each step of a small model would wait for the thread."""

CORRECTION_SECONDS = 2.0
"""Seconds after which the correction of this peer's clock is read again."""

STALE_SECONDS = 1.0
"""Age at which a result is not returned any more; one query in such a step costs nothing."""

ASK_AGAIN_SECONDS = 60.0
"""Seconds after which the ranks of a site meet while they wait for the announcements of other peers."""


class CachedQueries:
    """The last results of queries in the peer's thread, by key."""

    def __init__(self) -> None:
        self._cached: dict[Hashable, _CachedQuery[Any]] = {}

    def recent(self, thread: EventLoopThread, key: Hashable, query: Callable[[], T], *, wait: bool) -> T:
        """The result of `query` in the peer's thread; waits only if nothing is cached."""
        now = time.monotonic()
        kept: _CachedQuery[T] | None = self._cached.get(key)
        if kept is None:
            kept = _CachedQuery(now, thread.start(on_loop(query)))
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            self._cached[key] = kept
        elif kept.pending.done():
            kept.latest = kept.pending
            if now - kept.asked_at >= FRESH_SECONDS:
                wait = wait or now - kept.asked_at > STALE_SECONDS
                kept.asked_at, kept.pending = now, thread.start(on_loop(query))
        if wait or kept.latest is None:
            kept.latest = kept.pending
        return thread.wait(kept.latest)

    def clear(self) -> None:
        self._cached.clear()


@dataclass(slots=True)
class _CachedQuery(Generic[T]):
    asked_at: float
    pending: SignalSafeFuture[T]
    latest: SignalSafeFuture[T] | None = None


class Announcements:
    """The announced progress of the other peers; in a site what its leader knows."""

    def __init__(self, site: Site, peer: Peer, thread: EventLoopThread) -> None:
        self._site, self._peer, self._thread = site, peer, thread
        self._queries = CachedQueries()
        self._seen: dict[str, bytes] = {}
        self._correction = 0.0
        self._corrected_at = -math.inf

    def announce(self, progress: bytes, *, soon: bool = True) -> None:
        """Does not wait for the peer's thread."""
        if not self._site.owns:
            return
        # In a site the next question tells all ranks alike that it was closed.
        with suppress(ClosedError) if self._site.size > 1 else nullcontext():
            self._thread.start(on_loop(lambda: self._peer.progress.announce(progress, soon=soon)))

    def of_others(self, *, wait: bool = True) -> dict[str, bytes]:
        """The packed progress of the other peers, by endpoint; the same at all ranks."""
        return self._site.broadcast_from_leader(lambda: self.at_leader(wait=wait))

    def at_leader(self, *, wait: bool) -> dict[str, bytes]:
        """As long as nobody announces anything new, it is the same object: what follows from it does so, too."""
        progress = self._peer.progress
        seen = self._queries.recent(self._thread, "announcements", lambda: progress.announcements, wait=wait)
        if seen != self._seen:
            self._seen = seen
        return self._seen

    @property
    def none_known(self) -> bool:
        return self._site.broadcast_from_leader(lambda: len(self._thread.run(on_loop(lambda: self._peer.peers))) == 1)

    def wait_for(self, condition: Callable[[dict[str, bytes]], bool], seconds: float) -> dict[str, bytes]:
        """Waits until the announcements fulfil `condition`, or for `seconds`; returns them."""
        end = time.monotonic() + seconds

        def wait() -> tuple[dict[str, bytes], bool]:
            left = end - time.monotonic()
            seen = self._thread.run(
                self._peer.progress.until(condition, min(left, ASK_AGAIN_SECONDS) if self._site.size > 1 else left)
            )
            return seen, condition(seen) or time.monotonic() >= end

        is_over = False
        while not is_over:
            seen, is_over = self._site.broadcast_from_leader(wait)
        return seen

    def declared_until(self, topic: Topic, phase: str = "") -> float | None:
        """When the last declaration of other training peers for this topic expires; may be a step old."""
        key = (topic.schema.topic, phase)
        return self._site.broadcast_from_leader(
            lambda: self._queries.recent(self._thread, key, lambda: self._peer.declared_until(topic, phase), wait=False)
        )

    def clock_correction(self) -> float:
        """Seconds to add to this peer's clock for the clock of the run; at the leader of a site."""
        if (now := time.monotonic()) - self._corrected_at > CORRECTION_SECONDS:
            self._corrected_at = now
            peer = self._peer
            self._correction = self._queries.recent(
                self._thread, "clock", lambda: peer.discovery.diagnose().clock_correction, wait=False
            )
        return self._correction

    def group_began(self, topic: Topic, phase: str) -> float | None:
        """When other peers began the only group of this phase, at the leader of a site; may be a step old."""
        key = (topic.schema.topic, phase, "group")
        return self._queries.recent(self._thread, key, lambda: self._peer.group_began(topic, phase), wait=False)

    def refresh(self) -> None:
        self._queries.clear()


class DataRecords:
    """The records of the peers under the key `RUN.data`. Made once for each peer, in the training thread."""

    def __init__(self, peer: Peer, thread: EventLoopThread) -> None:
        self._peer, self._thread = peer, thread
        self.endpoint = peer.endpoint
        self.holders: Collection[str] = ()
        self._live: Mapping[str, bytes] = thread.run(on_loop(lambda: peer.data.announcements))
        self._last_of_gone: list[bytes] = []
        self._serial = self._read = 0
        thread.start(self._follow())

    def announce(self, record: bytes) -> None:
        self._thread.start(on_loop(lambda: self._peer.data.announce(record)))

    @property
    def is_published(self) -> bool:
        return self._thread.run(on_loop(lambda: self._peer.data.is_published))

    def is_outvoted(self, differing: Collection[str], alike: Collection[str]) -> bool:
        return self._peer.data.is_outvoted(differing, alike)

    @property
    def have_changed(self) -> bool:
        return self._serial != self._read

    def read(self) -> tuple[Mapping[str, bytes], list[bytes]]:
        """Returns the records of the other peers, and the last records of those that have gone since the last call."""
        self._read = self._serial
        gone, self._last_of_gone = self._last_of_gone, []
        return self._live, gone

    def check(self) -> None:
        """Raises ClosedError if the averager was closed, or its thread has failed."""
        self._thread.check()

    async def _follow(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                tasks.create_task(self._notice_gone())
        except Exception:
            data_logger.exception("this peer does not hear any more what the others train")

    async def _watch(self) -> None:
        async with aclosing(self._peer.data.watch()) as changes:
            async for records in changes:
                self._note(records)

    async def _notice_gone(self) -> None:
        async with aclosing(self._peer.data.mark_missing(lambda: self.holders)) as gone:
            async for name in gone:
                data_logger.info("%s refuses connections, so its samples are dealt again", name)
                self._note(self._peer.data.announcements)

    def _note(self, records: Mapping[str, bytes]) -> None:
        self._last_of_gone += [self._live[name] for name in self._live.keys() - records.keys()]
        self._live = records
        self._serial += 1
