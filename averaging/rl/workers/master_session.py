"""A worker's side of the stream of one master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from averaging.errors import AveragingError, ConfigError, ProtocolViolationError, printable
from averaging.rl.workers.methods import BATCH_BYTES, MESSAGE_BYTES
from averaging.rl.workers.payload import Payload, pack, unpack
from averaging.wire import workers_pb2
from averaging.wire.workers_pb2 import WorkerMessage

# Converts requests and replies to and from their messages.


PAYLOAD_BYTES = MESSAGE_BYTES - 2 * BATCH_BYTES
"""Maximum size of a request or reply; others that are smaller may be in the same message."""

MAX_HOOKS = 64
"""Maximum number of hooks before or after one request."""


def encode_payload(payload: Payload) -> workers_pb2.Payload:
    """The message of a request or reply.

    Raises:
        ConfigError: It cannot be sent, because of its data or its size.
    """
    try:
        message = _encode(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"it cannot be sent: {error}") from None
    if (nbytes := message.ByteSize()) > PAYLOAD_BYTES:
        raise ConfigError(f"it has {nbytes} bytes, and {PAYLOAD_BYTES} can be sent; give less at once")
    return message


def encode_reply(reply: Payload) -> workers_pb2.Payload:
    """The message of a reply; of one that cannot be sent, an error that says so."""
    try:
        return encode_payload(reply)
    except ConfigError as error:
        failed = Payload(reply.handler, reply.handle_name, reply.request_id, error=f"its reply is lost: {error}")
        return encode_payload(failed)


def _encode(payload: Payload) -> workers_pb2.Payload:
    return workers_pb2.Payload(
        handler=payload.handler,
        handle_name=payload.handle_name,
        request_id=payload.request_id,
        syn_reply_id=payload.syn_reply_id,
        ack_reply_id=payload.ack_reply_id,
        no_syn=payload.no_syn,
        send_time=payload.send_time,
        data=pack(payload.data),
        pre_hooks=payload.pre_hooks,
        pre_hook_data=map(pack, payload.pre_hook_data),
        post_hooks=payload.post_hooks,
        post_hook_data=map(pack, payload.post_hook_data),
        error=payload.error,
        unreachable=payload.unreachable,
    )


def decode_reply(message: workers_pb2.Payload) -> Payload:
    """The reply in a message; its data is plain.

    Raises:
        ProtocolViolationError: Data is no msgpack, or the numbers of hooks and of their data differ.
    """
    reply = decode_request(message)
    reply.data = unpack(message.data, object) if message.data else None
    return reply


def decode_request(message: workers_pb2.Payload) -> Payload:
    """The request in a message; its data is packed, see `payload.convert`.

    Raises:
        ProtocolViolationError: The numbers of hooks and of their data differ.
    """
    for hooks, data in (
        (message.pre_hooks, message.pre_hook_data),
        (message.post_hooks, message.post_hook_data),
    ):
        if len(hooks) != len(data) or len(hooks) > MAX_HOOKS:
            raise ProtocolViolationError(f"a request with {len(hooks)} hooks and data for {len(data)}")
    return Payload(
        handler=message.handler,
        handle_name=message.handle_name,
        request_id=message.request_id,
        syn_reply_id=message.syn_reply_id,
        ack_reply_id=message.ack_reply_id,
        no_syn=message.no_syn,
        send_time=message.send_time,
        data=message.data,
        pre_hooks=list(message.pre_hooks),
        pre_hook_data=list(message.pre_hook_data),
        post_hooks=list(message.post_hooks),
        post_hook_data=list(message.post_hook_data),
        error=message.error,
        unreachable=message.unreachable,
    )


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
            batch = WorkerMessage(replies=[encode_reply(message)])
            nbytes = batch.ByteSize()
            while nbytes <= BATCH_BYTES and not self._unsent.empty() and not self._closed:
                following = self._unsent.get_nowait()
                if isinstance(following, int):
                    batch.pong = following
                elif following is not None:
                    batch.replies.append(encode_reply(following))
                    nbytes += batch.replies[-1].ByteSize()
            yield batch
