"""One peer of a run: it serves others, finds groups, averages its tensors with them, and hands over its state."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self, Unpack

import torch

from averaging.allreduce import AllReduce, RoundResult, changes
from averaging.config import NonFinite, PeerConfig, PeerOptions, check_weight
from averaging.discovery.base import Discovery
from averaging.discovery.gossip import GossipDiscovery
from averaging.donors import Donors
from averaging.errors import AveragingError, ClosedError, ConfigError, RoundError, SchemaMismatchError
from averaging.group import Group, Mode, pack_gather
from averaging.matchmaking import Matchmaking, NoGroupError
from averaging.observe.receipts import Outcome, Receipt
from averaging.observe.status import PeerStatus
from averaging.schema import ReplyForm, describe
from averaging.service import PeerService
from averaging.snapshots import Extras, Snapshots
from averaging.state import State, download
from averaging.tensors import SharedTensors
from averaging.transport.base import Transport
from averaging.transport.grpc import GrpcTransport

logger = logging.getLogger(__name__)

CLOSING_GRACE = 1.0
"""Seconds that calls in progress get when a peer closes."""


class DiscoveryFactory(Protocol):
    """Makes a peer's discovery once its endpoint is known."""

    def __call__(self, endpoint: str, transport: Transport) -> AbstractAsyncContextManager[Discovery]:
        """Called between `bind` and `serve` of the transport."""
        ...


class Peer:
    """One peer, an async context manager: entered, it is reachable and donates its state; left, it is gone in order.

    ```python
    async with Peer({"w": w}, run_id="demo", join=["192.0.2.7:4222"]) as peer:
        receipt = await peer.average(weight=32)
    ```

    The tensors may have any shape, be empty or 0-dim, non-contiguous, on CPU or GPU, float16, bfloat16, float32 or
    float64. They are written once a round, when its result is in.

    Args:
        tensors: in the same order at all peers; a mapping gives them names.
        run_id: peers with the same run average together.
        extra_state: asked, with the tensors locked, what belongs to the downloadable state besides them.
        transport: how peers reach each other; gRPC on sockets if not given.
        discovery: how peers find each other; gossip between them if not given.
        clock: seconds since the epoch.
        rng: source of all random choices.
        options: see `PeerConfig`.

    Raises:
        ConfigError: an option that cannot work.
        TensorError: a tensor that cannot be averaged.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
        *,
        run_id: str,
        extra_state: Callable[[], Extras] | None = None,
        transport: Transport | None = None,
        discovery: DiscoveryFactory | None = None,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        **options: Unpack[PeerOptions],
    ) -> None:
        self.config = PeerConfig(run_id=run_id, **options)
        self._tensors = SharedTensors(tensors)
        self.schema = describe(
            self._tensors.names,
            self._tensors.tensors,
            compression=self.config.compression,
            part_size_bytes=self.config.part_size_bytes,
            reply=self.config.reply,
        )
        is_client = self.config.mode is Mode.CLIENT
        self._snapshots = Snapshots(self._tensors, extra_state, shared=self.config.share_state and not is_client)
        self._transport = transport or GrpcTransport(
            None if is_client else self.config.listen,
            self.config.advertise,
            # A part and its codec's tables, a few hundred records of discovery, or the largest metadata of a state.
            max_message_bytes=2 * self.config.part_size_bytes + (32 << 20),
        )
        self._make_discovery = discovery or self._gossip
        self._clock, self._rng = clock, rng or random.SystemRandom()
        self._running: _Running | None = None
        self._averaging = False
        self._attempts = 0

    def __repr__(self) -> str:
        running = self._running
        if running is None:
            return f"<Peer of run {self.run_id!r}, not running>"
        doing = "averaging" if running.service.round else "looking for a group" if self._averaging else "idle"
        return f"<Peer {running.endpoint} of run {self.run_id!r}, {doing}>"

    async def __aenter__(self) -> Self:
        """Listens, joins the run through `join`, and declares that its state can be downloaded.

        Raises:
            ListenError: the address cannot be had.
            NoSeedAnsweredError: none of `join` answered in time.
        """
        config = self.config
        async with AsyncExitStack() as stack:
            endpoint = await self._transport.bind()
            stack.push_async_callback(self._transport.close, CLOSING_GRACE)
            await self._tensors.while_locked(lambda: self._snapshots.commit(0), config.timeout)
            service = PeerService(config, endpoint, self.schema, self._snapshots, self._clock())
            context = self._make_discovery(endpoint, self._transport)
            # Others may call from here on, also those through whom this peer is about to join.
            await self._transport.serve(service, context if isinstance(context, GossipDiscovery) else None)
            discovery = await stack.enter_async_context(context)
            service.discovery = discovery
            matchmaking = service.matchmaking = Matchmaking(
                config.run_id,
                endpoint,
                self.schema,
                self._transport,
                discovery,
                group_size=config.group_size,
                min_group_size=config.min_group_size,
                matchmaking_time=config.matchmaking_time,
                group_bits=config.group_bits,
                clock=self._clock,
                rng=self._rng,
            )
            donors = Donors(config.run_id, endpoint, discovery, self._clock)
            if self._snapshots.shared:
                await donors.declare(self._snapshots.version)
                tasks = await stack.enter_async_context(asyncio.TaskGroup())
                stack.callback(tasks.create_task(donors.keep_declaring(lambda: self._snapshots.version)).cancel)
            self._running = _Running(stack.pop_all(), endpoint, discovery, matchmaking, donors, service)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Withdraws what it declared, lets calls in progress end for a moment, and closes all connections."""
        running, self._running = self._running, None
        if running is not None:
            await running.stack.aclose()

    @property
    def run_id(self) -> str:
        """The run it belongs to."""
        return self.config.run_id

    @property
    def endpoint(self) -> str:
        """Where others reach this peer: `host:port`, or a client's name."""
        return self._entered.endpoint

    @property
    def version(self) -> int:
        """The version of its committed state."""
        return self._snapshots.version

    @property
    def peers(self) -> frozenset[str]:
        """The endpoints that discovery knows of, this peer's included."""
        return self._entered.discovery.endpoints() | {self.endpoint}

    @property
    def discovery(self) -> Discovery:
        """Where this run's peers tell each other who and what is there."""
        return self._entered.discovery

    @property
    def donors(self) -> list[tuple[float, str]]:
        """The other peers that offer their state: priority and endpoint, the best first."""
        return self._entered.donors.others()

    @property
    def status(self) -> PeerStatus:
        """Who this peer is and what it is doing; the same that the status service tells."""
        return self._entered.service.get_status()

    @contextmanager
    def tensors(self) -> Iterator[list[torch.Tensor]]:
        """The tensors, locked: no round writes them and no state is copied meanwhile.

        For any thread; it blocks. Do not wait for `average` or `download_state` inside.
        """
        with self._tensors.locked() as tensors:
            yield tensors

    async def commit(self, version: int | None = None) -> None:
        """Makes what the tensors hold now the state that others download.

        That happens by itself after every round and download; a peer that starts a run may call it to say that its
        tensors are worth downloading.

        Args:
            version: of this state; the next one if None. A lower one than the present is not taken.
        """
        wanted = self.version + 1 if version is None else version
        await self._tensors.while_locked(lambda: self._snapshots.commit(wanted), self.config.timeout)
        self._entered.donors.committed()

    async def average(self, *, weight: float = 1.0, gather: Any = None) -> Receipt:
        """Finds a group and averages the tensors with it.

        Cancelling it leaves the group in order and the tensors untouched. Changes that the application makes to the
        tensors meanwhile are overwritten by an average, and kept where the reply form is `delta`.

        Args:
            weight: of this peer's tensors in the average; finite and at least 0.
            gather: handed to all members of the group: numbers, strings, bytes, lists or dicts, at most 64 KiB packed.

        Returns:
            The receipt, also when no group was found or the round failed.

        Raises:
            ConfigError: a weight or a gather that cannot work.
            TensorError: NaN or infinity in a tensor, unless the peer allows them.
            RoundError: another `average` of this peer is in progress.
            ClosedError: the peer is not running.
        """
        running = self._entered
        weight = check_weight(weight)
        try:
            gathered = pack_gather(weight, self.config.bandwidth, self.config.mode, gather)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if self._averaging:
            raise RoundError("another average() of this peer is in progress; await it first")
        self._averaging = True
        try:
            if self.config.non_finite is NonFinite.REFUSE and self.config.mode is not Mode.AUXILIARY:
                await self._tensors.while_locked(self._tensors.check_finite, self.config.timeout)
            receipt = running.service.last = await self._attempt(running, gathered)
        finally:
            self._averaging = False
        logger.info("%s", receipt)
        return receipt

    async def donor_appears(self, timeout: float) -> bool:
        """Whether another peer offers a state of a version above 0, now or within `timeout` seconds.

        Raises:
            ClosedError: the peer is not running.
        """
        return await self._entered.donors.appear(0, timeout)

    async def download_state(self, apply: Callable[[State], None] | None = None) -> State:
        """Downloads the state of the peer with the highest priority, verifies it, and takes it over.

        Args:
            apply: called with the verified state before the tensors are overwritten, which are locked meanwhile; it
                takes over what the application added. If it raises, nothing is changed.

        Raises:
            StateError: nobody could deliver a sound state; nothing was changed.
            ClosedError: the peer is not running.
        """
        names = [name for _, name in self.donors]
        state, donor = await download(self._transport, names, self.schema, silence=self.config.part_timeout)

        def take_over() -> None:
            if apply is not None:
                apply(state)
            self._tensors.copy_from(list(state.tensors.values())[: len(self.schema.tensors)])
            self._snapshots.commit(state.version)

        await self._tensors.while_locked(take_over, self.config.timeout)
        self._entered.donors.committed()
        logger.info("took over the state of %s, version %d", donor, state.version)
        return state

    @property
    def _entered(self) -> _Running:
        if self._running is None:
            raise ClosedError(f"{self!r}; use it inside `async with`")
        return self._running

    def _gossip(self, endpoint: str, transport: Transport) -> GossipDiscovery:
        return GossipDiscovery(
            self.run_id,
            endpoint,
            transport,
            join=self.config.join,
            join_timeout=self.config.join_timeout,
            clock=self._clock,
            rng=self._rng,
        )

    # A round

    async def _attempt(self, running: _Running, gathered: bytes) -> Receipt:
        loop, service = asyncio.get_running_loop(), running.service
        number, self._attempts = self._attempts, self._attempts + 1
        started = loop.time()
        try:
            group = await running.matchmaking.find_group(gathered, self._clock() + self.config.timeout)
        except (NoGroupError, SchemaMismatchError) as error:
            return self._receipt(number, Outcome.NO_GROUP, started, reason=str(error))
        # No await from here until the round is known: its members' parts may come at any moment.
        begun = loop.time()
        try:
            service.round = self._new_round(running.endpoint, group)
        except AveragingError as error:
            return self._receipt(number, Outcome.FAILED, started, group=group, begun=begun, reason=str(error))
        try:
            result = await service.round.run(begun + self.config.timeout)
            running.matchmaking.move_on(group)
            reason = _why_failed(group, running.endpoint, result)
            if not reason and self.config.mode is not Mode.AUXILIARY:
                await self._tensors.while_locked(lambda: self._write(result), self.config.timeout)
                running.donors.committed()
        except RoundError as error:
            return self._receipt(number, Outcome.FAILED, started, group=group, begun=begun, reason=str(error))
        finally:
            service.round = None
        outcome = Outcome.FAILED if reason else Outcome.AVERAGED
        service.rounds += outcome is Outcome.AVERAGED
        return self._receipt(number, outcome, started, group=group, begun=begun, result=result, reason=reason)

    def _new_round(self, endpoint: str, group: Group) -> AllReduce:
        return AllReduce(
            group,
            endpoint,
            self.schema,
            self._tensors.flat(),
            self._transport,
            part_timeout=self.config.part_timeout,
            non_finite=self.config.non_finite,
        )

    def _write(self, result: RoundResult) -> None:
        self._tensors.write(changes(result), add=self.config.reply is ReplyForm.DELTA)
        self._snapshots.commit(self.version + 1)

    def _receipt(
        self,
        number: int,
        outcome: Outcome,
        started: float,
        *,
        reason: str = "",
        group: Group | None = None,
        begun: float = 0.0,
        result: RoundResult | None = None,
    ) -> Receipt:
        now = asyncio.get_running_loop().time()
        return Receipt(
            round=number,
            outcome=outcome,
            reason=reason,
            group_id=group.group_id if group else b"",
            members=group.endpoints if group else (),
            dropped=result.dropped if result else (),
            gathered={member.endpoint: member.user for member in group.members} if group else {},
            seconds=now - started,
            allreduce_seconds=now - begun if group else 0.0,
            bytes_sent=result.bytes_sent if result else 0,
            bytes_received=result.bytes_received if result else 0,
            kept_local=result.kept_local if result else 0,
            state_version=self.version,
        )


@dataclass(frozen=True, slots=True)
class _Running:
    """The parts of a peer that exist while it is entered."""

    stack: AsyncExitStack
    endpoint: str
    discovery: Discovery
    matchmaking: Matchmaking
    donors: Donors
    service: PeerService


def _why_failed(group: Group, endpoint: str, result: RoundResult) -> str:
    """A round that lost everybody else before anything came of them averaged nothing; empty if it did not."""
    lost = {dropped.endpoint for dropped in result.dropped}
    if result.heard or not lost >= set(group.endpoints) - {endpoint}:
        return ""
    told = "; ".join(f"{dropped.endpoint}: {dropped.reason}" for dropped in result.dropped)
    return f"all other members were lost ({told})"
