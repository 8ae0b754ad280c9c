"""The gRPC `Transport`: one port for everything that a peer serves, and one connection to each peer that it calls."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence

from averaging.common import client_name, loopback_here, parse_address, zone_of
from averaging.errors import ClosedError, ConfigError
from averaging.protocol import (
    AveragingData,
    Digest,
    DownloadData,
    ExchangeReply,
    JoinRequest,
    MessageFromLeader,
    Record,
    Refusal,
    Resume,
    Rumour,
)
from averaging.receipts import PeerStatus, Watched
from averaging.security import Credentials
from averaging.tensors import Schema
from averaging.transport import AveragingService, GossipService, Lane, RpcHandler, RpcService, handlers_of
from averaging.transport.grpc import channel_options as headers, methods
from averaging.transport.grpc.channels import Channels
from averaging.transport.grpc.dialling import Dialling, check_listen, is_on_loopback, warn_of_loopback
from averaging.transport.grpc.error_mapping import quieten
from averaging.transport.grpc.server import Server, averaging_handlers, gossip_handlers


class GrpcTransport:
    """Implements `transport.base.Transport`. It belongs to the event loop in which `bind` is called.

    Args:
        listen: `host:port` to listen on, port 0 for a free one; None for a client, which accepts no connections.
        advertise: `host:port` at which other peers reach this peer, if it differs; port 0 for the one listened on.
        max_message_bytes: largest message sent or received; a part and a few hundred bytes must fit.
        credentials: certificates and tokens. Without them only this machine may connect.
        given: endpoints named by the user, which are always dialled. It may change.
        names: see `Dialling`.
        services: further methods to serve.
    """

    def __init__(
        self,
        listen: str | None,
        advertise: str | None = None,
        *,
        max_message_bytes: int,
        credentials: Credentials | None = None,
        given: Collection[str] = (),
        names: Mapping[str, str] | None = None,
        services: Sequence[RpcService] = (),
    ) -> None:
        if max_message_bytes < 1:
            raise ConfigError(f"max_message_bytes must be above 0, not {max_message_bytes}")
        if listen is None and advertise is not None:
            raise ConfigError(f"a client accepts no connections, so it cannot advertise {advertise}")
        for address in (listen, advertise):
            if address is not None:
                parse_address(address)
        quieten()
        self._listen, self._advertise, self._given = listen, advertise, given
        self._max_message_bytes = max_message_bytes
        self._server: Server | None = None
        self._rpcs: list[RpcHandler] = []
        self._credentials = credentials or Credentials()
        # A client has no address, so only the peers that it joins can show that the run is on loopback.
        names = {} if names is None else names  # not `or`: an empty one may be filled later
        self._dialling = Dialling(given, loopback=None if listen is None else False, names=names)
        self._channels = Channels(max_message_bytes, credentials=self._credentials, dialling=self._dialling)
        self.add_services(services)

    def add_services(self, services: Sequence[RpcService]) -> None:
        """Adds methods to serve, before the transport starts."""
        if self._listen is None and services:
            raise ConfigError("a client accepts no connections, so it cannot serve `services`; use mode 'node'")
        if self._server is not None:
            raise ConfigError("services cannot be added while calls are served; add them before `async with`")
        self._rpcs = handlers_of(services, self._rpcs)

    async def bind(self) -> str:
        tls = self._credentials.tls
        if self._listen is None:
            return client_name(os.urandom(16))
        self._listen = loopback_here(self._listen)
        await check_listen(self._listen, self._advertise, exposed=tls is not None or self._credentials.insecure)
        if self._advertise is None:
            await warn_of_loopback(self._listen, self._given)
        hosts = {parse_address(address)[0] for address in (self._listen, self._advertise) if address}
        if tls is not None:
            tls.check_host(parse_address(self._advertise or self._listen)[0])
        self._dialling.loopback = await is_on_loopback(hosts)
        self._dialling.zone = next(filter(None, map(zone_of, hosts)), None)
        self._server = Server(self._listen, self._max_message_bytes, self._credentials)
        host, port = parse_address(self._advertise or self._listen)
        return f"{host}:{port if self._advertise and port else self._server.port}"

    async def serve(self, averaging: AveragingService, gossip: GossipService | None) -> None:
        gossiping = [] if gossip is None else gossip_handlers(gossip)
        await self.serve_services([*averaging_handlers(averaging), *gossiping])

    async def serve_services(self, further: Sequence[RpcHandler] = ()) -> None:
        if self._listen is None:
            return
        if self._server is None:
            raise ClosedError("this peer has no address yet; call bind() first")
        await self._server.start([*self._rpcs, *further])

    async def close(self, grace: float = 0.0) -> None:
        """As the interface says. It returns when every service generator is closed; cancelling it ends the grace."""
        server, self._server = self._server, None
        try:
            if server is not None:
                await server.stop(grace)
        finally:
            await self._channels.close()

    def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        return self._channels.stream(endpoint, methods.JOIN_GROUP, request, headers.of_join(request))

    def aggregate_part(
        self, endpoint: str, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        return self._channels.stream(endpoint, methods.AGGREGATE_PART, messages)

    def prepare_lane(self, endpoint: str) -> None:
        """Does nothing: parts travel over the connection of all calls."""

    def lane(self, endpoint: str) -> Lane | None:
        return Lane("grpc")

    def download_state(self, endpoint: str, resume: Resume | None = None) -> AsyncGenerator[DownloadData, None]:
        return self._channels.stream(endpoint, methods.DOWNLOAD_STATE, None, headers.of_resume(resume))

    async def get_status(
        self, endpoint: str, *, receipts: int = 0, after_round: int = 0, peers: bool = False
    ) -> PeerStatus:
        return await self._channels.call(endpoint, methods.GET_STATUS, (receipts, after_round, peers))

    async def get_schema(self, endpoint: str) -> Schema:
        return await self._channels.call(endpoint, methods.GET_SCHEMA, None)

    def watch_rounds(self, endpoint: str, last: int = 0) -> AsyncGenerator[Watched, None]:
        return self._channels.stream(endpoint, methods.WATCH_ROUNDS, last)

    def exchange(self, endpoint: str, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        return self._channels.stream(endpoint, methods.EXCHANGE, digest)

    async def push(self, endpoint: str, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        return await self._channels.call(endpoint, methods.PUSH, (run_id, rumours))

    def subscribe(self, endpoint: str, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        return self._channels.stream(endpoint, methods.SUBSCRIBE, digest)
