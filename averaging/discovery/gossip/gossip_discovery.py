"""The discovery of one peer: puts the parts of gossip together and serves the calls of other peers."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from averaging.common import CLIENT_PREFIX, ignored_proxies, is_endpoint, is_loopback, parse_address, spelled
from averaging.discovery import Diagnosis, Entry, clock_difference
from averaging.discovery.gossip.anti_entropy import AntiEntropy, Maintenance, Reachability
from averaging.discovery.gossip.bootstrap import Bootstrap, Waiting
from averaging.discovery.gossip.clock_offsets import ClockOffsets
from averaging.discovery.gossip.identity import Author, Ed25519Identity, Identity
from averaging.discovery.gossip.membership import RING, Membership, all_others
from averaging.discovery.gossip.record import GossipSettings, Reason
from averaging.discovery.gossip.record_table import Change, Merged, RecordStore
from averaging.discovery.gossip.rumours import ClientStreams, Rumours
from averaging.errors import (
    CallRefusedError,
    ClosedError,
    ConfigError,
    DiscoveryError,
    ProtocolViolationError,
    RefusalCause,
    printable,
)
from averaging.protocol import Digest, ExchangeReply, Record, Refusal, Rumour
from averaging.seeds import Seeds
from averaging.transport import Transport

logger = logging.getLogger(__name__)

_WARNING_PERIOD = 10.0  # s between two warnings that other peers refuse this peer's records


def peers_key(run_id: str) -> str:
    return f"{run_id}.peers"


class GossipDiscovery:
    """Implements `discovery.base.Discovery`, and `transport.base.GossipService` for other peers.

    Serve it before it is entered: peers that join each other must be able to answer while they join. Entering it joins
    the run; leaving it withdraws this peer's records. It can be entered once.

    Args:
        run_id: peers of other runs are refused.
        endpoint: this peer's name, from `transport.bind()`.
        transport: calls other peers.
        join: endpoints of any peers of the run, the seeds, or `Seeds` with sources, which are asked while this peer
            joins, and again while it is alone. With none, or only this peer's own, it starts a run.
        join_timeout: seconds within which a seed must answer; time in which this peer stood still does not count.
        identity: the key that owns this peer's records; a new one by default.
        clock: seconds since the epoch.
        rng: picks members and intervals.
        settings: the constants of gossip.
        on_joining: callback after a second, and then at growing intervals, while no seed has answered.

    Raises:
        ConfigError: `endpoint` is malformed, or a client has no seeds.
    """

    def __init__(
        self,
        run_id: str,
        endpoint: str,
        transport: Transport,
        *,
        join: Sequence[str] | Seeds = (),
        join_timeout: float = 10.0,
        identity: Identity | None = None,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        settings: GossipSettings | None = None,
        on_joining: Callable[[Waiting], None] | None = None,
    ) -> None:
        self._is_client = endpoint.startswith(CLIENT_PREFIX)
        if not is_endpoint(endpoint):
            raise ConfigError(f"{endpoint!r} cannot be a peer's endpoint; give HOST:PORT or {CLIENT_PREFIX}<uuid4>")
        self._seeds = seeds = join if isinstance(join, Seeds) else Seeds(join)
        if self._is_client and not (seeds.addresses or seeds.sources):
            raise ConfigError(
                f"a client accepts no connections, so it needs a peer to join; give {spelled('join')}", "join"
            )
        self._run_id, self._endpoint = run_id, endpoint
        self._join_timeout, self._clock = join_timeout, clock
        self._rng = rng = rng or random.Random()
        self._settings = settings = settings or GossipSettings()
        self._peers_key = peers_key(run_id)
        self._author = Author(run_id, identity or Ed25519Identity(), settings.limits)
        self._records = RecordStore(self._author, settings.limits, clock, self._on_change)
        self._members = Membership(
            *(endpoint, seeds.addresses, rng),
            retry_lost=settings.retry_lost,
            max_lost=settings.max_lost,
            on_refused=lambda refusing: self._records.drop(self._peers_key, refusing),
        )
        self._streams = ClientStreams(settings)
        self._rumours = Rumours(transport, run_id, self._members, settings, clock, self._on_refused)
        self._offsets = ClockOffsets(settings.limits.clock_tolerance)
        self._anti_entropy = AntiEntropy(
            run_id, endpoint, transport, self._records, self._merge, self._rumours, settings, self._offsets, clock
        )
        self._reachability = Reachability(endpoint)
        self._maintenance = Maintenance(
            *(transport, self._members, self._anti_entropy, self._merge, settings, clock, rng),
            on_answer=self._reachability.note_answer,
        )
        self._joins_own_address = endpoint in seeds.addresses
        self._bootstrap = Bootstrap(
            *(self._members.seeds, self._anti_entropy.compare, settings, rng),
            sources=seeds,
            look_up=self._look_up if seeds.sources else None,
            may_start=not self._is_client,
            hint=self._hint,
            on_waiting=on_joining,
        )
        self._group = asyncio.TaskGroup()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._entered = self._leaving = self._left = False
        self._last_warning = -math.inf

    # Discovery

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> None:
        if not self._entered or self._leaving:
            raise ClosedError("this peer is not in the run: enter its discovery with `async with` first")
        self._publish(self._records.write(key, subkey, value, expiration))

    async def withdraw(self, key: str, subkey: str) -> None:
        withdrawal = self._records.withdraw(key, subkey)
        if withdrawal is not None:
            self._publish(withdrawal)

    async def follow(self, key: str, *, keep: bool = True) -> None:
        """See `Discovery.follow`; every peer holds all records anyway."""

    def get(self, key: str) -> Mapping[str, Entry]:
        return self._records.table().read(key)

    def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        return self._records.watch(key)

    def knows(self, endpoint: str) -> bool:
        return self._records.table().has_subkey(endpoint)

    def withdrew(self, endpoint: str) -> bool:
        return not self.knows(endpoint) and endpoint not in self._members.expired

    def endpoints(self) -> frozenset[str]:
        return self._records.table().subkeys() - self._members.lost

    def diagnose(self) -> Diagnosis:
        known, table = self.endpoints(), self._records.table()
        peers = {name: peer for name, peer in table.peers().items() if name in known and name != self._endpoint}
        silent = self._members.silent(self._clock())
        moment = asyncio.get_running_loop().time()
        offsets, ahead = self._offsets.excessive(moment), self._offsets.own_offset(moment)
        correction = self._offsets.correction(moment)
        return Diagnosis(peers, silent, offsets, self._explain_isolation(), ahead, correction)

    def _explain_isolation(self) -> str:
        """Why this peer may be alone and what to do, if that follows from its `join`; empty otherwise."""
        if self._seeds.sources:
            why = "" if self._members.seeds else self._seeds.findings
        elif self._bootstrap.joined_itself or (self._joins_own_address and not self._members.seeds):
            why = f"the only {spelled('join')} of this peer is its own address"
        elif not self._members.seeds:
            why = f"this peer was given no {spelled('join')}"
        else:
            why = ""
        return why and f"{why}, so the others must join {self._endpoint}, or this peer one of them"

    @property
    def refused(self) -> Mapping[Reason, int]:
        return dict(self._records.refused)

    def __repr__(self) -> str:
        state = "left" if self._left else "entered" if self._entered else "new"
        return (
            f"<GossipDiscovery {self._endpoint} of {self._run_id}: {state}, {len(self._members)} other members, "
            f"{len(self._records.table())} records, {len(self._streams)} clients>"
        )

    # GossipService: the calls of other peers

    async def exchange(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        self._admit(digest.run_id)
        if digest.endpoint == self._endpoint:
            self._bootstrap.note_call_from_itself()
            raise CallRefusedError("", RefusalCause.SAME_NAME.value, RefusalCause.SAME_NAME)
        self._reachability.note_call()
        self._bootstrap.note_call(digest.endpoint)
        self._members.note_call(digest.endpoint, self._clock())
        async with aclosing(self._anti_entropy.answer(digest)) as replies:
            async for reply in replies:
                yield reply

    async def push(self, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        self._admit(run_id)
        if len(rumours) > 4 * self._settings.rumours_per_push:
            raise ProtocolViolationError(f"{len(rumours)} records in one call are too many")
        self._reachability.note_call()
        refusals = []
        for rumour in rumours:
            record = rumour.record
            reason = self._merge(record, "a push").reason
            if reason is not None:
                refusals.append(Refusal(record.key, record.subkey, reason.value))
            if (rumour.range_start, rumour.range_end) != (0, 0):
                newest = self._records.table().claim(record.key, record.subkey, record.owner)
                if newest is not None and newest.version == record.version:
                    self._rumours.spread(newest, rumour.range_start, rumour.range_end)
        return tuple(refusals)

    async def subscribe(self, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        self._admit(digest.run_id)
        self._reachability.note_call()
        with self._streams.open() as stream:  # before the backlog, so that no record is missed
            async with aclosing(self._anti_entropy.answer(digest)) as backlog:
                async for reply in backlog:
                    yield reply.records
            async with aclosing(stream.records()) as new:
                async for records in new:
                    yield records

    def list_records(self, key: str) -> tuple[Record, ...]:
        return self._records.table().list_records(key)

    def _admit(self, run_id: str) -> None:
        if run_id != self._run_id:
            runs = f"run {self._run_id!r}, not to {run_id[:64]!r}"
            reason = f"the called peer belongs to {runs}; give both peers the same run id"
            raise CallRefusedError("", reason, RefusalCause.WRONG_RUN)
        if self._left:
            raise CallRefusedError("", "has left the run")

    # Joining and leaving

    async def __aenter__(self) -> Self:
        """Joins the run.

        Raises:
            JoinError: no seed answered in time, or all refused, and would do so again.
        """
        if self._entered:
            raise ClosedError("a discovery can be entered only once; make another one")
        await self._group.__aenter__()
        self._entered = True
        try:
            self._spawn(self._rumours.run(self._spawn))
            if self._is_client:
                await self._bootstrap.join(self._join_timeout, self._spawn)
                self._spawn(self._maintenance.read_streams())
                self._spawn(self._maintenance.watch_stream())
            else:
                self._write_presence()  # before joining, so that the seeds receive it
                await self._bootstrap.join(self._join_timeout, self._spawn)
                self._publish(self._write_presence())  # the first may have expired while joining
                self._spawn(self._maintenance.exchange())
                self._spawn(self._maintenance.retry_missing())
                self._spawn(self._maintenance.retry_silent())
                self._spawn(self._renew_presence())
                if self._joins_own_address:
                    self._spawn(self._bootstrap.check_own_address(self._endpoint))
            if self._seeds.sources:
                self._spawn(self._look_up_while_alone())
        except BaseException as error:
            # Withdraws the presence record, which a seed may have already.
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Withdraws this peer's records, sends the withdrawals within `leave_timeout`, and ends all tasks."""
        self._leaving = True  # a record written from here on would not be withdrawn
        try:
            for withdrawal in self._records.withdraw_all():
                self._publish(withdrawal)
            async with asyncio.timeout(self._settings.leave_timeout):
                await self._rumours.flush()
                self._streams.end()
                await self._streams.wait_closed()
        except TimeoutError:
            logger.debug("%s left before all other peers had received its withdrawals", self._endpoint)
        finally:
            self._left = True
            self._records.close()
            self._streams.end()
            for task in list(self._tasks):
                task.cancel()
            # The task group may have caused a cancellation of the body; other errors of the body are not its own.
            if isinstance(error, asyncio.CancelledError):
                await self._group.__aexit__(kind, error, traceback)
            else:
                await self._group.__aexit__(None, None, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    # Looking up seeds

    async def _look_up(self) -> tuple[str, ...]:
        """Asks the sources of seeds, and returns all seeds that are known now."""
        await self._seeds.look_up()
        self._members.set_seeds(self._seeds.addresses)
        return self._members.seeds

    async def _look_up_while_alone(self) -> None:
        """Asks the sources again while no other peer is known. `Maintenance` calls what they name."""
        while True:
            await asyncio.sleep(self._settings.look_up_interval * self._rng.uniform(0.5, 1.5))
            if not len(self._members):
                await self._look_up()

    # Records

    def _merge(self, record: Record, sender: str) -> Merged:
        merged = self._records.merge(record, sender)
        if merged.is_new:
            self._streams.publish(record)
        return merged

    def _publish(self, record: Record) -> None:
        self._streams.publish(record)
        self._rumours.spread(record, *((1, RING - 1) if self._is_client else all_others(self._endpoint)))

    def _on_change(self, change: Change, expired: bool) -> None:
        if change.key != self._peers_key:
            return
        if change.after is not None:
            self._members.add(change.subkey)
        else:
            self._members.remove(change.subkey, self._clock(), expired=expired)

    def _on_refused(self, endpoint: str, refusals: tuple[Refusal, ...]) -> None:
        """Logs a warning if another peer has refused a record of this peer."""
        now = self._clock()
        for refusal in refusals:
            own = self._records.table().claim(refusal.key, refusal.subkey, self._author.owner)
            # The record store itself logs that another owner holds the place.
            if own is None or refusal.reason == Reason.FOREIGN:
                continue
            if now - self._last_warning >= _WARNING_PERIOD:
                self._last_warning = now
                logger.warning(
                    "%s refuses this peer's record of %r under %r: %s",
                    *(endpoint, refusal.subkey, refusal.key, printable(refusal.reason, 200)),
                )

    def _hint(self) -> str:
        """Sentences about what may be the cause if no seed answers; empty if there is nothing to say."""
        elsewhere = not all(is_loopback(parse_address(seed)[0]) for seed in self._members.seeds)
        proxies = ignored_proxies() if elsewhere else ""
        return " ".join(filter(None, (self._clocks_hint(), proxies and f"{proxies}.")))

    def _clocks_hint(self) -> str:
        """A sentence about the clocks that differ too much from this peer's; empty if there are none."""
        offsets = self._offsets.excessive(asyncio.get_running_loop().time())
        clocks = ", ".join(
            f"that of {name} is {clock_difference(ahead)} this peer's" for name, ahead in offsets.items()
        )
        return f"The clocks are too far apart: {clocks}; set them, for example with NTP." if clocks else ""

    def _write_presence(self) -> Record:
        return self._records.write(self._peers_key, self._endpoint, b"", self._clock() + self._settings.peer_lifetime)

    async def _renew_presence(self) -> None:
        """Renews this peer's presence record before it expires.

        Exchanges spread it. If this peer stood still for so long that the record has expired, a rumour does.
        """
        while True:
            await asyncio.sleep(self._settings.peer_refresh * self._rng.uniform(0.9, 1.0))
            if self._leaving:
                return
            expired = self._records.table().claim(self._peers_key, self._endpoint, self._author.owner) is None
            try:
                record = self._write_presence()
            except DiscoveryError as error:
                logger.warning("could not renew the record that shows that this peer is in the run: %s", error)
                continue
            if expired:
                self._publish(record)
            else:
                self._streams.publish(record)
