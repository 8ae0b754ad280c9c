"""Discovery by gossip between the peers themselves, on the port they have anyway: no server, no daemon.

Every peer holds all records of its run. A fresh one is told at once down a tree (`rumours`, `spread`); every other
second a peer compares what it holds with a random member (`exchange`), which brings whatever was missed and the signs
of life of the members. docs/decisions/0001-gossip.md says why, and what it costs.
"""

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

from averaging.common.addresses import CLIENT_PREFIX, is_endpoint
from averaging.discovery.base import Entry, Outlook, clock_difference
from averaging.discovery.gossip.anti_entropy import AntiEntropy
from averaging.discovery.gossip.bootstrap import SAME_NAME, Bootstrap, Waiting
from averaging.discovery.gossip.broadcast_tree import RING, all_others
from averaging.discovery.gossip.client_streams import ClientStreams
from averaging.discovery.gossip.clock_offsets import Clocks
from averaging.discovery.gossip.identity import Author, Ed25519Identity, Identity
from averaging.discovery.gossip.maintenance import Maintenance
from averaging.discovery.gossip.membership import Membership
from averaging.discovery.gossip.reachability import Reachability
from averaging.discovery.gossip.record import Reason
from averaging.discovery.gossip.record_store import RecordStore
from averaging.discovery.gossip.record_table import Change, Merged
from averaging.discovery.gossip.rumours import Rumours
from averaging.discovery.gossip.settings import GossipSettings
from averaging.errors import (
    CallRefusedError,
    ClosedError,
    ConfigError,
    DiscoveryError,
    ProtocolViolationError,
    WrongRunError,
    printable,
)
from averaging.protocol.messages import Digest, ExchangeReply, Record, Refusal, Rumour
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)

_COMPLAINT_PERIOD = 10.0  # s between two warnings that others refuse this peer's records


def peers_key(run_id: str) -> str:
    """The key under which every peer of a run but the clients keeps an empty record; the subkey is its endpoint."""
    return f"{run_id}.peers"


class GossipDiscovery:
    """Implements `discovery.base.Discovery`, and `transport.base.GossipService` for the others.

    Serve it before it is entered: peers that join each other must be able to answer while they join. Entering joins the
    run, leaving withdraws this peer's records and tells the others. It can be entered once.

    Args:
        run_id: peers of other runs are refused.
        endpoint: this peer's name, from `transport.bind()`.
        transport: how to call others.
        join: endpoints of peers of the run, any of them; none (or only this peer's own) starts a run.
        join_timeout: seconds within which one of them must answer; this peer's own standstill does not count.
        identity: the key that owns this peer's records; a fresh one by default.
        clock: seconds since the epoch.
        rng: picks whom to talk to, and when.
        settings: the constants.
        on_joining: called after a second, and then more and more seldom, while nobody to join has answered.

    Raises:
        ConfigError: `endpoint` is no endpoint, or a client has nobody to join.
    """

    def __init__(
        self,
        run_id: str,
        endpoint: str,
        transport: Transport,
        *,
        join: Sequence[str] = (),
        join_timeout: float = 10.0,
        identity: Identity | None = None,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        settings: GossipSettings | None = None,
        on_joining: Callable[[Waiting], None] | None = None,
    ) -> None:
        self._is_client = endpoint.startswith(CLIENT_PREFIX)
        if not is_endpoint(endpoint):
            raise ConfigError(f"{endpoint!r} cannot be a peer's name; give HOST:PORT or {CLIENT_PREFIX}<uuid4>")
        if self._is_client and not join:
            raise ConfigError("a client accepts no connection, so it needs a peer to join")
        self._run_id = run_id
        self._endpoint = endpoint
        self._transport = transport
        self._join_timeout = join_timeout
        self._clock = clock
        self._rng = rng = rng or random.Random()
        self._settings = settings = settings or GossipSettings()
        self._peers_key = peers_key(run_id)
        self._author = Author(run_id, identity or Ed25519Identity(), settings.limits)
        self._board = RecordStore(self._author, settings.limits, clock, self._on_change)
        self._members = Membership(endpoint, join, rng, retry_lost=settings.retry_lost, most_lost=settings.most_lost)
        self._followers = ClientStreams(endpoint, settings)
        self._rumours = Rumours(transport, run_id, self._members, settings, clock, self._on_refused)
        self._clocks = Clocks(settings.limits.clock_tolerance, settings.exchange_timeout)
        self._exchange = AntiEntropy(
            run_id, endpoint, transport, self._board, self._take, self._rumours, settings, self._clocks, clock
        )
        self._reach = Reachability(endpoint)
        self._upkeep = Maintenance(
            transport, self._members, self._exchange, self._take, settings, clock, rng, on_answer=self._reach.answered
        )
        self._joins_itself = endpoint in join
        self._joining = Bootstrap(
            self._members.seeds, self._exchange.compare, settings, rng, hint=self._clocks_hint, on_waiting=on_joining
        )
        self._group = asyncio.TaskGroup()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._entered = self._leaving = self._left = False
        self._last_complaint = -math.inf

    # The contract of a discovery

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> None:
        """See `Discovery.store`."""
        if not self._entered or self._leaving:
            raise ClosedError("this peer is not in the run: enter its discovery with `async with` first")
        self._tell(self._board.write(key, subkey, value, expiration))

    async def withdraw(self, key: str, subkey: str) -> None:
        """See `Discovery.withdraw`."""
        withdrawal = self._board.withdraw(key, subkey)
        if withdrawal is not None:
            self._tell(withdrawal)

    def get(self, key: str) -> Mapping[str, Entry]:
        """See `Discovery.get`."""
        return self._board.table().read(key)

    def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        """See `Discovery.watch`."""
        return self._board.watch(key)

    def names(self, endpoint: str) -> bool:
        """See `Discovery.names`."""
        return self._board.table().names(endpoint)

    def endpoints(self) -> frozenset[str]:
        """See `Discovery.endpoints`."""
        return self._board.table().subkeys() - self._members.vanished

    def outlook(self) -> Outlook:
        """See `Discovery.outlook`."""
        known, table = self.endpoints(), self._board.table()
        peers = {name: one for name, one in table.sightings().items() if name in known and name != self._endpoint}
        silent = self._members.silent(self._clock())
        return Outlook(peers, silent, self._clocks.apart(asyncio.get_running_loop().time()), self._told_to_join())

    def _told_to_join(self) -> str:
        """What to do if this peer is alone, as far as that follows from whom it was told to join."""
        if self._members.seeds and not self._joining.alone:
            return ""
        why = (
            "the only `join` of this peer is its own address"
            if self._joins_itself or self._joining.alone
            else ("this peer was given no `join`")
        )
        return f"{why}, so the others must join {self._endpoint}, or this peer one of them"

    @property
    def refused(self) -> Mapping[Reason, int]:
        """How many records from others were refused since the start, by reason."""
        return dict(self._board.refused)

    def __repr__(self) -> str:
        state = "left" if self._left else "entered" if self._entered else "new"
        return (
            f"<GossipDiscovery {self._endpoint} of {self._run_id}: {state}, {len(self._members)} other members, "
            f"{len(self._board.table())} records, {len(self._followers)} clients>"
        )

    # What others call

    async def exchange(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        """See `GossipService.exchange`."""
        self._admit(digest.run_id)
        if digest.endpoint == self._endpoint:  # who has asked only itself has joined nobody
            self._joining.called_by_itself()
            raise CallRefusedError(self._endpoint, SAME_NAME)
        self._reach.called()
        self._clocks.called(digest.endpoint, digest.sent, self._clock(), asyncio.get_running_loop().time())
        self._joining.called_by(digest.endpoint)
        self._members.trust(digest.endpoint)
        async with aclosing(self._exchange.answer(digest)) as replies:
            async for reply in replies:
                yield reply

    async def push(self, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        """See `GossipService.push`."""
        self._admit(run_id)
        if len(rumours) > 4 * self._settings.rumours_per_push:
            raise ProtocolViolationError(f"{len(rumours)} records in one call are too many")
        self._reach.called()
        refusals = []
        for rumour in rumours:
            record = rumour.record
            reason = self._take(record, "a push").reason
            if reason is not None:
                refusals.append(Refusal(record.key, record.subkey, reason.value))
            if (rumour.range_start, rumour.range_end) != (0, 0):
                held = self._board.table().claim(record.key, record.subkey, record.owner)
                if held is not None and held.version == record.version:
                    self._rumours.tell(held, rumour.range_start, rumour.range_end)
        return tuple(refusals)

    async def subscribe(self, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        """See `GossipService.subscribe`."""
        self._admit(digest.run_id)
        self._reach.called()
        with self._followers.follow() as follower:  # from here on nothing is missed
            async with aclosing(self._exchange.answer(digest)) as backlog:
                async for reply in backlog:
                    yield reply.records
            async with aclosing(follower.records()) as fresh:
                async for records in fresh:
                    yield records

    def list_records(self, key: str) -> tuple[Record, ...]:
        """See `GossipService.list_records`."""
        return self._board.table().listing(key)

    def _admit(self, run_id: str) -> None:
        if run_id != self._run_id:
            told = f"{self._endpoint} belongs to run {self._run_id!r}, not to {run_id[:64]!r}"
            raise WrongRunError(self._endpoint, f"{told}; give both peers the same run id")
        if self._left:
            raise CallRefusedError(self._endpoint, "has left the run")

    # Coming and going

    async def __aenter__(self) -> Self:
        """Joins the run.

        Raises:
            NoSeedAnsweredError: there are peers to join and none answered in time; a `JoinRefusedError` if all refuse
                for good.
        """
        if self._entered:
            raise ClosedError("a discovery can be entered only once; make another one")
        await self._group.__aenter__()
        self._entered = True
        try:
            self._spawn(self._rumours.run(self._spawn))
            if self._is_client:
                await self._joining.join(self._join_timeout, self._spawn)
                self._spawn(self._upkeep.follow())
            else:
                self._write_presence()  # before joining, so that the seeds take it along
                await self._joining.join(self._join_timeout, self._spawn)
                self._tell(self._write_presence())  # joining may have taken longer than a record lasts
                self._spawn(self._upkeep.exchange())
                self._spawn(self._upkeep.look_for_missing())
                self._spawn(self._show_life())
                if self._joins_itself:
                    self._spawn(self._joining.look_for_namesake(self._endpoint))
        except BaseException as error:
            # In order: a seed may have this peer's presence already, and would have it for long.
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Withdraws this peer's records, tells the others, for a second at most, and ends all tasks."""
        self._leaving = True  # what were written from here on would outlive it
        try:
            for withdrawal in self._board.withdraw_all():
                self._tell(withdrawal)
            async with asyncio.timeout(self._settings.leave_timeout):
                await self._rumours.flush()
                self._followers.end()
                await self._followers.gone()
        except TimeoutError:
            logger.debug("%s left before all others had taken notice", self._endpoint)
        finally:
            self._left = True
            self._board.close()
            self._followers.end()
            for task in list(self._tasks):
                task.cancel()
            # Of the body's errors only a cancellation is the group's business: it may have caused it.
            if isinstance(error, asyncio.CancelledError):
                await self._group.__aexit__(kind, error, traceback)
            else:
                await self._group.__aexit__(None, None, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    # What happens to records

    def _take(self, record: Record, sender: str) -> Merged:
        merged = self._board.merge(record, sender)
        if merged.news:
            self._followers.publish(record)
        return merged

    def _tell(self, record: Record) -> None:
        """Has a record of this peer's own told to everybody."""
        self._followers.publish(record)
        self._rumours.tell(record, *((1, RING - 1) if self._is_client else all_others(self._endpoint)))

    def _on_change(self, change: Change, expired: bool) -> None:
        if change.key != self._peers_key:
            return
        if change.after is not None:
            self._members.heard_of(change.subkey)
        else:
            self._members.gone(change.subkey, self._clock(), vanished=expired)

    def _on_refused(self, endpoint: str, refusals: tuple[Refusal, ...]) -> None:
        """Another peer did not take a record; it matters here if it is this peer's own."""
        now = self._clock()
        for refusal in refusals:
            own = self._board.table().claim(refusal.key, refusal.subkey, self._author.owner)
            # The board itself reports a place that somebody else holds.
            if own is None or refusal.reason == Reason.FOREIGN:
                continue
            if now - self._last_complaint >= _COMPLAINT_PERIOD:
                self._last_complaint = now
                logger.warning(
                    "%s refuses this peer's record of %r under %r: %s",
                    *(endpoint, refusal.subkey, refusal.key, printable(refusal.reason, 200)),
                )

    def _clocks_hint(self) -> str:
        """A sentence about the clocks that are too far from this peer's; empty if there are none."""
        apart = self._clocks.apart(asyncio.get_running_loop().time())
        told = ", ".join(f"that of {name} is {clock_difference(ahead)} this peer's" for name, ahead in apart.items())
        return f"The clocks are too far apart: {told}; set them, for example with NTP." if told else ""

    def _write_presence(self) -> Record:
        return self._board.write(self._peers_key, self._endpoint, b"", self._clock() + self._settings.peer_lifetime)

    async def _show_life(self) -> None:
        """Renews this peer's record before it expires. The exchanges spread it; a rumour does after a long sleep."""
        while True:
            await asyncio.sleep(self._settings.peer_refresh * self._rng.uniform(0.9, 1.0))
            if self._leaving:
                return
            expired = self._board.table().claim(self._peers_key, self._endpoint, self._author.owner) is None
            try:
                record = self._write_presence()
            except DiscoveryError as error:
                logger.warning("this peer cannot show the others that it is here: %s", error)
                continue
            if expired:
                self._tell(record)
            else:
                self._followers.publish(record)
