"""Creates the components of a peer that exist while it is entered, in the order of their dependencies."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from averaging.allreduce import LARGE_PART_BYTES
from averaging.common import chosen_proxy, ignored_proxies, shown_proxy
from averaging.config import PeerConfig
from averaging.control import ControlService, Departure, LeaveStep
from averaging.discovery import LIFETIME, REFRESH, Discovery, PublishedRecord, ShardOfRun
from averaging.discovery.etcd import EtcdDiscovery
from averaging.discovery.gossip import CertifiedIdentity, GossipDiscovery, Waiting
from averaging.peer.peer_metrics import PeerMetrics
from averaging.peer.rounds import Rounds
from averaging.peer.run_progress import RunProgress
from averaging.peer.service import PeerService
from averaging.protocol import Mode, data_key, donors_key, progress_key
from averaging.receipts import ReceiptBook, ReceiptLog
from averaging.security import Credentials
from averaging.seeds import Seeds
from averaging.state import Donors, Snapshots
from averaging.tensors import Schema, SharedTensors
from averaging.transport import RpcService, Transport
from averaging.transport.direct import DirectTransport
from averaging.transport.grpc import GrpcTransport

DOWNLOAD_SECONDS = 20.0
"""Seconds for which a peer that was asked to leave waits for those who download its state."""
logger = logging.getLogger("averaging.peer")

CLOSING_GRACE = 1.0
"""Seconds for which calls in progress may go on when a peer closes."""


class DiscoveryFactory(Protocol):
    """Creates a peer's discovery once its endpoint is known."""

    def __call__(self, endpoint: str, transport: Transport) -> AbstractAsyncContextManager[Discovery]:
        """Called between `bind` and `serve` of the transport."""


@dataclass(frozen=True, slots=True)
class Running:
    """The components of an entered peer, until `stack` is closed.

    Attributes:
        discovery: discovery of the peers that hold the same shard, if the model is divided; else of the run.
        run_discovery: discovery of the run.
        metrics_endpoint: address for Prometheus and probes; empty without `metrics_listen`.
    """

    stack: AsyncExitStack
    endpoint: str
    metrics_endpoint: str
    loop: asyncio.AbstractEventLoop
    discovery: Discovery
    run_discovery: Discovery
    rounds: Rounds
    donors: Donors
    progress: RunProgress
    data: RunProgress
    service: PeerService


async def start(
    config: PeerConfig,
    transport: Transport,
    discovery_factory: DiscoveryFactory | None,
    credentials: Credentials,
    tensors: SharedTensors,
    snapshots: Snapshots,
    schema: Schema,
    seeds: Seeds,
    *,
    not_ready: Callable[[], str],
    clock: Callable[[], float],
    rng: random.Random,
    shard: ShardOfRun | None = None,
    on_joining: Callable[[Waiting], None] | None = None,
    control: ControlService,
    on_leave: Callable[[], None],
) -> Running:
    """Listens, joins the run through `seeds`, and declares that the peer's state can be downloaded.

    The arguments are the components that `Peer` has created. If `discovery_factory` is None, peers find each other by
    gossip over the transport, or in etcd.

    Raises:
        ListenError: it cannot listen at the address, or at that for metrics.
        JoinError: no peer of `join` answered in time, or all refuse permanently.
    """
    _log_proxy(config.proxy)
    async with AsyncExitStack() as stack:
        metrics = PeerMetrics(config, credentials, not_ready, clock)
        if config.metrics_listen is not None or isinstance(transport, GrpcTransport):  # not in simulated time
            await stack.enter_async_context(metrics.listener)
        stack.push_async_callback(seeds.close)
        if discovery_factory is None:
            await seeds.look_up(report=False)  # before `bind`, which compares the addresses with that to listen on
        endpoint = await transport.bind()
        seeds.bind(endpoint, config.listen)
        stack.push_async_callback(transport.close, CLOSING_GRACE)
        control.endpoint = endpoint
        stack.callback(control.departure.advance, LeaveStep.LEFT)  # those who asked learn it in the grace period
        await tensors.while_locked(lambda: snapshots.commit(0), config.round_timeout)
        book = ReceiptBook(ReceiptLog(config.receipts) if config.receipts else None, metrics.note)
        stack.callback(book.close)  # ends the streams of `watch_rounds`
        service = metrics.service = PeerService(config, endpoint, schema, snapshots, clock(), book)
        if discovery_factory is None:
            context = _discovery(config, endpoint, transport, credentials, seeds, clock, rng, on_joining)
        else:
            context = discovery_factory(endpoint, transport)
        # From here on other peers may call, also those through which this peer joins.
        await transport.serve(service, context if isinstance(context, GossipDiscovery | EtcdDiscovery) else None)
        discovery = run_discovery = await stack.enter_async_context(context)
        if shard is not None:
            discovery = shard.discovery_in(run_discovery, endpoint)
        await _follow(config.run_id, discovery, run_discovery, shard)
        service.discovery = discovery
        progress = RunProgress(config.run_id, endpoint, discovery, clock, seeds.named)
        data = RunProgress(config.run_id, endpoint, discovery, clock, seeds.named, key=data_key(config.run_id))
        rounds = Rounds(config, endpoint, transport, discovery, progress, service, snapshots, clock=clock, rng=rng)
        service.matchmaking = rounds.matchmaking(schema)
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
        leaving = _leave_when_asked(control.departure, to_withdraw, rounds, service, on_leave)
        stack.callback(tasks.create_task(leaving).cancel)
        loop = asyncio.get_running_loop()
        scraped = metrics.listener.endpoint
        found = discovery, run_discovery, rounds, donors, progress, data, service
        return Running(stack.pop_all(), endpoint, scraped, loop, *found)


async def _leave_when_asked(
    departure: Departure,
    notices: Sequence[PublishedRecord],
    rounds: Rounds,
    service: PeerService,
    on_leave: Callable[[], None],
) -> None:
    """Waits until somebody asks this peer to leave, brings its work to an end, and calls `on_leave`."""
    await departure.asked.wait()
    for notice in notices:  # nobody waits for this peer any more, and newcomers ask other donors
        await notice.withdraw()
    await rounds.drain()
    departure.advance(LeaveStep.DOWNLOADS)
    await service.end_downloads(DOWNLOAD_SECONDS)
    departure.advance(LeaveStep.CLOSING)
    on_leave()


def _log_proxy(proxy: str | None) -> None:
    chosen = chosen_proxy(proxy)
    if chosen is not None:
        logger.info("other peers are called through the proxy %s, and parts travel over gRPC", shown_proxy(chosen))
    elif ignored := ignored_proxies():
        logger.info("other peers are called directly: %s", ignored)


async def _follow(run_id: str, discovery: Discovery, run_discovery: Discovery, shard: ShardOfRun | None) -> None:
    """Reads what is read without a wait later on: whether others train, which samples, and who offers a state."""
    followed = [discovery.follow(progress_key(run_id)), discovery.follow(data_key(run_id))]
    followed.append(discovery.follow(donors_key(run_id), keep=False))
    if shard is not None:
        followed.append(run_discovery.follow(shard.key))
    await asyncio.gather(*followed)


def _discovery(
    config: PeerConfig,
    endpoint: str,
    transport: Transport,
    credentials: Credentials,
    seeds: Seeds,
    clock: Callable[[], float],
    rng: random.Random,
    on_joining: Callable[[Waiting], None] | None,
) -> AbstractAsyncContextManager[Discovery]:
    if config.etcd:
        return EtcdDiscovery.from_config(config, endpoint, credentials, clock=clock, rng=rng)
    return GossipDiscovery(
        config.run_id,
        endpoint,
        transport,
        join=seeds,
        join_timeout=config.join_timeout,
        identity=CertifiedIdentity(credentials.tls, clock) if credentials.tls else None,
        clock=clock,
        rng=rng,
        on_joining=on_joining,
    )


# Creates the transport of a peer from its options.


def make_transport(
    config: PeerConfig, credentials: Credentials, seeds: Seeds, services: Sequence[RpcService]
) -> Transport:
    """Creates a transport over gRPC, with the direct lane unless `config` switches it off."""
    listen = None if config.mode is Mode.CLIENT else config.listen
    # A part and its codec's tables, a few hundred records of discovery, or the largest metadata of a state.
    most = 2 * config.part_size_bytes + (32 << 20)
    # Direct connections are no HTTP, so all calls go over gRPC where there is a proxy.
    if config.direct_listen is None or chosen_proxy(config.proxy) is not None:
        return GrpcTransport(
            listen,
            config.advertise,
            max_message_bytes=most,
            credentials=credentials,
            given=seeds.named,
            names=seeds.names,
            services=services,
            proxy=config.proxy,
        )
    return DirectTransport(
        listen,
        config.advertise,
        direct_listen=config.direct_listen,
        direct_advertise=config.direct_advertise,
        max_part_bytes=max(2 * config.part_size_bytes, LARGE_PART_BYTES) + (64 << 10),
        max_message_bytes=most,
        credentials=credentials,
        given=seeds.named,
        names=seeds.names,
        services=services,
    )
