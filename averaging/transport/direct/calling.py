"""Sends one stream of parts over a connection, and yields the replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from averaging.errors import PeerUnreachableError, ProtocolViolationError
from averaging.protocol.messages import AveragingData
from averaging.transport.direct.frames import Frame, Kind
from averaging.transport.direct.heads import Heads, decode_error, encode_head
from averaging.transport.direct.link import Link

FRAMES_AT_ONCE = 16
"""Frames that are sent before other tasks of the event loop get a chance."""


async def call(
    link: Link, endpoint: str, messages: AsyncIterator[AveragingData], heads: Heads
) -> AsyncGenerator[AveragingData, None]:
    """Sends `messages` from a background task and yields the replies. `messages` is closed with the call.

    The connection is closed unless both sides have ended the stream in order.

    Raises:
        PeerUnreachableError: the connection was lost.
        CallRefusedError: the callee ended the stream with an error.
        ProtocolViolationError: an answer is malformed.
        Exception: of `messages`.
    """
    upload = _Upload(link, messages)
    in_order = averaged = False
    try:
        while (frame := await _next(link, upload)).kind is Kind.PART:
            try:
                reply = heads.decode(frame.head, frame.body)
            except ProtocolViolationError as error:
                raise ProtocolViolationError(f"{endpoint} answered with {error}") from None
            del frame  # its buffer may be used again when the reply is not needed any more
            averaged = averaged or reply.tensor_part is not None
            yield reply
            del reply
        if frame.kind is Kind.ERROR:
            in_order = True
            raise decode_error(endpoint, frame.head)
        if frame.kind is not Kind.END:
            raise ProtocolViolationError(f"{endpoint} answered with {frame.kind.name} in a stream of parts")
        in_order = True
    finally:
        link.spent = in_order and not averaged  # see `serve_stream`
        if not in_order or not upload.ended:
            link.close(abort=True)
        await upload.close()


async def _next(link: Link, upload: _Upload) -> Frame:
    try:
        return await link.read()
    except PeerUnreachableError:
        if upload.failure is not None:
            raise upload.failure from None
        raise


class _Upload:
    """Sends messages as fast as the connection takes them.

    Attributes:
        ended: whether all were sent.
        failure: the exception of the iterator of messages, which closes the connection.
    """

    def __init__(self, link: Link, messages: AsyncIterator[AveragingData]) -> None:
        self.ended = False
        self.failure: Exception | None = None
        self._link = link
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._run(messages))

    async def _run(self, messages: AsyncIterator[AveragingData]) -> None:
        link = self._link
        try:
            sent = 0
            async for message in messages:
                body = b"" if message.tensor_part is None else message.tensor_part.buffer
                await link.send(Kind.PART, encode_head(message), body)
                sent += 1
                if sent % FRAMES_AT_ONCE == 0:
                    await asyncio.sleep(0)  # small frames may never have to wait for the socket
            await link.send(Kind.END)
            self.ended = True
        except PeerUnreachableError:
            return  # the reader gets the reason
        except Exception as error:
            self.failure = error
            link.close(abort=True)
        finally:
            if isinstance(messages, AsyncGenerator):
                await messages.aclose()

    async def close(self) -> None:
        """Ends the upload. Its task keeps its exception, whose frames keep this object, so both are dropped."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self.failure = None
