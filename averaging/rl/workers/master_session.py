"""A worker's side of the stream of one master."""

from __future__ import annotations

import asyncio
from dataclasses import fields

from averaging.errors import AveragingError, ConfigError, ProtocolViolationError, printable
from averaging.rl.workers.methods import BATCH_BYTES, MESSAGE_BYTES
from averaging.rl.workers.payload import Payload, pack
from averaging.wire import workers_pb2
from averaging.wire.workers_pb2 import WorkerMessage

# Converts requests and replies to and from their messages.


PAYLOAD_BYTES = MESSAGE_BYTES - 2 * BATCH_BYTES
"""Maximum size of a request or reply; others that are smaller may be in the same message."""

MAX_HOOKS = 64
"""Maximum number of hooks before or after one request."""


_PACKED = ("data", "pre_hook_data", "post_hook_data")
_PLAIN = [field.name for field in fields(Payload) if field.name not in _PACKED]


def encode_payload(payload: Payload) -> workers_pb2.Payload:
    """The message of a request or reply.

    Raises:
        ConfigError: It cannot be sent, because of its data or its size.
    """
    try:
        message = workers_pb2.Payload(
            **{name: getattr(payload, name) for name in _PLAIN},
            data=pack(payload.data),
            pre_hook_data=map(pack, payload.pre_hook_data),
            post_hook_data=map(pack, payload.post_hook_data),
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"it cannot be sent: {error}") from None
    if (nbytes := message.ByteSize()) > PAYLOAD_BYTES:
        raise ConfigError(f"it has {nbytes} bytes, and {PAYLOAD_BYTES} can be sent; give less at once")
    return message


def encode_reply(reply: Payload) -> workers_pb2.Payload:
    """The message of a reply; of a reply that cannot be sent, an error that says so."""
    try:
        return encode_payload(reply)
    except ConfigError as error:
        return encode_payload(reply.reply(error=f"its reply is lost: {error}"))


def decode_payload(message: workers_pb2.Payload) -> Payload:
    """The request or reply in a message; its data is packed, see `payload.convert`.

    Raises:
        ProtocolViolationError: The numbers of hooks and of their data differ.
    """
    payload = Payload(**{name: getattr(message, name) for name in (*_PLAIN, *_PACKED)})
    for when in ("pre_hook", "post_hook"):
        hooks, data = list(getattr(message, f"{when}s")), list(getattr(message, f"{when}_data"))
        if len(hooks) != len(data) or len(hooks) > MAX_HOOKS:
            raise ProtocolViolationError(f"a request with {len(hooks)} hooks and data for {len(data)}")
        setattr(payload, f"{when}s", hooks)
        setattr(payload, f"{when}_data", data)
    return payload


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
        """Ends `next_message`."""
        if not self._closed:
            self._closed = True
            self._unsent.put_nowait(None)

    async def next_message(self) -> WorkerMessage | None:
        """The next message to send, with all replies that wait if they fit; None when the session is closed."""
        batch, nbytes = WorkerMessage(), 0
        unsent = await self._unsent.get()
        while unsent is not None:
            if isinstance(unsent, int):
                batch.pong = unsent
            else:
                batch.replies.append(encode_reply(unsent))
                nbytes += batch.replies[-1].ByteSize()
            # No two pongs share a message, since the master measures the time until each of them arrives.
            if batch.pong or nbytes > BATCH_BYTES or self._closed or self._unsent.empty():
                return batch
            unsent = self._unsent.get_nowait()
        return None
