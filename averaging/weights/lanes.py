"""Connections on which versions are received. They stay open between versions, and are fast when one comes."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from averaging.errors import AveragingError
from averaging.rpc import RpcChannel
from averaging.weights.layout import MAX_WARM_BYTES, WARM
from averaging.wire import weights_pb2 as wire

logger = logging.getLogger("averaging.weights")

LANES = 4
"""Connections on which one version is received. The system lets one connection have a few MiB under way, which carries
450 Mbit/s over 50 ms."""

BYTES_PER_LANE = 8 << 20
"""A further connection is used for so many bytes, if nothing is known about the way to a source."""

KEEP_SECONDS = 12.0
"""Interval at which unused connections get a call. Without one for 25 s they would be replaced by new ones, which are
slow at first."""

WARM_SECONDS = 10.0
"""Limit for the warming of the connections to one source."""

SHORT_WAY = 0.004
"""Seconds of a round trip below which nothing is gained."""

FIRST_BYTES = 128 << 10
"""Bytes of the first step. Each further step has twice as many, so that TCP's window can grow."""

BUSY_TRIPS = 4.0
"""A step that takes so many round trips was limited by the link, and not by the window of the connection."""


class Dial(Protocol):
    """How connections are opened."""

    def __call__(self, endpoint: str, *, loopback: bool) -> RpcChannel:
        """Opens a connection, see `FollowerOptions.dial`."""


@dataclass(frozen=True, slots=True)
class Way:
    """What is known about the way to a source.

    Attributes:
        round_trip: seconds.
        rate: bytes/s that came over it; infinite if the way is short.
        lanes: connections that it takes to fill it.
    """

    round_trip: float
    rate: float
    lanes: int


class SourceLanes:
    """The connections to all sources of one follower.

    Args:
        run_id: the run that is followed.
        dial: opens them.
    """

    def __init__(self, run_id: str, dial: Dial) -> None:
        self._run_id, self._dial = run_id, dial
        self._open: dict[str, list[RpcChannel]] = {}
        self._ways: dict[str, Way] = {}

    @property
    def rate(self) -> int:
        """Bytes/s that came from a source at best; 0 if that is not known."""
        rates = [way.rate for way in self._ways.values() if math.isfinite(way.rate)]
        return round(max(rates, default=0.0))

    def to(self, endpoint: str, count: int, *, loopback: bool) -> list[RpcChannel]:
        """So many connections to a source, which belong to this object."""
        lanes = self._open.setdefault(endpoint, [])
        while len(lanes) < count:
            lanes.append(self._dial(endpoint, loopback=loopback))
        return lanes[:count]

    def count_for(self, endpoint: str, expected: int) -> int:
        """How many connections a version of so many bytes takes."""
        way, enough = self._ways.get(endpoint), max(1, expected // BYTES_PER_LANE)
        most = LANES if way is None else way.lanes
        return most if way is not None and expected > FIRST_BYTES * most else min(most, enough)

    async def warm(self, endpoint: str, most: int, *, loopback: bool) -> None:
        """Makes the connections to a source fast, or keeps those that are."""
        try:
            async with asyncio.timeout(WARM_SECONDS):
                if endpoint in self._ways:
                    await asyncio.gather(*(self._step(lane, 0) for lane in self._open.get(endpoint, [])))
                else:
                    self._ways[endpoint] = await self._warm_all(endpoint, most, loopback=loopback)
        except (AveragingError, TimeoutError) as error:
            logger.debug("%s: the connections are not warm: %s", endpoint, error)

    async def _warm_all(self, endpoint: str, most: int, *, loopback: bool) -> Way:
        (first,) = self.to(endpoint, 1, loopback=loopback)
        await self._step(first, 0)
        trip = min([await self._step(first, 0) for _ in range(2)])
        if trip < SHORT_WAY:
            return Way(trip, math.inf, LANES)
        rate, limited = await self._grow(first, most, trip)
        if limited:
            return Way(trip, rate, 1)
        further = self.to(endpoint, LANES, loopback=loopback)[1:]
        await asyncio.gather(*(self._step(lane, 0) for lane in further))
        grown = await asyncio.gather(*(self._grow(lane, most, trip) for lane in further))
        return Way(trip, rate + sum(each for each, _ in grown), LANES)

    async def _grow(self, lane: RpcChannel, most: int, trip: float) -> tuple[float, bool]:
        """Receives more and more. Returns the rate, and whether the link limits it and not the window."""
        nbytes = FIRST_BYTES
        while True:
            seconds = await self._step(lane, nbytes)
            rate = nbytes / max(seconds - trip, trip / 4)
            if seconds > BUSY_TRIPS * trip:
                return rate, True
            if nbytes >= min(most, MAX_WARM_BYTES):
                return rate, False
            nbytes *= 2

    async def _step(self, lane: RpcChannel, nbytes: int) -> float:
        """Returns the seconds of a request for so many bytes."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        request = wire.WarmRequest(run_id=self._run_id, bytes=min(nbytes, MAX_WARM_BYTES))
        async with aclosing(lane.stream(WARM, request)) as fillers:
            async for _ in fillers:
                pass
        return clock() - begun

    async def keep(self, endpoints: Collection[str]) -> None:
        """Closes the connections to other sources than these."""
        for endpoint in self._open.keys() - endpoints:
            self._ways.pop(endpoint, None)
            for lane in self._open.pop(endpoint):
                await lane.close()

    async def close(self) -> None:
        """Closes all connections."""
        await self.keep(())
