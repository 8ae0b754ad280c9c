"""The discovery of one peer in etcd: puts what it writes and what it reads together."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from averaging.common import CLIENT_PREFIX, Backoff, is_endpoint, spelled
from averaging.config import PeerConfig
from averaging.discovery import MAX_LIFETIME, Diagnosis, Entry
from averaging.discovery.etcd.contact import Contact
from averaging.discovery.etcd.followed_key import FollowedKey
from averaging.discovery.etcd.layout import RecordSeal, name_of
from averaging.discovery.etcd.own_records import MAX_BACKOFF, MIN_BACKOFF, OwnRecords
from averaging.discovery.etcd.places import GroupPlace, GroupPlaces
from averaging.discovery.gossip import (
    Author,
    CertifiedIdentity,
    Change,
    ClockOffsets,
    Ed25519Identity,
    Identity,
    Reason,
    RecordLimits,
    RecordStore,
    peers_key,
)
from averaging.errors import (
    AveragingError,
    CallRefusedError,
    ClosedError,
    ConfigError,
    JoinError,
    RefusalCause,
    TransportError,
)
from averaging.protocol import Digest, ExchangeReply, Record, Refusal, Rumour
from averaging.security import Credentials, read_tls
from averaging.timing import Deadline, FairTimeout
from averaging.transport import KeyValueStore, LeaseEndedError
from averaging.transport.grpc import EtcdCluster, RpcChannel


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSettings:
    """Times (in seconds) and sizes of discovery in etcd.

    Attributes:
        limits: bounds of acceptable records, as with gossip.
        lease: time after which the records of a dead peer go.
        renew: interval of the renewals of the lease.
        presence: interval of the renewals of the record that shows that this peer is in the run.
        neighbours: number of other peers that this peer knows although it reads none of their records. Together the
            peers know all, so `averaging top` finds the whole run through any of them.
        look: mean interval at which it looks for its neighbours.
        most: number of records of one key that it holds.
        lapse: time after which a key is no longer followed that nobody reads.
        hold: time for which records that expire are kept while etcd does not answer, since nobody can renew them.
        wait: time for which a write, or the first read of a key, is waited for.
        leave: time limit for the withdrawal of this peer's records when it leaves.
    """

    limits: RecordLimits = field(default_factory=RecordLimits)
    lease: float = 30.0
    renew: float = 8.0
    presence: float = MAX_LIFETIME / 3
    neighbours: int = 32
    look: float = 20.0
    most: int = 1024
    lapse: float = 60.0
    hold: float = 600.0
    wait: float = 3.0
    leave: float = 1.0


class EtcdDiscovery:
    """Implements `discovery.base.Discovery`. Entering it joins the run; leaving it withdraws this peer's records.

    It is also the `GossipService` of a peer that does not gossip: it tells peers that do so that their run is another.

    Args:
        run_id: records of other runs are neither read nor accepted.
        endpoint: this peer's name, from `transport.bind()`.
        store: the cluster.
        name: the cluster as its user wrote it, for errors.
        join_timeout: seconds within which etcd must answer; time in which this peer stood still does not count.
        identity: the key that owns this peer's records; a new one by default.
        tokens: the run's tokens, with which the records are sealed.
        close: ends the connections to the cluster.
        clock: seconds since the epoch.
        rng: spreads retries and renewals.

    Raises:
        ConfigError: `endpoint` is malformed.
    """

    def __init__(
        self,
        run_id: str,
        endpoint: str,
        store: KeyValueStore,
        *,
        name: str = "etcd",
        join_timeout: float = 10.0,
        identity: Identity | None = None,
        tokens: tuple[str, ...] = (),
        close: Callable[[], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        settings: EtcdSettings | None = None,
    ) -> None:
        if not is_endpoint(endpoint):
            raise ConfigError(f"{endpoint!r} cannot be a peer's endpoint; give HOST:PORT or {CLIENT_PREFIX}<uuid4>")
        self._run_id, self._endpoint = run_id, endpoint
        self._store, self._close = store, close
        self._join_timeout, self._clock, self._rng = join_timeout, clock, rng or random.Random()
        self._settings = settings = settings or EtcdSettings()
        self._seal = RecordSeal(tokens)
        self._contact = Contact(name)
        self._author = Author(run_id, identity or Ed25519Identity(), settings.limits)
        self._records = RecordStore(self._author, settings.limits, clock, self._note_change, self._holds)
        self._own = OwnRecords(
            *(store, self._contact),
            lease_seconds=settings.lease,
            renew_seconds=settings.renew,
            on_created=self._note_created,
            renewed=self._renewed,
            rng=self._rng,
        )
        self._records_in_etcd: dict[bytes, Record] = {}  # of this peer, by their key there
        self._followed: dict[str, FollowedKey] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._neighbours: FollowedKey | None = None
        self._places = GroupPlaces(run_id, store)
        self._offsets = ClockOffsets(settings.limits.clock_tolerance, settings.wait)
        self._withdrew: dict[str, None] = {}  # peers that have withdrawn all that this peer held of them
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()
        self._entered = self._leaving = False

    @classmethod
    def from_config(
        cls,
        config: PeerConfig,
        endpoint: str,
        credentials: Credentials,
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> Self:
        """The discovery of a peer with these options, in the cluster that they name.

        Raises:
            ConfigError: a file with certificates is unreadable.
        """
        ca, cert, key = config.etcd_files or (None, None, None)
        tls = read_tls(ca, cert, key, clock) or credentials.tls
        # The run's tokens only seal the records: they are not sent to etcd.
        channels = [RpcChannel(member, credentials=Credentials(tls=tls)) for member in config.etcd]
        cluster = EtcdCluster(channels, EtcdSettings().wait)
        return cls(
            *(config.run_id, endpoint, cluster),
            name=config.discovery,
            join_timeout=config.join_timeout,
            identity=CertifiedIdentity(credentials.tls, clock) if credentials.tls else None,
            tokens=credentials.tokens,
            close=cluster.close,
            clock=clock,
            rng=rng,
        )

    # Discovery

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> None:
        if not self._entered or self._leaving:
            raise ClosedError("this peer is not in the run: enter its discovery with `async with` first")
        self._put(self._records.write(key, subkey, value, expiration))

    async def until_stored(self, key: str, subkey: str) -> None:
        record = self._records.table().claim(key, subkey, self._author.owner)
        if record is None or self._contact.lost_seconds is not None:
            return
        followed = self._follow(key)
        revision = await self._own.until_written(name_of(self._run_id, record), self._settings.wait)
        if revision and followed is not None:
            await followed.until_revision(revision, self._settings.wait)

    async def withdraw(self, key: str, subkey: str) -> None:
        withdrawal = self._records.withdraw(key, subkey)
        if withdrawal is not None:
            self._delete(name_of(self._run_id, withdrawal))

    async def follow(self, key: str, *, keep: bool = True) -> None:
        followed = self._follow(key)
        if followed is not None:
            followed.pinned |= keep
            await followed.until_loaded(self._settings.wait)

    def get(self, key: str) -> Mapping[str, Entry]:
        self._follow(key)
        return self._records.table().read(key)

    async def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        followed = self._follow(key)
        if followed is not None:
            followed.readers += 1
        try:
            async with aclosing(self._records.watch(key)) as changes:
                async for entries in changes:
                    yield entries
        finally:
            if followed is not None:
                followed.readers -= 1
                followed.used = asyncio.get_running_loop().time()

    async def take_place(self, key: str, size: int) -> str:
        if not self._own.lease or self._contact.lost_seconds is not None or self._neighbours is None:
            return key
        try:
            if self._fits_one_group(size):  # perhaps no longer: all must decide alike
                await self._neighbours.read()
            if self._fits_one_group(size):
                return key
            place = await self._places.take(key, size, self._own.lease)
        except LeaseEndedError:
            self._own.note_lease_end()
            return key
        except AveragingError as error:
            self._contact.note_failure(error)
            return key
        self._follow(place.key)
        return place.key

    def leave_place(self, key: str, *, began: bool, full: bool) -> None:
        place = self._places.leave(key, began=began)
        if place is not None and began and not full and not self._leaving:
            self._spawn(self._close_place(place))

    async def _close_place(self, place: GroupPlace) -> None:
        with suppress(AveragingError):  # otherwise the next search under the key closes it
            await self._places.close(place)

    def _fits_one_group(self, size: int) -> bool:
        """Whether all peers of the run, as far as this one knows, may be in one group."""
        neighbours = self._neighbours
        return neighbours is None or (neighbours.complete and len(self.endpoints()) <= size)

    def knows(self, endpoint: str) -> bool:
        return self._records.table().has_subkey(endpoint)

    def withdrew(self, endpoint: str) -> bool:
        return endpoint in self._withdrew

    def endpoints(self) -> frozenset[str]:
        return self._records.table().subkeys()

    def diagnose(self) -> Diagnosis:
        peers = {name: peer for name, peer in self._records.table().peers().items() if name != self._endpoint}
        moment, why = asyncio.get_running_loop().time(), str(self._contact)
        silent = {self._contact.name: why.removeprefix(f"{self._contact.name} ")} if why else {}
        return Diagnosis(peers, silent, self._offsets.excessive(moment), why)

    @property
    def refused(self) -> Mapping[Reason, int]:
        return dict(self._records.refused)

    def __repr__(self) -> str:
        state = "left" if self._leaving else "entered" if self._entered else "new"
        return (
            f"<EtcdDiscovery {self._endpoint} of {self._run_id} in {self._contact.name}: {state}, "
            f"{len(self._records.table())} records under {len(self._followed)} keys>"
        )

    # GossipService: the calls of peers that gossip, whose run is another one

    async def exchange(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        """Refuses."""
        raise self._no_gossip()
        yield

    async def push(self, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        raise self._no_gossip()

    async def subscribe(self, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        """Refuses."""
        raise self._no_gossip()
        yield

    def list_records(self, key: str) -> tuple[Record, ...]:
        return self._records.table().list_records(key)

    def _no_gossip(self) -> CallRefusedError:
        reason = (
            f"the called peer finds its run through {self._contact.name}, and the caller finds its own by gossip: give "
            "both the same discovery (a peer with discovery in etcd joins no other)"
        )
        return CallRefusedError("", reason, RefusalCause.WRONG_RUN)

    # Joining and leaving

    async def __aenter__(self) -> Self:
        """Joins the run.

        Raises:
            JoinError: etcd does not answer in time, or refuses, and would do so again.
        """
        if self._entered:
            raise ClosedError("a discovery can be entered only once; make another one")
        await self._group.__aenter__()
        self._entered = True
        try:
            await self._connect()
            for work in (self._own.write(), self._own.renew(), self._maintain()):
                self._spawn(work)
            key = peers_key(self._run_id)
            self._neighbours = neighbours = self._new_followed(key, self._settings.neighbours)
            if not self._endpoint.startswith(CLIENT_PREFIX):
                self._spawn(self._show_presence(key))
            self._spawn(neighbours.poll(self._settings.look))
            await neighbours.until_loaded(self._settings.wait)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Withdraws this peer's records, and ends all tasks."""
        self._leaving = True
        try:
            self._records.withdraw_all()
            await self._own.withdraw_all(self._settings.leave)
        finally:
            self._records.close()
            for task in tuple(self._running):
                task.cancel()
            try:
                # The task group may have caused a cancellation of the body; other errors of the body are not its own.
                if isinstance(error, asyncio.CancelledError):
                    await self._group.__aexit__(kind, error, traceback)
                else:
                    await self._group.__aexit__(None, None, None)
            finally:
                if self._close is not None:
                    await self._close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _connect(self) -> None:
        backoff = Backoff(MIN_BACKOFF, MAX_BACKOFF, self._rng)
        reason = "no answer"
        try:
            async with FairTimeout(Deadline(self._join_timeout, "join_timeout"), self._join_timeout):
                while True:
                    try:
                        await self._own.connect()
                        return
                    except AveragingError as error:
                        reason = error.reason
                        if isinstance(error, TransportError) and error.definite:
                            raise self._not_joined(reason, None) from None
                    await asyncio.sleep(backoff.next_delay())
        except TimeoutError:
            raise self._not_joined(reason, self._join_timeout) from None

    def _not_joined(self, reason: str, seconds: float | None) -> JoinError:
        name = self._contact.name
        within = "refuses this peer" if seconds is None else f"has not answered within {seconds:g} s"
        remedy = (
            f"check the addresses in {spelled('discovery')}, that a majority of etcd's members is up, and that it "
            "accepts this peer's certificate"
        )
        return JoinError({name: reason}, seconds, text=f"{name} {within} ({reason}); {remedy}")

    # Records

    def _put(self, record: Record) -> bytes:
        name = name_of(self._run_id, record)
        self._records_in_etcd[name] = record
        self._own.put(name, self._seal.pack(record))
        return name

    def _delete(self, name: bytes) -> None:
        self._records_in_etcd.pop(name, None)
        self._own.delete(name)

    def _note_created(self, name: bytes, revision: int) -> None:
        """This peer's record is in etcd: from here on its place in the order is known."""
        record = self._records_in_etcd.get(name)
        if record is not None:
            self._records.table().set_created(record.key, record.subkey, record.owner, revision)

    async def _show_presence(self, key: str) -> None:
        while True:
            expiration = self._clock() + min(MAX_LIFETIME, self._settings.limits.lifetime)
            with suppress(AveragingError):
                self._put(self._records.write(key, self._endpoint, b"", expiration))
            await asyncio.sleep(self._settings.presence * self._rng.uniform(0.9, 1.0))

    def _renewed(self, name: bytes) -> bytes | None:
        """A later version of a record of this peer; None if it has expired meanwhile."""
        old = self._records_in_etcd[name]
        if old.expiration <= self._clock():
            del self._records_in_etcd[name]
            return None
        record = self._records.write(old.key, old.subkey, old.value, old.expiration)
        self._records_in_etcd[name] = record
        return self._seal.pack(record)

    def _note_change(self, change: Change, expired: bool) -> None:
        if change.after is not None or expired:
            self._withdrew.pop(change.subkey, None)
        elif not self._records.table().has_subkey(change.subkey):
            self._withdrew[change.subkey] = None
            if len(self._withdrew) > self._settings.most:
                del self._withdrew[next(iter(self._withdrew))]
        elif self._neighbours is not None:
            self._neighbours.read_soon()  # it may have left

    def _holds(self) -> bool:
        """Whether expired records stay: etcd does not answer, so their owners cannot renew them."""
        lost = self._contact.lost_seconds
        return lost is not None and lost < self._settings.hold

    # Reading

    def _follow(self, key: str) -> FollowedKey | None:
        """The key, which is followed from here on; None before this peer has joined, and after it has left."""
        if not self._entered or self._leaving:
            return None
        if key not in self._followed:
            self._followed[key] = followed = self._new_followed(key, self._settings.most)
            self._tasks[key] = self._spawn(followed.run())
        self._followed[key].used = asyncio.get_running_loop().time()
        return self._followed[key]

    def _new_followed(self, key: str, most: int) -> FollowedKey:
        return FollowedKey(
            *(self._run_id, key, self._endpoint, self._store, self._records, self._seal, self._contact),
            most=most,
            owner=self._author.owner,
            on_deletion=self._own.note_deletion,
            on_fresh=self._note_fresh,
            rng=self._rng,
        )

    def _note_fresh(self, record: Record) -> None:
        """A record that another peer has written just now: its version is the time by that peer's clock."""
        if record.owner != self._author.owner:
            moment = asyncio.get_running_loop().time()
            self._offsets.note_call(record.subkey, record.version / 1e6, self._clock(), moment)

    async def _maintain(self) -> None:
        """Ends what has lapsed: keys that nobody reads, and this peer's records that have expired."""
        while True:
            await asyncio.sleep(min(self._settings.lapse, 10.0) * self._rng.uniform(0.5, 1.0))
            now = asyncio.get_running_loop().time()
            for key, followed in list(self._followed.items()):
                if not followed.pinned and not followed.readers and now - followed.used > self._settings.lapse:
                    del self._followed[key]
                    self._tasks.pop(key).cancel()
                    followed.forget()
            expired = self._clock() - self._settings.limits.clock_tolerance  # by all clocks
            for name, record in list(self._records_in_etcd.items()):
                if record.expiration < expired:
                    self._delete(name)
