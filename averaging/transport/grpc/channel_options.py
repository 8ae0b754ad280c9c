"""The gRPC options of every connection, with the reason for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from averaging.errors import ProtocolViolationError
from averaging.protocol import MAX_GROUP_SIZE, JoinRequest, Resume

CONNECT_SECONDS = 5.0  # time limit for a new connection. Between continents, with TLS, it takes about one second.
KEEPALIVE_SECONDS = 20.0  # interval of the pings on a connection with open calls but no traffic
SILENCE_SECONDS = 10.0  # A connection is lost when the other machine acknowledges nothing for this time

FRAME_BYTES = (1 << 24) - 1  # the largest frame of HTTP/2. A part of 1 MiB then travels in one frame instead of 64

WINDOW_BYTES = 1 << 23
"""Bytes of one stream that may be in flight or unread at the receiver. A link of 1 Gbit/s and 50 ms holds 6 MiB.

gRPC would otherwise estimate the window. That costs 4 % on a fast link, and starts with a small one on a long link."""

HANDSHAKE_SECONDS = 10.0  # time limit for the TLS and HTTP/2 handshake of an incoming connection
IDLE_SECONDS = 600.0  # A connection without calls is closed after this time. The next call opens a new one.

UNUSED_SECONDS = 25.0
"""A call also opens a new connection if the present one has had no call for this time.

Some routers and firewalls drop idle connections silently after 30 s. A call on such a connection gets no answer until
the connection is declared lost, and the round would drop the peer in the meantime."""

MAX_METADATA_BYTES = 8 << 10
"""Maximum size of the headers of one call. A token and the headers of gRPC take a tenth of it."""

MAX_STREAMS = 128
"""Maximum number of calls in progress on one connection; further calls wait. A peer needs a few per round."""

MAX_CONNECTIONS = 4096
"""Maximum number of incoming connections; further ones are refused. Discovery is made for a few thousand peers."""

MAX_CALLS_PER_HOST = 1024  # maximum number of calls in progress from one address, which several peers may share
REQUEST_SECONDS = 420.0  # time limit for a request to arrive: that of the largest one, 6 MiB of records, at 16 KiB/s

WRITE_SECONDS, WRITE_BYTES_PER_SECOND = 60.0, 16 << 10
"""A caller is disconnected if it does not read a message within this time plus the time of its bytes at this rate."""

UNCOMPRESSED = 1
"""gRPC's bit set of the enabled compression algorithms: only "none", because tensors have their own codecs."""

Options = list[tuple[str, int]]


def server_options(max_message_bytes: int) -> Options:
    return [
        *_common(max_message_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", _milliseconds(HANDSHAKE_SECONDS)),
        ("grpc.max_connection_idle_ms", _milliseconds(IDLE_SECONDS)),
        ("grpc.so_reuseport", 0),  # otherwise two processes could share a port and split its connections
        # Peers ping every `KEEPALIVE_SECONDS`; with the default minimum of 5 minutes gRPC would close the connection.
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(KEEPALIVE_SECONDS / 2)),
    ]


def channel_options(max_message_bytes: int) -> Options:
    return [
        *_common(max_message_bytes),
        ("grpc.service_config_disable_resolution", 1),  # DNS supplies addresses only
        ("grpc.use_local_subchannel_pool", 1),  # otherwise the back-off after a failure outlives the channel
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        # In spite of its name, this is the time limit for a connection to be established.
        ("grpc.min_reconnect_backoff_ms", _milliseconds(CONNECT_SECONDS)),
    ]


def _common(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Otherwise gRPC would unpack 34 KiB of gzip to 34 MiB, for any caller.
        ("grpc.compression_enabled_algorithms_bitset", UNCOMPRESSED),
        # gRPC accepts up to the first, refuses above the second, and decides at random in between.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", _milliseconds(KEEPALIVE_SECONDS)),
        # gRPC sets it as TCP_USER_TIMEOUT, so the acknowledgements of the kernel count. The answer to a ping may take a
        # minute, because it waits behind the parts that a slow link has not sent yet.
        ("grpc.keepalive_timeout_ms", _milliseconds(SILENCE_SECONDS)),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
        ("grpc.http2.max_frame_size", FRAME_BYTES),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
    ]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


# Limits on the content of messages, checked before Python objects are made of the items.
#
# A message of 30 MiB can contain 15 million empty items, which would block a peer for half a minute and use gigabytes.


Items = TypeVar("Items", bound=Sequence[object])

MAX_RECORDS = 1 << 15  # records of discovery, or entries of a digest: twice the number that a peer holds
MAX_RUMOURS = 1 << 10  # records in a push
MAX_RECEIPTS = 64  # in one answer
MAX_COUNTS = 64  # outcomes, phases, lanes or causes in the totals of a peer
MAX_MEMBERS = 1 << 14  # of a group: the maximum number of peers with records
MAX_DIMENSIONS = 64  # of a tensor: PyTorch's limit
MAX_TENSORS = 1 << 18  # of a schema
SMALL_BYTES = 64 << 10  # a request with few or no fields
JOIN_BYTES = 128 << 10  # a join request, with 64 KiB of `gather`
DIGEST_BYTES = 1 << 20  # `MAX_RECORDS` entries of 22 bytes, and two names
RECORDS_BYTES = 6 << 20  # `MAX_RUMOURS` records of maximum size: 1 KiB of value, 4 KiB of signature, two names
REFUSALS_BYTES = 1 << 20  # `MAX_RUMOURS` times two names and a reason


def check_count(items: Items, most: int, what: str) -> Items:
    if len(items) > most:
        raise ProtocolViolationError(f"a message with {len(items)} {what}; at most {most} are accepted")
    return items


# Headers of calls, for data that the messages of the wire contract have no field for.


# the part of a state that the caller has: number of bytes, space, fingerprint of their tensors in hexadecimal
RESUME = "averaging-resume"
# minimum number of members of a group in which the caller takes part, in decimal, from 2 to 4096
MIN_GROUP_SIZE = "averaging-min-group-size"
# what the caller's tensors are named: number of names, a dash, a digest of 16 hexadecimal digits
NAMES = "averaging-names"
JOINS_TENSORS = "averaging-joins-tensors"  # `1` if the caller takes several small tensors of a state in one message
JOINS_PARTS = "averaging-joins-parts"  # `1` if the caller can send several small slices of tensors as one part
LARGE_PARTS = "averaging-large-parts"  # `1` if the caller wants parts that are larger than the schema's

_RESUME = re.compile(r"([0-9]{1,18}) ([0-9a-f]{64})")
_NUMBER = re.compile(r"[1-9][0-9]{0,3}")
_NAMES = re.compile(r"[1-9][0-9]{0,8}-[0-9a-f]{16}")
_JOINS = re.compile("1")


def of_resume(resume: Resume | None) -> tuple[tuple[str, str], ...]:
    if resume is None:
        return ()
    has = ((RESUME, f"{resume.offset} {resume.fingerprint.hex()}"),) if resume.offset else ()
    return (*has, (JOINS_TENSORS, "1")) if resume.joins else has


def read_resume(headers: Sequence[tuple[str, str | bytes]]) -> Resume | None:
    joins = _match(_JOINS, JOINS_TENSORS, headers) is not None
    match = _match(_RESUME, RESUME, headers)
    if match is None:
        return Resume(joins=True) if joins else None
    return Resume(int(match[1]), bytes.fromhex(match[2]), joins)


def of_join(request: JoinRequest) -> tuple[tuple[str, str], ...]:
    # Without any of them the minimum is 2, no tensor has a name, and no part is joined.
    size = ((MIN_GROUP_SIZE, str(request.min_group_size)),) if 2 < request.min_group_size <= MAX_GROUP_SIZE else ()
    names = ((NAMES, request.names),) if request.names else ()
    parts = ((JOINS_PARTS, request.joins_parts), (LARGE_PARTS, request.large_parts))
    return (*size, *names, *((name, "1") for name, is_so in parts if is_so))


def read_join(request: JoinRequest, headers: Sequence[tuple[str, str | bytes]]) -> JoinRequest:
    # Headers that are missing, repeated or malformed say nothing.
    size, names = _match(_NUMBER, MIN_GROUP_SIZE, headers), _match(_NAMES, NAMES, headers)
    return replace(
        request,
        min_group_size=int(size[0]) if size and 2 <= int(size[0]) <= MAX_GROUP_SIZE else 2,
        names=names[0] if names else "",
        joins_parts=_match(_JOINS, JOINS_PARTS, headers) is not None,
        large_parts=_match(_JOINS, LARGE_PARTS, headers) is not None,
    )


def _match(pattern: re.Pattern[str], header: str, headers: Sequence[tuple[str, str | bytes]]) -> re.Match[str] | None:
    values = [value for name, value in headers if name == header]
    return pattern.fullmatch(values[0]) if len(values) == 1 and isinstance(values[0], str) else None
