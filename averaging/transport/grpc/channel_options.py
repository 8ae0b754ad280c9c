"""What gRPC is told for every connection, and why."""

from __future__ import annotations

from averaging.transport.grpc.unfinished_calls import Limits

CONNECT_SECONDS = 5.0
"""Within this a connection must stand; across the world with TLS it takes one."""

KEEPALIVE_SECONDS = 20.0
"""A connection on which calls are open but nothing is said is tried this often."""

SILENCE_SECONDS = 10.0
"""A connection is lost when the other machine has acknowledged nothing for so long."""

FRAME_BYTES = (1 << 24) - 1
"""The largest frame that HTTP/2 knows: a part is one frame instead of 64, each with a header to write and to read."""

WINDOW_BYTES = 1 << 23
"""What may be on its way in one stream, or lie unread at its receiver: a link of 1 Gbit/s and 50 ms holds 6 MiB.

Fixed: to probe for it, as gRPC does by itself, costs 4 % on a fast link and begins small on a long one."""

HANDSHAKE_SECONDS = 10.0
"""Within this whoever connects must have shown that it speaks HTTP/2, and TLS where that is wanted."""

IDLE_SECONDS = 600.0
"""A connection without calls is closed after so long; the next call opens another one."""

UNUSED_SECONDS = 25.0
"""The next call opens another one as well if there was none on it for so long.

Routers and firewalls forget connections that are quiet, some after 30 s, and tell neither end: a call would wait in
vain until the connection is given up, and a round would lose the peer meanwhile."""

MAX_METADATA_BYTES = 8 << 10
"""Headers of one call; a token and gRPC's own take a tenth of it."""

MAX_STREAMS = 128
"""Calls in progress on one connection; a peer has a few in each round, and a few of discovery. More wait."""

MAX_CONNECTIONS = 4096
"""Connections of others at once: a few thousand peers are as many as discovery carries. More are turned away."""

MAX_CALLS_PER_HOST = 1024
"""Calls in progress from one address, of all services; several peers may stand behind it."""

MAX_WATCHES_PER_HOST = 16
"""Calls of `Health/Watch` in progress from one address; a monitor needs one for each service at most."""

REQUEST_SECONDS, REQUEST_BYTES_PER_SECOND = 30.0, 16 << 10
"""A request must arrive within this time, plus that of the largest request of its method at this rate."""

HELD_PER_CONNECTION, HELD_PER_HOST, HELD_IN_ALL = 64 << 20, 256 << 20, 1 << 30
"""Bytes that unfinished requests may hold, in addition to the largest message.

A connection may carry a stream of parts for each of several rounds, each with `WINDOW_BYTES` unread. While a group is
being assembled, 64 peers behind one address may have sent 3 parts of 1 MiB each. They stay unread until this peer knows
the group."""

WRITE_SECONDS, WRITE_BYTES_PER_SECOND = 60.0, 16 << 10
"""A caller that takes no message in this time, or takes it more slowly, is given up."""

UNCOMPRESSED = 1
"""gRPC's bit set of the ways to compress whole messages, here none: tensors have codecs of their own."""

Options = list[tuple[str, int]]


def server_options(max_message_bytes: int) -> Options:
    """For the listening side."""
    return [
        *_common(max_message_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", _milliseconds(HANDSHAKE_SECONDS)),
        ("grpc.max_connection_idle_ms", _milliseconds(IDLE_SECONDS)),
        ("grpc.so_reuseport", 0),  # else two processes share a port, each with half of the connections
        # It takes pings as often as others send them; by default, once in 5 minutes, it would end a quiet call.
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(KEEPALIVE_SECONDS / 2)),
    ]


def held_limits(max_message_bytes: int) -> Limits:
    """For unfinished requests to the listening side."""
    return Limits(*(most + max_message_bytes for most in (HELD_PER_CONNECTION, HELD_PER_HOST, HELD_IN_ALL)))


def channel_options(max_message_bytes: int) -> Options:
    """For the calling side."""
    return [
        *_common(max_message_bytes),
        ("grpc.enable_http_proxy", 0),  # proxies are for the web; peers are reached directly
        ("grpc.service_config_disable_resolution", 1),  # and DNS tells addresses only
        ("grpc.use_local_subchannel_pool", 1),  # else the back-off after a failure outlives the channel
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
        # Else 34 KiB of gzip, which gRPC unpacks by itself, would become 34 MiB here, as often as somebody likes.
        ("grpc.compression_enabled_algorithms_bitset", UNCOMPRESSED),
        # Up to the first they pass, above the second they do not, and between the two chance decides.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", _milliseconds(KEEPALIVE_SECONDS)),
        # gRPC makes it the socket's TCP_USER_TIMEOUT: the kernel's acknowledgements count. The answer to a ping may
        # take a minute, for it waits behind the parts that a slow link has not sent yet.
        ("grpc.keepalive_timeout_ms", _milliseconds(SILENCE_SECONDS)),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
        ("grpc.http2.max_frame_size", FRAME_BYTES),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
    ]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
