"""Tells fresh records to the other members at once, down the tree that `spread` cuts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from averaging.discovery.gossip.membership import Membership
from averaging.discovery.gossip.record import Reason
from averaging.discovery.gossip.settings import CALL_FAILURES, GossipSettings, why_failed
from averaging.protocol.messages import Record, Refusal, Rumour
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)

_Place = tuple[str, str, bytes]

_FEW = 1024  # places of which it is remembered without further thought what was told


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Records for a range of peers, and who could still be asked to tell them."""

    start: int
    end: int
    records: tuple[Record, ...]
    candidates: Iterator[str]


@dataclass(slots=True)
class _Line:
    """What waits for one peer, and the call to it that is under way."""

    waiting: list[_Parcel] = field(default_factory=list)
    call: asyncio.Lock = field(default_factory=asyncio.Lock)


class Rumours:
    """What this peer still has to tell.

    Args:
        clock: seconds since the epoch.
        on_refused: is told who refused which records, but for those that had expired by then.
    """

    def __init__(
        self,
        transport: Transport,
        run_id: str,
        members: Membership,
        settings: GossipSettings,
        clock: Callable[[], float],
        on_refused: Callable[[str, tuple[Refusal, ...]], None],
    ) -> None:
        self._transport = transport
        self._run_id = run_id
        self._members = members
        self._settings = settings
        self._clock = clock
        self._on_refused = on_refused
        self._outbox: dict[tuple[int, int], dict[_Place, Record]] = {}
        self._ready = asyncio.Event()
        self._lines: dict[str, _Line] = {}
        self._told: dict[_Place, Record] = {}
        self._prune_at = _FEW

    def tell(self, record: Record, start: int, end: int) -> None:
        """Has `record` told to the range [start, end] of the ring, with the next tick.

        Every version is told at most once by this peer, so that nobody can make the run repeat itself without end.
        """
        place = (record.key, record.subkey, record.owner)
        told = self._told.get(place)
        if told is not None and told.version >= record.version:
            return
        self._told[place] = record
        if len(self._told) > self._prune_at:
            now = self._clock()
            self._told = {p: r for p, r in self._told.items() if r.expiration > now}
            self._prune_at = max(_FEW, 2 * len(self._told))
        self._outbox.setdefault((start, end), {})[place] = record
        self._ready.set()

    async def run(self, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Sends what there is to tell, every tick; `spawn` makes tasks."""
        while True:
            await self._ready.wait()
            await asyncio.sleep(self._settings.tick)
            if parcels := self._take():
                spawn(self._send_all(parcels))

    async def flush(self) -> None:
        """Sends what there is to tell and waits until it has been taken."""
        await self._send_all(self._take())

    async def push(self, endpoint: str, records: list[Record]) -> None:
        """Sends records to one peer that need not pass them on.

        Raises:
            TransportError, ProtocolViolationError, TimeoutError: the call failed.
        """
        await self._push(endpoint, [Rumour(record) for record in records])

    def _take(self) -> list[_Parcel]:
        self._ready.clear()
        outbox, self._outbox = self._outbox, {}
        return [
            _Parcel(branch.start, branch.end, tuple(records.values()), iter(branch.candidates))
            for (start, end), records in outbox.items()
            for branch in self._members.branches(start, end, self._settings.fanout)
        ]

    async def _send_all(self, parcels: list[_Parcel]) -> None:
        try:
            async with asyncio.timeout(self._settings.rumour_patience):
                await self._send(parcels)
        except TimeoutError:
            logger.debug("some members did not take a fresh record in time; they will hear of it by exchange")

    async def _send(self, parcels: list[_Parcel]) -> None:
        """Sends each parcel to its next candidate; those for the same one go together."""
        by_target: dict[str, list[_Parcel]] = {}
        for parcel in parcels:
            target = next(parcel.candidates, None)
            if target is not None:
                by_target.setdefault(target, []).append(parcel)
        async with asyncio.TaskGroup() as tasks:
            for target, load in by_target.items():
                tasks.create_task(self._deliver(target, load))

    async def _deliver(self, target: str, parcels: list[_Parcel]) -> None:
        """Sends parcels to `target`. One call to it is under way at a time; what comes meanwhile goes with the next."""
        line = self._lines.setdefault(target, _Line())
        line.waiting += parcels
        try:
            async with line.call:
                load, line.waiting = line.waiting, []
                if not load:
                    return  # they went with others
                try:
                    await self._push(
                        target, [Rumour(r, parcel.start, parcel.end) for parcel in load for r in parcel.records]
                    )
                    return
                except CALL_FAILURES as error:
                    logger.debug("%s did not take a rumour: %s", target, error)
                    self._members.suspect(target, self._clock(), why_failed(error))
        finally:
            # Who loses patience in the line takes its parcels along: nobody may come to that target any more.
            own = set(map(id, parcels))
            line.waiting = [parcel for parcel in line.waiting if id(parcel) not in own]
            if not line.waiting and not line.call.locked() and self._lines.get(target) is line:
                del self._lines[target]
        await self._send(load)

    async def _push(self, target: str, rumours: list[Rumour]) -> None:
        size = self._settings.rumours_per_push
        for first in range(0, len(rumours), size):
            load = tuple(rumours[first : first + size])
            async with asyncio.timeout(self._settings.push_timeout):
                refused = await self._transport.push(target, self._run_id, load)
            if refused := self._without_expired(refused, load):
                self._on_refused(target, refused)

    def _without_expired(self, refused: tuple[Refusal, ...], load: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        """The refusals but those of records that have expired on their way; of others it is a matter of the clocks."""
        if not refused:
            return ()
        still = self._clock() + self._settings.limits.clock_tolerance
        on_the_way = {(one.record.key, one.record.subkey) for one in load if one.record.expiration <= still}
        return tuple(one for one in refused if one.reason != Reason.EXPIRED or (one.key, one.subkey) not in on_the_way)
