"""The gRPC transport with the direct lane for the parts of a round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

from averaging.common import parse_address
from averaging.config import AUTO
from averaging.errors import PeerUnreachableError, ProtocolViolationError
from averaging.protocol import AveragingData
from averaging.transport import AveragingService, GossipService, Lane, Upload
from averaging.transport.direct.frames import BufferPool, FrameKind
from averaging.transport.direct.lanes import MAX_KNOWN, Lanes
from averaging.transport.direct.link import Link
from averaging.transport.direct.listener import Listener
from averaging.transport.direct.opening import OPEN, Grant, Request, direct_handlers, open_link
from averaging.transport.direct.streams import HeaderCache, decode_error, frame_of
from averaging.transport.grpc import GrpcTransport, check_listen


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
