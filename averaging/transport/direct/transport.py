"""The gRPC transport with the direct lane for the parts of a round, and the connections that are kept over rounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from averaging.common import CLIENT_PREFIX, backoff_delay, is_endpoint, parse_address
from averaging.config import AUTO
from averaging.errors import AveragingError, PeerUnreachableError, ProtocolViolationError, RefusalCause, refusal_cause
from averaging.protocol import AveragingData
from averaging.transport import AveragingService, GossipService, Lane, Upload
from averaging.transport.direct.frames import MAX_SEALED_BYTES, BufferPool, FrameKind
from averaging.transport.direct.link import Link
from averaging.transport.direct.opening import OPEN, Grant, Listener, Request, direct_handlers, open_link
from averaging.transport.direct.streams import HeaderCache, decode_error, frame_of
from averaging.transport.grpc import IDLE_SECONDS, GrpcTransport, check_listen


class DirectTransport(GrpcTransport):
    """A `GrpcTransport` whose streams of parts take a direct connection where there is one."""

    def __init__(
        self,
        listen: str | None,
        advertise: str | None = None,
        *,
        direct_listen: str = AUTO,
        direct_advertise: int | None = None,
        max_part_bytes: int,  # the largest part that others may send, without what gRPC adds
        **options: Any,  # of `GrpcTransport`
    ) -> None:
        super().__init__(listen, advertise, **options)
        if direct_listen != AUTO:
            parse_address(direct_listen)
        self._direct_listen, self._direct_advertise = direct_listen, direct_advertise
        self._max_part_bytes = max_part_bytes
        self._buffers, self._heads = BufferPool(), HeaderCache()
        self._listener: Listener | None = None
        self._lanes = Lanes(self._open)
        self._last_lanes: dict[str, Lane] = {}

    async def bind(self) -> str:
        endpoint = await super().bind()
        if self._listen is not None:
            address = self._direct_listen
            if address == AUTO:
                address = f"{parse_address(self._listen)[0]}:0"
            exposed = self._sealed or self._credentials.insecure
            try:
                await check_listen(address, endpoint, exposed=exposed)
                self._listener = Listener(address, max_body=self._max_part_bytes, buffers=self._buffers)
            except BaseException:
                await super().close()
                raise
        return endpoint

    @property
    def direct_port(self) -> int:
        return 0 if self._listener is None else self._direct_advertise or self._listener.port

    async def serve(self, averaging: AveragingService, gossip: GossipService | None) -> None:
        listener = self._listener
        if listener is not None:
            listener.start(averaging)
            self._rpcs += direct_handlers(listener, lambda: self.direct_port, sealed=self._sealed)
        await super().serve(averaging, gossip)

    async def close(self, grace: float = 0.0) -> None:
        listener, self._listener = self._listener, None
        try:
            async with asyncio.TaskGroup() as tasks:
                if listener is not None:
                    tasks.create_task(listener.stop(grace))
                tasks.create_task(super().close(grace))
        finally:
            await self._lanes.close()

    def prepare_lane(self, endpoint: str) -> None:
        self._lanes.prepare(endpoint)

    def lane(self, endpoint: str) -> Lane | None:
        return self._last_lanes.get(endpoint)

    def aggregate_part(
        self, endpoint: str, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        if len(self._last_lanes) >= MAX_KNOWN:
            self._last_lanes.clear()
        if not self._lanes.is_ready(endpoint):
            self._last_lanes[endpoint] = Lane("grpc", self._lanes.reason(endpoint))
            return super().aggregate_part(endpoint, messages)
        self._last_lanes[endpoint] = Lane("sealed" if self._sealed else "direct")
        return self._call(endpoint, messages)

    async def _call(self, endpoint: str, messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        """Sends `messages` from a task of its own and yields the replies. `messages` is closed with the call.

        The connection is closed unless both sides have ended the stream in order.
        """
        link = self._lanes.take(endpoint)
        if link is None:
            raise PeerUnreachableError(endpoint, self._lanes.reason(endpoint))
        upload = Upload(
            messages,
            frame_of,
            link.send,
            partial(link.send, FrameKind.END),
            partial(link.close, abort=True),
            (PeerUnreachableError,),
        )
        upload.task = asyncio.create_task(upload.run())
        in_order = False
        try:
            while (frame := await link.read()).kind is FrameKind.PART:
                try:
                    reply = self._heads.decode(frame.head, frame.body)
                except ProtocolViolationError as error:
                    raise ProtocolViolationError(f"answered with {error}", endpoint) from None
                del frame  # its buffer may be used again when the reply is not needed any more
                yield reply
                del reply
            in_order = frame.kind in (FrameKind.ERROR, FrameKind.END)
            if frame.kind is FrameKind.ERROR:
                raise decode_error(endpoint, frame.head)
            if not in_order:
                raise ProtocolViolationError(f"answered with {frame.kind.name} in a stream of parts", endpoint)
        except PeerUnreachableError:
            if upload.failure is not None:
                raise upload.failure from None
            raise
        finally:
            if not in_order or not upload.ended:
                link.close(abort=True)
            await upload.close()
            self._lanes.give_back(endpoint, link)

    @property
    def _sealed(self) -> bool:
        return self._credentials.tls is not None

    async def _open(self, endpoint: str) -> Link:
        async def ask(request: Request) -> Grant:
            return await self._channels.call(endpoint, OPEN, request)

        return await open_link(
            endpoint,
            ask,
            self._dialling,
            sealed=self._sealed,
            max_body=self._max_part_bytes,
            buffers=self._buffers,
        )


logger = logging.getLogger("averaging.transport")

MAX_IDLE = 256  # connections that are kept without a stream. Of more, the least recently used is closed.
MAX_KNOWN = 4096  # peers about which something is remembered, such as that they have no direct lane
MAX_AGE_SECONDS = 86400.0  # A connection is replaced after this time, so that certificates and tokens are checked again
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 10.0, 600.0  # pause after a failure; it doubles with each further one

FOREIGN_PAUSE_SECONDS = 3600.0
"""Pause after a peer has answered that it has no direct lane. Another peer may come to the same address later."""

NOT_OPEN = "the direct connection was not open yet"
IN_USE = "the direct connection was in use"


@dataclass(slots=True)
class _Lane:  # what is known about one peer; times are of the running loop
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
            lane.link, lane.reason = None, NOT_OPEN
            return False
        return True

    def take(self, endpoint: str) -> Link | None:
        if not self.is_ready(endpoint):
            return None
        lane = self._touch(endpoint)
        lane.busy = True
        return lane.link

    def reason(self, endpoint: str) -> str:
        lane = self._lanes.get(endpoint)
        if lane is None:
            return NOT_OPEN
        return IN_USE if lane.busy else lane.reason

    def give_back(self, endpoint: str, link: Link) -> None:
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
            lane.link, lane.reason = None, f"the direct connection had ended: {link.lost}"

    def _fail(self, lane: _Lane, reason: str, now: float) -> None:
        lane.retry_at = now + backoff_delay(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, lane.failures)
        lane.failures += 1
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
            lane.link, lane.reason = None, NOT_OPEN
