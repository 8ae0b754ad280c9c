"""The direct connections to other peers: opened before they are needed, kept over rounds, and asked for again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from averaging.common import CLIENT_PREFIX, backoff_delay, is_endpoint
from averaging.errors import AveragingError, RefusalCause, refusal_cause
from averaging.transport.direct.link import Link
from averaging.transport.direct.sealing import MAX_SEALED_BYTES
from averaging.transport.grpc import IDLE_SECONDS

logger = logging.getLogger("averaging.transport")

MAX_IDLE = 256
"""Connections that are kept without a stream. Of more, the least recently used is closed."""

MAX_KNOWN = 4096
"""Peers about which something is remembered, such as that they have no direct lane."""

MAX_AGE_SECONDS = 86400.0
"""A connection is replaced after this time, so that certificates and tokens are checked again."""

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 10.0, 600.0
"""Pause after a failure; it doubles with each further one."""

FOREIGN_PAUSE_SECONDS = 3600.0
"""Pause after a peer has answered that it has no direct lane. Another peer may come to the same address later."""

NOT_OPEN = "the direct connection was not open yet"
NOT_SERVED = "it has no direct lane"
IN_USE = "the direct connection was in use"


@dataclass(slots=True)
class _Lane:
    """What is known about one peer; times are of the running loop."""

    link: Link | None = None
    opening: asyncio.Task[None] | None = None
    busy: bool = False  # with a stream
    opened: float = 0.0
    used: float = 0.0  # when the last stream ended
    failures: int = 0  # in a row
    retry_at: float = 0.0
    reason: str = NOT_OPEN  # why there is no connection


class Lanes:
    """The connections of one peer to others, each opened by `open_link`."""

    def __init__(self, open_link: Callable[[str], Awaitable[Link]]) -> None:
        self._open_link = open_link
        self._lanes: dict[str, _Lane] = {}  # least recently used first
        self._closed = False

    def prepare(self, endpoint: str) -> None:
        """Begins to open a connection, if there is none and it is time to ask."""
        if self._closed or endpoint.startswith(CLIENT_PREFIX) or not is_endpoint(endpoint):
            return
        lane = self._touch(endpoint)
        now = asyncio.get_running_loop().time()
        if lane.busy or lane.opening is not None:
            return
        if lane.link is not None:
            if not self._is_old(lane, lane.link, now):
                return
            lane.link.close()
            lane.link = None
        if now >= lane.retry_at:
            lane.opening = asyncio.create_task(self._open(endpoint, lane))

    def is_ready(self, endpoint: str) -> bool:
        """Whether there is a connection to `endpoint` that can be taken; if not, `reason` says why."""
        lane = self._lanes.get(endpoint)
        if lane is None or lane.busy or lane.link is None:
            return False
        if not lane.link.is_idle or self._is_old(lane, lane.link, asyncio.get_running_loop().time()):
            lane.link.close()
            self._forget_link(lane, NOT_OPEN)
            return False
        return True

    def take(self, endpoint: str) -> Link | None:
        """Takes the connection to `endpoint` for one stream; None if there is none."""
        if not self.is_ready(endpoint):
            return None
        lane = self._touch(endpoint)
        lane.busy = True
        return lane.link

    def reason(self, endpoint: str) -> str:
        """Why `is_ready` returns False."""
        lane = self._lanes.get(endpoint)
        if lane is None:
            return NOT_OPEN
        return IN_USE if lane.busy else lane.reason

    def give_back(self, endpoint: str, link: Link) -> None:
        """Returns a connection after a stream. If it was lost, the next one is asked for after a pause."""
        lane = self._lanes.get(endpoint)
        if lane is None or lane.link is not link:
            return
        now = asyncio.get_running_loop().time()
        lane.busy, lane.used = False, now
        if link.lost:
            self._fail(lane, f"the direct connection had ended: {link.lost}", now)
        else:
            lane.failures = 0
        self._close_unused()

    async def close(self) -> None:
        self._closed = True
        lanes, self._lanes = list(self._lanes.values()), {}
        opening = [lane.opening for lane in lanes if lane.opening is not None]
        for task in opening:
            task.cancel()
        for lane in lanes:
            if lane.link is not None:
                lane.link.close()
        if opening:
            await asyncio.wait(opening)

    async def _open(self, endpoint: str, lane: _Lane) -> None:
        loop = asyncio.get_running_loop()
        lane.reason = NOT_OPEN
        try:
            link = await self._open_link(endpoint)
        except AveragingError as error:
            if refusal_cause(error) is RefusalCause.NOT_SERVED:
                lane.reason, lane.retry_at = error.reason, loop.time() + FOREIGN_PAUSE_SECONDS
            else:
                self._fail(lane, error.reason, loop.time())
                logger.info("no direct connection to %s: %s", endpoint, lane.reason)
        else:
            lane.link, lane.opened, lane.used = link, loop.time(), loop.time()
            link.on_lost = lambda: self._lost(lane, link)
            self._close_unused()
        finally:
            lane.opening = None

    def _lost(self, lane: _Lane, link: Link) -> None:
        if lane.link is link and not lane.busy:
            self._forget_link(lane, f"the direct connection had ended: {link.lost}")

    def _fail(self, lane: _Lane, reason: str, now: float) -> None:
        lane.retry_at = now + backoff_delay(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, lane.failures)
        lane.failures += 1
        self._forget_link(lane, reason)

    @staticmethod
    def _forget_link(lane: _Lane, reason: str) -> None:
        lane.link, lane.reason = None, reason

    @staticmethod
    def _is_old(lane: _Lane, link: Link, now: float) -> bool:
        worn = link.ciphers is not None and link.ciphers.nbytes > MAX_SEALED_BYTES
        return worn or now - lane.used > IDLE_SECONDS or now - lane.opened > MAX_AGE_SECONDS

    def _touch(self, endpoint: str) -> _Lane:
        lane = self._lanes.pop(endpoint, None) or _Lane()
        self._lanes[endpoint] = lane
        if len(self._lanes) > MAX_KNOWN:
            unused = (name for name, known in self._lanes.items() if known.link is None and known.opening is None)
            if (oldest := next(unused, endpoint)) != endpoint:
                del self._lanes[oldest]
        return lane

    def _close_unused(self) -> None:
        idle = [lane for lane in self._lanes.values() if lane.link is not None and not lane.busy]
        for lane in idle[: max(0, len(idle) - MAX_IDLE)]:
            if lane.link is not None:
                lane.link.close()
            self._forget_link(lane, NOT_OPEN)
