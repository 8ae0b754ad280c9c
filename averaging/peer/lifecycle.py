"""Creates the components of a peer that exist while it is entered, in the order of their dependencies."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from averaging.allreduce import LARGE_PART_BYTES
from averaging.common import chosen_proxy, ignored_proxies, shown_proxy
from averaging.config import PeerConfig
from averaging.control import ControlService, LeaveStep
from averaging.discovery import LIFETIME, REFRESH, Discovery, PublishedRecord, ShardOfRun
from averaging.discovery.etcd import EtcdDiscovery
from averaging.discovery.gossip import GossipDiscovery, GossipSettings, Waiting
from averaging.errors import ConfigError
from averaging.peer.rounds import Rounds
from averaging.peer.run_progress import RunProgress
from averaging.peer.service import PeerMetrics, PeerService
from averaging.probe import ProbeService
from averaging.protocol import Mode, data_key, donors_key, progress_key
from averaging.receipts import ReceiptBook, ReceiptLog, TrainingProgress
from averaging.security import Credentials, read_credentials
from averaging.seeds import FoundSeeds, Seeds
from averaging.state import Donors, Snapshots
from averaging.tensors import Schema, SharedTensors
from averaging.transport import RpcService, Transport
from averaging.transport.direct import DirectTransport
from averaging.transport.grpc import GrpcTransport

DOWNLOAD_SECONDS = 20.0  # seconds for which a peer that was asked to leave waits for those who download its state
logger = logging.getLogger("averaging.peer")

CLOSING_GRACE = 1.0
"""Seconds for which calls in progress may go on when a peer closes."""


class DiscoveryFactory(Protocol):
    """Creates a peer's discovery once its endpoint is known."""

    def __call__(self, endpoint: str, transport: Transport) -> AbstractAsyncContextManager[Discovery]:
        """Called between `bind` and `serve` of the transport."""


@dataclass(frozen=True, slots=True)
class Running:
    """The components of an entered peer, until `stack` is closed."""

    stack: AsyncExitStack
    endpoint: str
    metrics_endpoint: str  # address for Prometheus and probes; empty without `metrics_listen`
    loop: asyncio.AbstractEventLoop
    discovery: Discovery  # discovery of the peers that hold the same shard, if the model is divided; else of the run
    run_discovery: Discovery  # discovery of the run
    rounds: Rounds
    donors: Donors
    progress: RunProgress
    data: RunProgress
    service: PeerService


@dataclass(frozen=True, slots=True)
class PeerContext:
    """What embeds a peer, such as an averager, a command or a simulation."""

    transport: Transport | None = None  # how peers reach each other; gRPC if None
    discovery: DiscoveryFactory | None = None  # makes the discovery; by the option `discovery` if None
    clock: Callable[[], float] = time.time  # clock in seconds since the epoch
    rng: random.Random = field(default_factory=random.SystemRandom)  # source of all random choices
    # called in the event loop while no peer of `join` has answered, first after a second and then less and less often,
    # with the addresses and the reasons. For gossip only.
    on_joining: Callable[[Waiting], None] | None = None
    # called in the event loop when a source in `join`, such as `dns:NAME:PORT`, answers otherwise than before. For
    # gossip only.
    on_found: Callable[[FoundSeeds], None] | None = None
    # ends what uses the peer, and then closes it. It is called in the event loop when the peer's owner has asked it to
    # leave (`averaging leave`), and its last round has ended. Without it the owner cannot do that.
    on_leave: Callable[[], None] | None = None
    # which shard of the run the peer averages, if the model is divided; it meets peers of this shard only
    shard: ShardOfRun | None = None
    # called in the event loop for the progress of the training that the peer is part of. Its status shows it.
    training: Callable[[], TrainingProgress] | None = None


class Lifecycle:
    """What a peer has before it is entered, and how it is entered."""

    def __init__(
        self,
        config: PeerConfig,
        context: PeerContext,
        services: Sequence[RpcService],
        tensors: SharedTensors,
        snapshots: Snapshots,
        schema: Schema,
    ) -> None:
        if services and context.transport is not None:
            raise ConfigError("services are served over gRPC; give no transport beside them")
        self._config, self._context, self._clock = config, context, context.clock
        self._tensors, self._snapshots, self._schema = tensors, snapshots, schema
        self._credentials = credentials = read_credentials(config, context.clock)
        self.control = ControlService(config.run_id, certified=config.tls_cert is not None)
        self.services = list(services)
        if config.mode is not Mode.CLIENT and context.transport is None:
            self.services.insert(0, ProbeService(config, credentials.tls, clock=context.clock))
            if context.on_leave is not None:
                self.services.append(self.control)
        self.seeds = Seeds(config.join, credentials, on_found=context.on_found)
        self.transport = context.transport or make_transport(config, credentials, self.seeds, self.services)

    async def start(self, not_ready: Callable[[], str]) -> Running:
        """See `Peer.__aenter__`; `not_ready` returns why the peer is not ready, for /readyz, or an empty text."""
        config, transport, seeds, clock = self._config, self.transport, self.seeds, self._clock
        shard, snapshots = self._context.shard, self._snapshots
        if (proxy := chosen_proxy()) is not None:
            logger.info("other peers are called through the proxy %s, and parts travel over gRPC", shown_proxy(proxy))
        elif ignored := ignored_proxies():
            logger.info("other peers are called directly: %s", ignored)
        async with AsyncExitStack() as stack:
            metrics = PeerMetrics(config, self._credentials, not_ready, clock)
            if config.metrics_listen is not None or isinstance(transport, GrpcTransport):  # not in simulated time
                await stack.enter_async_context(metrics.listener)
            stack.push_async_callback(seeds.close)
            if self._context.discovery is None:
                await seeds.look_up(report=False)  # before `bind`, which compares the addresses with that to listen on
            endpoint = await transport.bind()
            seeds.bind(endpoint, config.listen)
            stack.push_async_callback(transport.close, CLOSING_GRACE)
            self.control.endpoint = endpoint
            # Those who asked learn it in the grace period.
            stack.callback(self.control.departure.advance, LeaveStep.LEFT)
            await self._tensors.while_locked(lambda: snapshots.commit(0), config.round_timeout)
            book = ReceiptBook(ReceiptLog(config.receipts) if config.receipts else None, metrics.note)
            stack.callback(book.close)  # ends the streams of `watch_rounds`
            service = metrics.service = PeerService(config, endpoint, self._schema, snapshots, clock(), book)
            context = (self._context.discovery or self._discovery)(endpoint, transport)
            # From here on other peers may call, also those through which this peer joins.
            await transport.serve(service, context if isinstance(context, GossipDiscovery | EtcdDiscovery) else None)
            discovery = run_discovery = await stack.enter_async_context(context)
            if shard is not None:
                discovery = shard.discovery_in(run_discovery, endpoint)
            await self._follow(discovery, run_discovery)
            service.discovery = discovery
            progress, data = (
                RunProgress(key, endpoint, discovery, transport, clock, seeds.named)
                for key in (progress_key(config.run_id), data_key(config.run_id))
            )
            rounds = Rounds(
                config, endpoint, transport, discovery, progress, service, clock=clock, rng=self._context.rng
            )
            service.matchmaking = rounds.matchmaking(self._schema)
            donors = Donors(config.run_id, endpoint, discovery, lambda: snapshots.version, clock)
            notices = [progress.notice, data.notice] + ([donors.declaration] if snapshots.shared else [])
            if shard is not None:
                shard_notice = PublishedRecord(
                    *(run_discovery, shard.key, endpoint, shard.record), lifetime=LIFETIME, refresh=REFRESH, clock=clock
                )
                notices.insert(0, shard_notice)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(tasks.create_task(seeds.keep_published()).cancel)
            for notice in notices:
                await notice.store()
                stack.callback(tasks.create_task(notice.keep()).cancel)
            to_withdraw = (progress.notice, data.notice, donors.declaration)
            leaving = self._leave_when_asked(to_withdraw, rounds, service)
            stack.callback(tasks.create_task(leaving).cancel)
            loop = asyncio.get_running_loop()
            scraped = metrics.listener.endpoint
            found = discovery, run_discovery, rounds, donors, progress, data, service
            return Running(stack.pop_all(), endpoint, scraped, loop, *found)

    async def _leave_when_asked(self, notices: Sequence[PublishedRecord], rounds: Rounds, service: PeerService) -> None:
        departure = self.control.departure
        await departure.asked.wait()
        for notice in notices:  # nobody waits for this peer any more, and newcomers ask other donors
            await notice.withdraw()
        await rounds.drain()
        departure.advance(LeaveStep.DOWNLOADS)
        await service.end_downloads(DOWNLOAD_SECONDS)
        departure.advance(LeaveStep.CLOSING)
        if self._context.on_leave is not None:
            self._context.on_leave()

    async def _follow(self, discovery: Discovery, run_discovery: Discovery) -> None:
        # Later on these are read without a wait: whether others train, which samples, and who offers a state.
        run_id = self._config.run_id
        followed = [discovery.follow(progress_key(run_id)), discovery.follow(data_key(run_id))]
        followed.append(discovery.follow(donors_key(run_id), keep=False))
        if self._context.shard is not None:
            followed.append(run_discovery.follow(self._context.shard.key))
        await asyncio.gather(*followed)

    def _discovery(self, endpoint: str, transport: Transport) -> AbstractAsyncContextManager[Discovery]:
        config, clock, rng = self._config, self._clock, self._context.rng
        if config.etcd:
            return EtcdDiscovery.from_config(config, endpoint, self._credentials, clock=clock, rng=rng)
        discovery = GossipDiscovery(
            config.run_id,
            endpoint,
            transport,
            join=self.seeds,
            clock=clock,
            rng=rng,
            settings=GossipSettings(join_timeout=config.join_timeout),
        )
        discovery.on_joining = self._context.on_joining
        return discovery


def make_transport(
    config: PeerConfig, credentials: Credentials, seeds: Seeds, services: Sequence[RpcService]
) -> Transport:
    listen = None if config.mode is Mode.CLIENT else config.listen
    # A part and its codec's tables, a few hundred records of discovery, or the largest metadata of a state.
    most = 2 * config.part_size_bytes + (32 << 20)
    options: dict[str, Any] = {
        "max_message_bytes": most,
        "credentials": credentials,
        "given": seeds.named,
        "names": seeds.names,
        "services": services,
    }
    # Direct connections are no HTTP, so all calls go over gRPC where there is a proxy.
    if config.direct_listen is None or chosen_proxy() is not None:
        return GrpcTransport(listen, config.advertise, **options)
    return DirectTransport(
        listen,
        config.advertise,
        direct_listen=config.direct_listen,
        direct_advertise=config.direct_advertise,
        max_part_bytes=max(2 * config.part_size_bytes, LARGE_PART_BYTES) + (64 << 10),
        **options,
    )
