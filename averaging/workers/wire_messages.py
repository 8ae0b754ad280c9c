"""Converts requests and replies to and from their messages."""

from __future__ import annotations

from averaging.errors import ProtocolViolationError
from averaging.wire import workers_pb2
from averaging.workers.payload import Payload, pack, unpack

MAX_HOOKS = 64
"""Maximum number of hooks before or after one request."""


def encode_payload(payload: Payload) -> workers_pb2.Payload:
    """The message of a request or reply."""
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
