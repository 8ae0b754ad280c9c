"""Creates the components of a peer that exist while it is entered, in the order of their dependencies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from averaging.common.shared_tensors import SharedTensors
from averaging.config import PeerConfig
from averaging.discovery.base import Discovery
from averaging.discovery.gossip import GossipDiscovery
from averaging.discovery.gossip.bootstrap import Waiting
from averaging.discovery.gossip.certified_identity import CertifiedIdentity
from averaging.discovery.published_record import PublishedRecord
from averaging.discovery.shard_of_run import LIFETIME, REFRESH, ShardOfRun
from averaging.observe.receipt_book import ReceiptBook
from averaging.observe.receipt_log import ReceiptLog
from averaging.peer.rounds import Rounds
from averaging.peer.run_progress import RunProgress
from averaging.peer.service import PeerService
from averaging.protocol.schema import Schema
from averaging.security.credentials import Credentials
from averaging.state.donors import Donors
from averaging.state.snapshots import Snapshots
from averaging.transport.base import Transport

CLOSING_GRACE = 1.0
"""Seconds for which calls in progress may go on when a peer closes."""


class DiscoveryFactory(Protocol):
    """Creates a peer's discovery once its endpoint is known."""

    def __call__(self, endpoint: str, transport: Transport) -> AbstractAsyncContextManager[Discovery]:
        """Called between `bind` and `serve` of the transport."""
        ...


@dataclass(frozen=True, slots=True)
class Running:
    """The components of an entered peer, until `stack` is closed.

    Attributes:
        discovery: of the peers that hold the same shard, if the model is divided; else of the run.
        run_discovery: of the run.
    """

    stack: AsyncExitStack
    endpoint: str
    loop: asyncio.AbstractEventLoop
    discovery: Discovery
    run_discovery: Discovery
    rounds: Rounds
    donors: Donors
    progress: RunProgress
    service: PeerService


async def start(
    config: PeerConfig,
    transport: Transport,
    discovery_factory: DiscoveryFactory | None,
    credentials: Credentials,
    tensors: SharedTensors,
    snapshots: Snapshots,
    schema: Schema,
    *,
    clock: Callable[[], float],
    rng: random.Random,
    shard: ShardOfRun | None = None,
    on_joining: Callable[[Waiting], None] | None = None,
) -> Running:
    """Listens, joins the run through `config.join`, and declares that the peer's state can be downloaded.

    The arguments are the components that `Peer` has created. If `discovery_factory` is None, peers find each other by
    gossip over the transport.

    Raises:
        ListenError: it cannot listen at the address.
        NoSeedAnsweredError: no peer of `join` answered in time; a `JoinRefusedError` if all refuse permanently.
    """
    async with AsyncExitStack() as stack:
        endpoint = await transport.bind()
        stack.push_async_callback(transport.close, CLOSING_GRACE)
        await tensors.while_locked(lambda: snapshots.commit(0), config.round_timeout)
        book = ReceiptBook(endpoint, ReceiptLog(config.receipts) if config.receipts else None)
        stack.callback(book.close)  # ends the streams of `watch_rounds`
        service = PeerService(config, endpoint, schema, snapshots, clock(), book)
        if discovery_factory is None:
            context = _gossip(config, endpoint, transport, credentials, clock, rng, on_joining)
        else:
            context = discovery_factory(endpoint, transport)
        # From here on other peers may call, also those through which this peer joins.
        await transport.serve(service, context if isinstance(context, GossipDiscovery) else None)
        discovery = run_discovery = await stack.enter_async_context(context)
        if shard is not None:
            discovery = shard.found_in(run_discovery, endpoint)
        service.discovery = discovery
        progress = RunProgress(config.run_id, endpoint, discovery, clock, config.join)
        rounds = Rounds(config, endpoint, transport, discovery, progress, service, snapshots, clock=clock, rng=rng)
        service.matchmaking = rounds.matchmaking(schema)
        donors = Donors(config.run_id, endpoint, discovery, lambda: snapshots.version, clock)
        notices = [progress.notice, donors.declaration] if snapshots.shared else [progress.notice]
        if shard is not None:
            holding = PublishedRecord(
                *(run_discovery, shard.key, endpoint, shard.record), lifetime=LIFETIME, refresh=REFRESH, clock=clock
            )
            notices.insert(0, holding)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        for notice in notices:
            await notice.store()
            stack.callback(tasks.create_task(notice.keep()).cancel)
        loop = asyncio.get_running_loop()
        return Running(stack.pop_all(), endpoint, loop, discovery, run_discovery, rounds, donors, progress, service)


def _gossip(
    config: PeerConfig,
    endpoint: str,
    transport: Transport,
    credentials: Credentials,
    clock: Callable[[], float],
    rng: random.Random,
    on_joining: Callable[[Waiting], None] | None,
) -> AbstractAsyncContextManager[Discovery]:
    return GossipDiscovery(
        config.run_id,
        endpoint,
        transport,
        join=config.join,
        join_timeout=config.join_timeout,
        identity=CertifiedIdentity(credentials.tls, clock) if credentials.tls else None,
        clock=clock,
        rng=rng,
        on_joining=on_joining,
    )
