"""Every method of the wire, for both sides: its path, and how its messages are encoded and decoded.

gRPC passes only bytes, so that malformed messages are detected here. gRPC itself would answer UNKNOWN or return None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from averaging.transport.grpc import channel_options as message_limits
from averaging.transport.grpc import conversion, status_conversion
from averaging.transport.grpc import status_conversion as receipt_conversion

Request = TypeVar("Request")
Reply = TypeVar("Reply")

AVERAGING = "DecentralizedAveraging"
GOSSIP = "averaging.gossip.v1.Gossip"
STATUS = "averaging.status.v1.Status"


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Reply]):
    """One method of a service.

    Attributes:
        max_request_bytes: longer requests are refused before they are decoded; with None the limit of all messages.
        max_reply_bytes: the same for replies.
    """

    service: str
    name: str
    encode_request: Callable[[Request], bytes]
    decode_request: Callable[[bytes], Request]
    encode_reply: Callable[[Reply], bytes]
    decode_reply: Callable[[bytes], Reply]
    max_request_bytes: int | None = message_limits.SMALL_BYTES
    max_reply_bytes: int | None = None

    def read_request(self, raw: bytes) -> Request:
        """Decodes a request of another peer.

        Raises:
            ProtocolViolationError: the request is too long or malformed.
        """
        return self.decode_request(message_limits.short(raw, self.max_request_bytes, self.path))

    def read_reply(self, raw: bytes) -> Reply:
        """Decodes a reply of another peer.

        Raises:
            ProtocolViolationError: the reply is too long or malformed.
        """
        return self.decode_reply(message_limits.short(raw, self.max_reply_bytes, self.path))

    @property
    def path(self) -> str:
        """The path in HTTP/2, such as `/averaging.gossip.v1.Gossip/Push`."""
        return f"/{self.service}/{self.name}"


JOIN_GROUP = Method(
    AVERAGING,
    "rpc_join_group",
    conversion.encode_join_request,
    conversion.decode_join_request,
    conversion.encode_message_from_leader,
    conversion.decode_message_from_leader,
    max_request_bytes=message_limits.JOIN_BYTES,
)
AGGREGATE_PART = Method(
    AVERAGING,
    "rpc_aggregate_part",
    conversion.encode_averaging_data,
    conversion.decode_averaging_data,
    conversion.encode_averaging_data,
    conversion.decode_averaging_data,
    max_request_bytes=None,
)
DOWNLOAD_STATE = Method(
    AVERAGING,
    "rpc_download_state",
    conversion.encode_nothing,
    conversion.decode_nothing,
    conversion.encode_download_data,
    conversion.decode_download_data,
)
EXCHANGE = Method(
    GOSSIP,
    "Exchange",
    conversion.encode_digest,
    conversion.decode_digest,
    conversion.encode_exchange_reply,
    conversion.decode_exchange_reply,
    max_request_bytes=message_limits.DIGEST_BYTES,
    max_reply_bytes=message_limits.RECORDS_BYTES,
)
PUSH = Method(
    GOSSIP,
    "Push",
    conversion.encode_rumours,
    conversion.decode_rumours,
    conversion.encode_refusals,
    conversion.decode_refusals,
    max_request_bytes=message_limits.RECORDS_BYTES,
    max_reply_bytes=message_limits.REFUSALS_BYTES,
)
SUBSCRIBE = Method(
    GOSSIP,
    "Subscribe",
    conversion.encode_digest,
    conversion.decode_digest,
    conversion.encode_records,
    conversion.decode_records,
    max_request_bytes=message_limits.DIGEST_BYTES,
    max_reply_bytes=message_limits.RECORDS_BYTES,
)
LIST_RECORDS = Method(
    GOSSIP,
    "ListRecords",
    conversion.encode_key,
    conversion.decode_key,
    conversion.encode_records,
    conversion.decode_records,
)
GET_STATUS = Method(
    STATUS,
    "GetStatus",
    conversion.encode_nothing,
    conversion.decode_nothing,
    status_conversion.encode_status,
    status_conversion.decode_status,
)
WATCH_ROUNDS = Method(
    STATUS,
    "WatchRounds",
    receipt_conversion.encode_watch_request,
    receipt_conversion.decode_watch_request,
    receipt_conversion.encode_watched,
    receipt_conversion.decode_watched,
)
GET_SCHEMA = Method(
    STATUS,
    "GetSchema",
    conversion.encode_nothing,
    conversion.decode_nothing,
    status_conversion.encode_schema,
    status_conversion.decode_schema,
)

REQUEST_BYTES: Mapping[str, int | None] = {
    method.path: method.max_request_bytes
    for method in (
        JOIN_GROUP,
        AGGREGATE_PART,
        DOWNLOAD_STATE,
        EXCHANGE,
        PUSH,
        SUBSCRIBE,
        LIST_RECORDS,
        GET_STATUS,
        WATCH_ROUNDS,
        GET_SCHEMA,
    )
}
"""The `max_request_bytes` of every method, by path."""
