"""The discovery of one peer: puts the parts of gossip together and serves the calls of other peers."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from averaging.common import ignored_proxies, is_loopback, parse_address, spelled
from averaging.discovery import Diagnosis, clock_difference
from averaging.discovery.gossip.anti_entropy import AntiEntropy, Maintenance
from averaging.discovery.gossip.bootstrap import Bootstrap, Waiting
from averaging.discovery.gossip.clock_offsets import ClockOffsets
from averaging.discovery.gossip.membership import RING, GossipAccess, GossipSettings, Membership, all_others
from averaging.discovery.gossip.record import Identity, Reason
from averaging.discovery.gossip.record_discovery import RecordDiscovery
from averaging.discovery.gossip.record_table import Change, Merged
from averaging.discovery.gossip.rumours import ClientStreams, Rumours
from averaging.errors import (
    CallRefusedError,
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

WARNING_PERIOD = 10.0  # seconds between two warnings that other peers refuse this peer's records

UNREACHED_ANSWERS = 30
"""Answers in a row without a call from another peer, after which this peer warns. Each peer calls a random one every
2 s, so this is no chance."""


def peers_key(run_id: str) -> str:
    return f"{run_id}.peers"


class GossipDiscovery(RecordDiscovery):
    """Implements `discovery.base.Discovery`, and `transport.base.GossipService` for other peers.

    Serve it before it is entered: peers that join each other must be able to answer while they join. Entering it joins
    the run; leaving it withdraws this peer's records. It can be entered once. `join` are endpoints of any peers of the
    run, the seeds, or `Seeds` with sources, which are asked while this peer joins, and again while it is alone. With
    none, or only this peer's own, it starts a run; a client needs one. `on_joining` is called after a second, and then
    at growing intervals, while no seed has answered.
    """

    def __init__(
        self,
        run_id: str,
        endpoint: str,
        transport: Transport,
        *,
        join: Sequence[str] | Seeds = (),
        identity: Identity | None = None,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        settings: GossipSettings | None = None,
    ) -> None:
        self._settings = settings = settings or GossipSettings()
        super().__init__(run_id, endpoint, identity, settings.limits, clock)
        self._seeds = seeds = join if isinstance(join, Seeds) else Seeds(join)
        if self._is_client and not (seeds.addresses or seeds.sources):
            raise ConfigError(
                f"a client accepts no connections, so it needs a peer to join; give {spelled('join')}", "join"
            )
        self._access = access = GossipAccess(run_id, endpoint, transport, settings, clock, rng or random.Random())
        self._peers_key = peers_key(run_id)
        self._members = members = Membership(
            access, seeds.addresses, lambda refusing: self._records.drop(self._peers_key, refusing)
        )
        self._streams = ClientStreams(settings)
        self._rumours = Rumours(access, members, self._on_refused)
        self._offsets = ClockOffsets(settings.limits.clock_tolerance)
        self._anti_entropy = AntiEntropy(access, self._records, self._merge, self._rumours, self._offsets)
        self._maintenance = Maintenance(access, members, self._anti_entropy, self._merge, self._note_answer)
        self._joins_own_address = endpoint in seeds.addresses
        self._bootstrap = Bootstrap(access, members, seeds, self._anti_entropy.compare, self._hint)
        self.on_joining: Callable[[Waiting], None] | None = None
        self._left = False
        self._last_warning = -math.inf
        self._answers = 0  # since the last call of another peer

    # Discovery

    async def follow(self, key: str, *, keep: bool = True) -> None:
        """See `Discovery.follow`; every peer holds all records anyway."""

    def withdrew(self, endpoint: str) -> bool:
        return not self.knows(endpoint) and endpoint not in self._members.expired

    def endpoints(self) -> frozenset[str]:
        return super().endpoints() - self._members.lost

    def diagnose(self) -> Diagnosis:
        known, table = self.endpoints(), self._records.table()
        moment, offsets = asyncio.get_running_loop().time(), self._offsets
        return Diagnosis(
            {name: peer for name, peer in table.peers().items() if name in known and name != self._endpoint},
            self._members.silent(self._clock()),
            offsets.excessive(moment),
            self._explain_isolation(),
            offsets.own_offset(moment),
            offsets.correction(moment),
        )

    def _explain_isolation(self) -> str:
        if self._seeds.sources:
            why = "" if self._members.seeds else self._seeds.findings
        elif self._bootstrap.joined_itself or (self._joins_own_address and not self._members.seeds):
            why = f"the only {spelled('join')} of this peer is its own address"
        elif not self._members.seeds:
            why = f"this peer was given no {spelled('join')}"
        else:
            why = ""
        return why and f"{why}, so the others must join {self._endpoint}, or this peer one of them"

    # GossipService: the calls of other peers

    async def exchange(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        self._admit(digest.run_id)
        if digest.endpoint == self._endpoint:
            self._bootstrap.called_itself = True
            raise CallRefusedError("", RefusalCause.SAME_NAME.value, RefusalCause.SAME_NAME)
        self._bootstrap.note_call(digest.endpoint)
        self._members.note_call(digest.endpoint, self._clock())
        async with aclosing(self._anti_entropy.answer(digest)) as replies:
            async for reply in replies:
                yield reply

    async def push(self, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        self._admit(run_id)
        if len(rumours) > 4 * self._settings.rumours_per_push:
            raise ProtocolViolationError(f"{len(rumours)} records in one call are too many")
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
        with self._streams.open() as stream:  # before the backlog, so that no record is missed
            async with aclosing(self._anti_entropy.answer(digest)) as backlog:
                async for reply in backlog:
                    yield reply.records
            async with aclosing(stream.records()) as new:
                async for records in new:
                    yield records

    def _admit(self, run_id: str) -> None:
        if run_id != self._run_id:
            runs = f"run {self._run_id!r}, not to {run_id[:64]!r}"
            reason = f"the called peer belongs to {runs}; give both peers the same run id"
            raise CallRefusedError("", reason, RefusalCause.WRONG_RUN)
        if self._left:
            raise CallRefusedError("", "has left the run")
        self._answers = 0

    # Joining and leaving

    async def _join(self) -> None:
        self._spawn(self._rumours.run(self._spawn))
        if not self._is_client:
            self._write_presence()  # before joining, so that the seeds receive it
        await self._bootstrap.join(self._spawn, self.on_joining)
        if self._is_client:
            self._spawn(self._maintenance.read_streams())
        else:
            self._publish(self._write_presence())  # the first may have expired while joining
            self._spawn(self._maintenance.retry())
            self._spawn(self._renew_presence())
        self._spawn(self._maintenance.exchange())
        if self._seeds.sources:
            self._spawn(self._bootstrap.look_up_while_alone())

    async def _leave(self) -> None:
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
            self._streams.end()

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

    def _write_presence(self) -> Record:
        return self._records.write(self._peers_key, self._endpoint, b"", self._clock() + self._settings.peer_lifetime)

    async def _renew_presence(self) -> None:
        # Exchanges spread it. If this peer stood still for so long that the record has expired, a rumour does.
        while True:
            await asyncio.sleep(self._settings.peer_refresh * self._access.rng.uniform(0.9, 1.0))
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

    # What is logged

    def _note_answer(self) -> None:
        self._answers += 1
        if self._answers == UNREACHED_ANSWERS and not self._is_client:
            logger.warning(
                "other peers answered this peer %d times, and none has called it meanwhile: can they reach %s? "
                "Let connections to it through, advertise an address that leads here, or take part in client mode, "
                "which needs none",
                *(UNREACHED_ANSWERS, self._endpoint),
            )

    def _on_refused(self, endpoint: str, refusals: tuple[Refusal, ...]) -> None:
        now = self._clock()
        for refusal in refusals:
            own = self._records.table().claim(refusal.key, refusal.subkey, self._author.owner)
            # One may expire in transit, and clocks have warnings of their own. That another owner holds the place is
            # logged by the record store.
            if own is None or refusal.reason in (Reason.EXPIRED, Reason.FOREIGN):
                continue
            if now - self._last_warning >= WARNING_PERIOD:
                self._last_warning = now
                logger.warning(
                    "%s refuses this peer's record of %r under %r: %s",
                    *(endpoint, refusal.subkey, refusal.key, printable(refusal.reason, 200)),
                )

    def _hint(self) -> str:
        elsewhere = not all(is_loopback(parse_address(seed)[0]) for seed in self._members.seeds)
        proxies = ignored_proxies() if elsewhere else ""
        offsets = self._offsets.excessive(asyncio.get_running_loop().time())
        clocks = ", ".join(
            f"that of {name} is {clock_difference(ahead)} this peer's" for name, ahead in offsets.items()
        )
        apart = f"The clocks are too far apart: {clocks}; set them, for example with NTP." if clocks else ""
        return " ".join(filter(None, (apart, proxies and f"{proxies}.")))
