"""A worker's side of the stream of one master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from averaging.errors import AveragingError, ProtocolViolationError, printable
from averaging.wire.workers_pb2 import WorkerMessage
from averaging.workers.methods import BATCH_BYTES
from averaging.workers.payload import Payload
from averaging.workers.wire_messages import encode_payload

MAX_UNSENT = 1 << 17
"""Messages for a master that does not read them, after which its stream is closed."""


class MasterSession:
    """The stream of one master.

    Attributes:
        master: Random name of the master's process. Whoever knows it can take the place of that master.
        alias: Its first characters, which others may see.
        since: When it attached, in the running loop's time.
        heard: When its last message came.
        failure: Why the stream is closed, if that is the master's fault.
        ends: Whether the master sends no further messages, and waits only for the replies to those that it has sent.
    """

    def __init__(self, master: str, now: float) -> None:
        self.master = master
        self.alias = printable(master[:8])
        self.since = self.heard = now
        self.failure: AveragingError | None = None
        self.ends = False
        self._closed = False
        self._unsent: asyncio.Queue[Payload | int | None] = asyncio.Queue()

    def lives(self, now: float, silence: float) -> bool:
        """Whether the stream is open in both directions and the master was heard within `silence` seconds."""
        return not self._closed and not self.ends and now - self.heard <= silence

    def send(self, message: Payload | int) -> None:
        """Sends a reply, or the answer to a ping."""
        if self._unsent.qsize() >= MAX_UNSENT:
            self.failure = ProtocolViolationError("the master does not read its replies")
            self.close()
        if not self._closed:
            self._unsent.put_nowait(message)

    def close(self) -> None:
        """Ends `messages`."""
        if not self._closed:
            self._closed = True
            self._unsent.put_nowait(None)

    async def messages(self) -> AsyncGenerator[WorkerMessage, None]:
        """The messages to send, until the session is closed."""
        while (message := await self._unsent.get()) is not None:
            if isinstance(message, int):
                yield WorkerMessage(pong=message)
                continue
            batch = WorkerMessage(replies=[encode_payload(message)])
            nbytes = batch.ByteSize()
            while nbytes <= BATCH_BYTES and not self._unsent.empty() and not self._closed:
                following = self._unsent.get_nowait()
                if isinstance(following, int):
                    batch.pong = following
                elif following is not None:
                    batch.replies.append(encode_payload(following))
                    nbytes += batch.replies[-1].ByteSize()
            yield batch
