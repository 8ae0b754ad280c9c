"""Creates the transport of a peer from its options."""

from __future__ import annotations

from collections.abc import Sequence

from averaging.config import PeerConfig
from averaging.protocol.group import Mode
from averaging.security.credentials import Credentials
from averaging.transport.base import Transport
from averaging.transport.direct import DirectTransport
from averaging.transport.grpc import GrpcTransport
from averaging.transport.rpc_methods import RpcService


def make_transport(config: PeerConfig, credentials: Credentials, services: Sequence[RpcService]) -> Transport:
    """Creates a transport over gRPC, with the direct lane unless `config` switches it off."""
    listen = None if config.mode is Mode.CLIENT else config.listen
    # A part and its codec's tables, a few hundred records of discovery, or the largest metadata of a state.
    most = 2 * config.part_size_bytes + (32 << 20)
    if config.direct_listen is None:
        return GrpcTransport(
            listen,
            config.advertise,
            max_message_bytes=most,
            credentials=credentials,
            given=config.join,
            services=services,
        )
    return DirectTransport(
        listen,
        config.advertise,
        direct_listen=config.direct_listen,
        direct_advertise=config.direct_advertise,
        max_part_bytes=2 * config.part_size_bytes + (64 << 10),
        max_message_bytes=most,
        credentials=credentials,
        given=config.join,
        services=services,
    )
