"""Sends new records to all members at once, down the tree of `membership`. Such a message is called a rumour."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from averaging.discovery.gossip.membership import (
    CALL_FAILURES,
    GossipAccess,
    GossipSettings,
    Membership,
    is_refused,
    why_failed,
)
from averaging.errors import CallRefusedError
from averaging.protocol import Record, Refusal, Rumour

logger = logging.getLogger(__name__)

_Place = tuple[str, str, bytes]

_MIN_PRUNE = 1024  # records sent that are remembered before expired ones are looked for


@dataclass(frozen=True, slots=True)
class _Batch:
    start: int  # of a range of peers, ends included
    end: int
    records: tuple[Record, ...]
    candidates: Iterator[str]  # the peers of the range to which they could still be sent


@dataclass(slots=True)
class _Queue:
    waiting: list[_Batch] = field(default_factory=list)  # for one peer
    call: asyncio.Lock = field(default_factory=asyncio.Lock)  # to it


class Rumours:
    """The records that this peer has to send. `on_refused` is called with a peer and the records that it refused."""

    def __init__(
        self, access: GossipAccess, members: Membership, on_refused: Callable[[str, tuple[Refusal, ...]], None]
    ) -> None:
        self._access, self._settings = access, access.settings
        self._members, self._on_refused = members, on_refused
        self._outbox: dict[tuple[int, int], dict[_Place, Record]] = {}
        self._ready = asyncio.Event()
        self._queues: dict[str, _Queue] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._sent: dict[_Place, Record] = {}
        self._prune_at = _MIN_PRUNE

    def spread(self, record: Record, start: int, end: int) -> None:
        """Sends `record` to the range [start, end] of the ring, with the next tick.

        A peer sends each version at most once, so that no peer can make a rumour circulate for ever.
        """
        place = (record.key, record.subkey, record.owner)
        sent = self._sent.get(place)
        if sent is not None and sent.version >= record.version:
            return
        self._sent[place] = record
        if len(self._sent) > self._prune_at:
            now = self._access.clock()
            self._sent = {p: r for p, r in self._sent.items() if r.expiration > now}
            self._prune_at = max(_MIN_PRUNE, 2 * len(self._sent))
        self._outbox.setdefault((start, end), {})[place] = record
        self._ready.set()

    async def run(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        while True:
            await self._ready.wait()
            await asyncio.sleep(self._settings.tick)
            if batches := self._take():
                sending = spawn(self._send_all(batches))
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)

    async def flush(self) -> None:
        """Sends what waits, and waits for what is being sent: a peer that leaves has withdrawn some records before."""
        await self._send_all(self._take())
        if self._sending:
            await asyncio.wait(self._sending)

    async def push(self, endpoint: str, records: list[Record]) -> None:
        await self._push(endpoint, [Rumour(record) for record in records])

    def _take(self) -> list[_Batch]:
        self._ready.clear()
        outbox, self._outbox = self._outbox, {}
        return [
            _Batch(branch.start, branch.end, tuple(records.values()), iter(branch.candidates))
            for (start, end), records in outbox.items()
            for branch in self._members.branches(start, end, self._settings.fanout)
        ]

    async def _send_all(self, batches: list[_Batch]) -> None:
        try:
            async with asyncio.timeout(self._settings.rumour_timeout):
                await self._send(batches)
        except TimeoutError:
            logger.debug("some members did not receive a new record in time; an exchange will bring it")

    async def _send(self, batches: list[_Batch]) -> None:
        """Sends each batch to its next candidate; batches for the same one are sent together."""
        by_target: dict[str, list[_Batch]] = {}
        for batch in batches:
            target = next(batch.candidates, None)
            if target is not None:
                by_target.setdefault(target, []).append(batch)
        async with asyncio.TaskGroup() as tasks:
            for target, load in by_target.items():
                tasks.create_task(self._deliver(target, load))

    async def _deliver(self, target: str, batches: list[_Batch]) -> None:
        """Sends batches to `target`, one call at a time. Batches that arrive meanwhile are sent with the next call."""
        queue = self._queues.setdefault(target, _Queue())
        queue.waiting += batches
        try:
            async with queue.call:
                load, queue.waiting = queue.waiting, []
                if not load:
                    return  # another call has sent them
                rumours = [Rumour(record, batch.start, batch.end) for batch in load for record in batch.records]
                try:
                    await self._push(target, rumours)
                    return
                except CALL_FAILURES as error:
                    logger.debug("%s did not receive a rumour: %s", target, error)
                    now = self._access.clock()
                    self._members.suspect(target, now, why_failed(error), refused=is_refused(error))
        finally:
            # On a timeout in the queue, remove the own batches: there may never be another call to that target.
            own = set(map(id, batches))
            queue.waiting = [batch for batch in queue.waiting if id(batch) not in own]
            if not queue.waiting and not queue.call.locked() and self._queues.get(target) is queue:
                del self._queues[target]
        await self._send(load)

    async def _push(self, target: str, rumours: list[Rumour]) -> None:
        size = self._settings.rumours_per_push
        for first in range(0, len(rumours), size):
            load = tuple(rumours[first : first + size])
            async with asyncio.timeout(self._settings.push_timeout):
                refused = await self._access.transport.push(target, self._access.run_id, load)
            if refused:
                self._on_refused(target, refused)


class ClientStream:
    """The records that wait for one client, which accepts no connections; of each record, only the newest version."""

    def __init__(self, settings: GossipSettings) -> None:
        self._settings = settings
        self._waiting: dict[_Place, Record] = {}
        self._ready = asyncio.Event()
        self._ended = False

    def add(self, record: Record) -> None:
        if len(self._waiting) < self._settings.stream_backlog:  # else the stream ends
            self._waiting[record.key, record.subkey, record.owner] = record
        else:
            self._ended = True
        self._ready.set()

    def end(self) -> None:
        self._ended = True
        self._ready.set()

    async def records(self) -> AsyncGenerator[tuple[Record, ...], None]:
        """Yields the records that were added, until this peer leaves or its client is too slow."""
        while True:
            await self._ready.wait()
            if not self._ended:
                await asyncio.sleep(self._settings.tick)
            self._ready.clear()
            waiting, self._waiting = list(self._waiting.values()), {}
            ended, size = self._ended, self._settings.records_per_reply
            for first in range(0, len(waiting), size):
                yield tuple(waiting[first : first + size])
            if ended:
                raise CallRefusedError("", "ends the stream: this peer leaves, or its reader is too slow")


class ClientStreams:
    def __init__(self, settings: GossipSettings) -> None:
        self._settings = settings
        self._streams: dict[ClientStream, None] = {}
        self._one_closed = asyncio.Event()
        self._ended = False

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def open(self) -> Iterator[ClientStream]:
        """A new stream, until the context is left; or raises a CallRefusedError."""
        if self._ended:
            raise CallRefusedError("", "leaves the run; try another peer")
        if len(self._streams) >= self._settings.max_streams:
            raise CallRefusedError("", f"has {len(self._streams)} clients already; try another peer")
        stream = ClientStream(self._settings)
        self._streams[stream] = None
        try:
            yield stream
        finally:
            del self._streams[stream]
            self._one_closed.set()

    def publish(self, record: Record) -> None:
        for stream in self._streams:
            stream.add(record)

    def end(self) -> None:
        """Ends all streams after the records that wait in them, and refuses new ones."""
        self._ended = True
        for stream in self._streams:
            stream.end()

    async def wait_closed(self) -> None:
        while self._streams:
            self._one_closed.clear()
            await self._one_closed.wait()
