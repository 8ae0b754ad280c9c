"""The discovery of one peer in etcd: puts what it writes and what it reads together."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Self

from averaging.common import spelled
from averaging.config import PeerConfig
from averaging.discovery import Diagnosis, Entry
from averaging.discovery.etcd.records import EtcdAccess, EtcdSettings, FollowedKey, OwnRecords, RecordLayout
from averaging.discovery.gossip import (
    Change,
    ClockOffsets,
    Identity,
    RecordDiscovery,
    peers_key,
)
from averaging.errors import (
    AveragingError,
    CallRefusedError,
    JoinError,
    RefusalCause,
    TransportError,
)
from averaging.protocol import Digest, ExchangeReply, Record, Refusal, Rumour
from averaging.security import Credentials
from averaging.timing import Deadline, FairTimeout
from averaging.transport import KeyValueStore
from averaging.transport.grpc import EtcdCluster, RpcChannel

EXPIRED_AFTER = 10.0
"""Interval at which keys that have lapsed are forgotten, and records of this peer that have expired are deleted."""


class EtcdDiscovery(RecordDiscovery):
    """Implements `discovery.base.Discovery`. Entering it joins the run; leaving it withdraws this peer's records.

    It is also the `GossipService` of a peer that does not gossip: it tells peers that do so that their run is another.
    Records of other runs are neither read nor accepted; those of this peer belong to `identity`, a new key by default,
    and are sealed with the run's `tokens`. The `store` is closed when this peer leaves.
    """

    def __init__(
        self,
        run_id: str,
        endpoint: str,
        store: KeyValueStore,
        *,
        identity: Identity | None = None,
        tokens: tuple[str, ...] = (),
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        settings: EtcdSettings | None = None,
    ) -> None:
        self._settings = settings = settings or EtcdSettings()
        super().__init__(run_id, endpoint, identity, settings.limits, clock, self._holds)
        self._access = EtcdAccess(store, settings, rng or random.Random())
        self._layout = RecordLayout(run_id, tokens)
        self._own = OwnRecords(self._access)
        self._followed: dict[str, tuple[FollowedKey, asyncio.Task[None]]] = {}
        self._neighbours: FollowedKey | None = None
        self._offsets = ClockOffsets(settings.limits.clock_tolerance)
        self._withdrew: dict[str, None] = {}  # peers that have withdrawn all that this peer held of them

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
        """The discovery of a peer with these options, in the cluster that they name."""
        # The run's tokens only seal the records: they are not sent to etcd.
        channels = [RpcChannel(member, credentials=Credentials(tls=credentials.tls)) for member in config.etcd]
        settings = EtcdSettings(name=config.discovery, join_timeout=config.join_timeout)
        return cls(
            *(config.run_id, endpoint, EtcdCluster(channels, settings.wait)),
            tokens=credentials.tokens,
            clock=clock,
            rng=rng,
            settings=settings,
        )

    # Discovery

    async def follow(self, key: str, *, keep: bool = True) -> None:
        followed = self._follow(key)
        if followed is not None:
            followed.pinned |= keep
            await followed.until_loaded()

    def get(self, key: str) -> Mapping[str, Entry]:
        self._follow(key)
        return super().get(key)

    async def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        followed = self._follow(key)
        if followed is not None:
            followed.readers += 1
        try:
            async with aclosing(super().watch(key)) as changes:
                async for entries in changes:
                    yield entries
        finally:
            if followed is not None:
                followed.readers -= 1
                followed.used = asyncio.get_running_loop().time()

    def withdrew(self, endpoint: str) -> bool:
        return endpoint in self._withdrew

    def diagnose(self) -> Diagnosis:
        peers = {name: peer for name, peer in self._records.table().peers().items() if name != self._endpoint}
        name, why = self._settings.name, self._access.explain()
        offsets = self._offsets.excessive(asyncio.get_running_loop().time())
        return Diagnosis(peers, {name: why} if why else {}, offsets, f"{name} {why}" if why else "")

    # GossipService: the calls of peers that gossip, whose run is another one

    async def exchange(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        raise self._no_gossip()
        yield

    async def push(self, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        raise self._no_gossip()

    async def subscribe(self, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        raise self._no_gossip()
        yield

    def _no_gossip(self) -> CallRefusedError:
        reason = (
            f"the called peer finds its run through {self._settings.name}, and the caller finds its own by gossip: "
            "give both the same discovery (a peer with discovery in etcd joins no other)"
        )
        return CallRefusedError("", reason, RefusalCause.WRONG_RUN)

    # Joining and leaving

    async def _join(self) -> None:
        await self._connect()
        self._neighbours = self._reader(peers_key(self._run_id), self._settings.neighbours)
        for work in (self._own.write(), self._own.renew(), self._delete_expired(), self._show_presence()):
            self._spawn(work)
        self._spawn(self._neighbours.poll(self._settings.look))
        await self._neighbours.until_loaded()

    async def _leave(self) -> None:
        self._records.withdraw_all()
        await self._own.withdraw_all()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, traceback)
        finally:  # after all tasks
            await self._access.store.close()

    async def _connect(self) -> None:
        backoff, timeout, reason = self._access.backoff(), self._settings.join_timeout, "no answer"
        try:
            async with FairTimeout(Deadline(timeout, "join_timeout"), timeout):
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
            raise self._not_joined(reason, timeout) from None

    def _not_joined(self, reason: str, seconds: float | None) -> JoinError:
        name = self._settings.name
        within = "refuses this peer" if seconds is None else f"has not answered within {seconds:g} s"
        remedy = (
            f"check the addresses in {spelled('discovery')}, that a majority of etcd's members is up, and that it "
            "accepts this peer's certificate"
        )
        return JoinError({name: reason}, seconds, text=f"{name} {within} ({reason}); {remedy}")

    # Writing

    def _publish(self, record: Record) -> None:
        name = self._layout.name(record)
        if record.withdrawn:
            self._own.delete(name)
        else:
            self._own.put(name, self._layout.pack(record), record.expiration)

    async def _show_presence(self) -> None:
        while not self._is_client:
            with suppress(AveragingError):
                expiration = self._clock() + self._settings.limits.lifetime
                self._publish(self._records.write(peers_key(self._run_id), self._endpoint, b"", expiration))
            await asyncio.sleep(self._settings.presence * self._access.rng.uniform(0.9, 1.0))

    # Reading

    def _follow(self, key: str) -> FollowedKey | None:
        """The key, which is followed from here on; None before this peer has joined, and after it has left."""
        if not self._entered or self._leaving:
            return None
        if key not in self._followed:
            reader = self._reader(key, self._settings.most)
            self._followed[key] = reader, self._spawn(reader.run())
        followed, _ = self._followed[key]
        followed.used = asyncio.get_running_loop().time()
        return followed

    def _reader(self, key: str, most: int) -> FollowedKey:
        return FollowedKey(self._access, self._layout, self._records, key, self._endpoint, most, self._note_fresh)

    def _note_fresh(self, record: Record) -> None:
        if record.owner != self._author.owner:
            # Its version is the time by that peer's clock. How long it was on its way is unknown, so this shows only
            # that a clock is ahead.
            moment = asyncio.get_running_loop().time()
            self._offsets.note(record.subkey, record.version / 1e6, self._clock(), math.inf, moment)

    def _on_change(self, change: Change, expired: bool) -> None:
        if change.after is not None or expired:
            self._withdrew.pop(change.subkey, None)
        elif not self._records.table().has_subkey(change.subkey):
            self._withdrew[change.subkey] = None
            if len(self._withdrew) > self._settings.most:
                del self._withdrew[next(iter(self._withdrew))]
        elif self._neighbours is not None:
            self._neighbours.soon.set()  # it may have left

    def _holds(self) -> bool:
        lost = self._access.lost_seconds  # while etcd does not answer, owners cannot renew their records
        return lost is not None and lost < self._settings.hold

    async def _delete_expired(self) -> None:
        while True:
            await asyncio.sleep(EXPIRED_AFTER * self._access.rng.uniform(0.5, 1.0))
            now = asyncio.get_running_loop().time()
            for key, (followed, task) in list(self._followed.items()):
                if not followed.pinned and not followed.readers and now - followed.used > self._settings.lapse:
                    del self._followed[key]
                    task.cancel()
                    followed.forget()
            self._own.delete_expired(self._clock() - self._settings.limits.clock_tolerance)  # by all clocks
