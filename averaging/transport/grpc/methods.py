"""Every method of the wire, once for both sides: its path, and how its request and its reply become bytes.

gRPC itself is given bytes only, so that a malformed message is seen here and not by gRPC, which would answer UNKNOWN
or hand over None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from averaging.transport.grpc import convert, convert_receipts, convert_status, counts

Request = TypeVar("Request")
Reply = TypeVar("Reply")

AVERAGING = "DecentralizedAveraging"
GOSSIP = "averaging.v1.Gossip"
STATUS = "averaging.v1.Status"


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Reply]):
    """One method of a service.

    Attributes:
        max_request_bytes: a longer request is refused before it is decoded; None is as long as messages may be.
        max_reply_bytes: likewise.
    """

    service: str
    name: str
    encode_request: Callable[[Request], bytes]
    decode_request: Callable[[bytes], Request]
    encode_reply: Callable[[Reply], bytes]
    decode_reply: Callable[[bytes], Reply]
    max_request_bytes: int | None = counts.SMALL_BYTES
    max_reply_bytes: int | None = None

    def read_request(self, raw: bytes) -> Request:
        """Decodes a request of another peer's.

        Raises:
            ProtocolViolationError: it is too long, or malformed.
        """
        return self.decode_request(counts.short(raw, self.max_request_bytes, self.path))

    def read_reply(self, raw: bytes) -> Reply:
        """Decodes a reply of another peer's.

        Raises:
            ProtocolViolationError: it is too long, or malformed.
        """
        return self.decode_reply(counts.short(raw, self.max_reply_bytes, self.path))

    @property
    def path(self) -> str:
        """As HTTP/2 carries it."""
        return f"/{self.service}/{self.name}"


JOIN_GROUP = Method(
    AVERAGING,
    "rpc_join_group",
    convert.encode_join_request,
    convert.decode_join_request,
    convert.encode_message_from_leader,
    convert.decode_message_from_leader,
    max_request_bytes=counts.JOIN_BYTES,
)
AGGREGATE_PART = Method(
    AVERAGING,
    "rpc_aggregate_part",
    convert.encode_averaging_data,
    convert.decode_averaging_data,
    convert.encode_averaging_data,
    convert.decode_averaging_data,
    max_request_bytes=None,
)
DOWNLOAD_STATE = Method(
    AVERAGING,
    "rpc_download_state",
    convert.encode_nothing,
    convert.decode_nothing,
    convert.encode_download_data,
    convert.decode_download_data,
)
EXCHANGE = Method(
    GOSSIP,
    "Exchange",
    convert.encode_digest,
    convert.decode_digest,
    convert.encode_exchange_reply,
    convert.decode_exchange_reply,
    max_request_bytes=counts.DIGEST_BYTES,
    max_reply_bytes=counts.RECORDS_BYTES,
)
PUSH = Method(
    GOSSIP,
    "Push",
    convert.encode_rumours,
    convert.decode_rumours,
    convert.encode_refusals,
    convert.decode_refusals,
    max_request_bytes=counts.RECORDS_BYTES,
    max_reply_bytes=counts.REFUSALS_BYTES,
)
SUBSCRIBE = Method(
    GOSSIP,
    "Subscribe",
    convert.encode_digest,
    convert.decode_digest,
    convert.encode_records,
    convert.decode_records,
    max_request_bytes=counts.DIGEST_BYTES,
    max_reply_bytes=counts.RECORDS_BYTES,
)
LIST_RECORDS = Method(
    GOSSIP,
    "ListRecords",
    convert.encode_key,
    convert.decode_key,
    convert.encode_records,
    convert.decode_records,
)
GET_STATUS = Method(
    STATUS,
    "GetStatus",
    convert.encode_nothing,
    convert.decode_nothing,
    convert_status.encode_status,
    convert_status.decode_status,
)
WATCH_ROUNDS = Method(
    STATUS,
    "WatchRounds",
    convert_receipts.encode_watch_request,
    convert_receipts.decode_watch_request,
    convert_receipts.encode_watched,
    convert_receipts.decode_watched,
)
GET_SCHEMA = Method(
    STATUS,
    "GetSchema",
    convert.encode_nothing,
    convert.decode_nothing,
    convert_status.encode_schema,
    convert_status.decode_schema,
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
"""The `max_request_bytes` of every method, by its path."""
