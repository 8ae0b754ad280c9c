"""What a peer serves to others, and what it tells Prometheus and probes of itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import chain, islice

from averaging.allreduce import AllReduce
from averaging.common import HostQuota, counted
from averaging.config import PeerConfig
from averaging.discovery import Discovery
from averaging.errors import BusyError, ProtocolViolationError
from averaging.matchmaking import Matchmaking
from averaging.metrics import (
    CERTIFICATE_METRICS,
    PEER_METRICS,
    Distribution,
    MetricsListener,
    Samples,
    certificate_samples,
)
from averaging.probe import SOFTWARE
from averaging.protocol import AveragingData, DownloadData, JoinRequest, MessageCode, MessageFromLeader, Resume
from averaging.receipts import (
    MAX_READERS,
    PeerStatus,
    ReadByService,
    Receipt,
    ReceiptBook,
    Totals,
    TrainingProgress,
    Watched,
)
from averaging.security import Credentials
from averaging.state import Snapshots, pack
from averaging.tensors import Schema
from averaging.timing import Deadline, Deadlines, FairTimeout

logger = logging.getLogger("averaging.peer")

LEAST_WAIT = 0.5  # seconds after which a status names the peers for which this one waits

MAX_DOWNLOADS, DOWNLOADS_PER_HOST = 16, 4
"""Concurrent downloads at one donor, in total and per host; further ones wait a while."""


@dataclass(frozen=True, slots=True)
class ExpectedInSearch:
    began: float  # time of the running loop
    missing: Callable[[], Collection[str]]  # their endpoints

    def waiting_for(self, least: float) -> list[str]:
        if asyncio.get_running_loop().time() - self.began < least:
            return []
        with suppress(Exception):  # of the application's function, which ends the search
            return sorted(self.missing())
        return []


class PeerService:
    """The serving side of one peer; implements `transport.base.AveragingService`."""

    def __init__(
        self,
        config: PeerConfig,
        endpoint: str,
        schema: Schema,
        snapshots: Snapshots,
        started: float,
        book: ReceiptBook,
    ) -> None:
        self._config, self._endpoint, self._schema = config, endpoint, schema
        self.snapshots = snapshots
        self._started = started
        self._downloads = HostQuota(MAX_DOWNLOADS, DOWNLOADS_PER_HOST)
        self._download_ended = asyncio.Condition()
        self._preparing = asyncio.Lock()
        self.matchmaking: Matchmaking | None = None  # of the present or last round, once the peer has joined its run
        self.discovery: Discovery | None = None
        self.round: AllReduce | None = None  # in progress, like the next one
        self.search: ExpectedInSearch | None = None
        self.training: Callable[[], TrainingProgress] | None = None
        self.read_by: Sequence[ReadByService] = ()  # services that know who gets weights from them
        self.averaged = 0  # rounds
        self.book = book
        self.deadlines = Deadlines(config.min_stall_timeout, config.stall_timeout)

    async def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        if self.matchmaking is None:
            yield MessageFromLeader(MessageCode.NOT_LOOKING_FOR_GROUP)
            return
        async with aclosing(self.matchmaking.join_group(request)) as replies:
            async for reply in replies:
                yield reply

    async def aggregate_part(self, messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        try:
            # The all-reduce has deadlines for its senders; this timeout ends all other streams.
            async with self._stall_timeout(2):
                first = await anext(messages, None)
        except TimeoutError:
            yield AveragingData(code=MessageCode.CANCELLED)
            return
        except ProtocolViolationError:
            yield AveragingData(code=MessageCode.PROTOCOL_VIOLATION)
            return
        if first is None:
            return
        if (this_round := await self._find_round(first.group_id)) is None:
            yield AveragingData(code=MessageCode.BAD_GROUP_ID)
            return
        async with aclosing(this_round.aggregate_part(first, messages)) as replies:
            async for reply in replies:
                yield reply

    async def download_state(self, resume: Resume | None, caller: str) -> AsyncGenerator[DownloadData, None]:
        """Serves the last committed state without the part that the caller already has; nothing if it is not shared.

        Raises:
            BusyError: no place became free in time for another download, or one of the caller's host.
        """
        if not self.snapshots.shared:
            return
        try:
            # Shorter than the caller waits, so that it learns why.
            async with asyncio.timeout(self._config.stall_timeout / 2), self._download_ended:
                await self._download_ended.wait_for(lambda: self._downloads.take(caller))
        except TimeoutError:
            own = self._downloads.taken_by(caller)
            busy = f"{own} downloads of your host" if own >= DOWNLOADS_PER_HOST else f"{MAX_DOWNLOADS} downloads"
            raise BusyError(f"{busy} of the state of {self._endpoint} are in progress; ask another donor") from None
        try:
            async with self._preparing:
                snapshot = await self.snapshots.latest(self._config.stall_timeout)
            for message in pack(snapshot, resume):
                yield message
        finally:
            self._downloads.leave(caller)
            async with self._download_ended:
                self._download_ended.notify_all()

    async def end_downloads(self, seconds: float) -> None:
        """Waits until nobody downloads the state, for at most so long. A download that is cut off can be resumed."""
        try:
            async with asyncio.timeout(seconds), self._download_ended:
                await self._download_ended.wait_for(lambda: not self._downloads.total)
        except TimeoutError:
            logger.warning("left while %s still downloaded the state", counted(self._downloads.total, "peer"))

    def get_schema(self) -> Schema:
        return self.matchmaking.schema if self.matchmaking else self._schema

    def get_status(self, receipts: int = 0, after_round: int = 0, peers: bool = False) -> PeerStatus:
        matchmaking, current = self.matchmaking, self.round
        known = (self.discovery.endpoints() if self.discovery else frozenset()) | {self._endpoint}
        return PeerStatus(
            endpoint=self._endpoint,
            run_id=self._config.run_id,
            mode=self._config.mode.name.lower(),
            software=SOFTWARE,
            started=self._started,
            schema_hash=self.get_schema().hash,
            group_key=matchmaking.group_key if matchmaking else "",
            looking=matchmaking.looking if matchmaking else False,
            declared_expiration=matchmaking.declared_expiration if matchmaking else 0.0,
            leader=matchmaking.leader if matchmaking else "",
            group_id=current.group.public_id if current else b"",
            members=current.group.endpoints if current else (),
            last_round=self.book.last,
            rounds=self.averaged,
            state_version=self.snapshots.version,
            known_peers=len(known),
            deadlines=tuple(self.deadlines.learned()),
            totals=self.book.totals if self.book.last else None,
            training=None if self.training is None else self.training(),
            waiting_for=tuple(self._waiting_for()),
            receipts=self.book.recent(receipts, after_round),
            peers=tuple(sorted(known)) if peers else (),
            readers=tuple(islice(chain.from_iterable(service.readers() for service in self.read_by), MAX_READERS)),
        )

    def _waiting_for(self) -> list[str]:
        if self.round is not None:
            return self.round.waiting_for(LEAST_WAIT)
        return [] if self.search is None else self.search.waiting_for(LEAST_WAIT)

    def watch_rounds(self, last: int) -> AsyncGenerator[Watched, None]:
        return self.book.watch(last)

    async def _find_round(self, group_id: bytes) -> AllReduce | None:
        if not self._is_current(group_id) and self.matchmaking is not None:
            try:
                async with self._stall_timeout(1):
                    await self.matchmaking.assembling()
            except TimeoutError:
                return None
        return self.round if self._is_current(group_id) else None

    def _stall_timeout(self, times: int) -> FairTimeout:
        return FairTimeout(
            Deadline(times * self._config.stall_timeout, f"{times} × stall_timeout"), self.deadlines.lower
        )

    def _is_current(self, group_id: bytes) -> bool:
        return self.round is not None and self.round.group.group_id == group_id


class PeerMetrics:
    """Measures one peer; `not_ready` says why it is not ready, and is called in any thread."""

    def __init__(
        self, config: PeerConfig, credentials: Credentials, not_ready: Callable[[], str], clock: Callable[[], float]
    ) -> None:
        self.service: PeerService | None = None  # before the peer listens
        self._certificate, self._not_ready, self._clock = certificate_samples(credentials), not_ready, clock
        self._durations: dict[tuple[str, ...], Distribution] = {}  # of phases of rounds, by name
        self._last_average: float | None = None
        metrics = (*PEER_METRICS, *CERTIFICATE_METRICS)
        name = f"the peer of run {config.run_id!r}"
        self.listener = MetricsListener(config.metrics_listen, name, metrics, self.sample, not_ready)

    def note(self, receipt: Receipt) -> None:
        for phase, seconds in receipt.phases.items():
            self._durations[(phase,)] = self._durations.get((phase,), Distribution()).plus(seconds)
        if receipt.averaged:
            self._last_average = self._clock()

    def sample(self) -> Samples:
        samples: dict[str, float | None] = {
            "averaging_ready": float(not self._not_ready()),
            "averaging_last_average_timestamp_seconds": self._last_average,
        }
        if self.service is None:
            return {**known(samples), **self._certificate}
        status, discovery = self.service.get_status(), self.service.discovery
        if (training := status.training) is not None:
            samples |= {
                "averaging_local_steps_total": training.steps,
                "averaging_samples_total": training.samples,
                "averaging_global_step": training.global_step,
            }
        samples |= {
            "averaging_state_version": status.state_version,
            "averaging_peers": status.known_peers,
            "averaging_clock_offset_seconds": None if discovery is None else discovery.diagnose().clock_ahead,
        }
        durations: Samples = {"averaging_round_duration_seconds": dict(self._durations)}
        return {**known(samples), **self._certificate, **of_totals(self.service.book.totals), **durations}


def known(samples: dict[str, float | None]) -> Samples:
    return {name: value for name, value in samples.items() if value is not None}


def of_totals(totals: Totals) -> Samples:
    directions = {"sent": totals.bytes_sent, "received": totals.bytes_received}
    return {
        "averaging_rounds_total": {(outcome.value,): count for outcome, count in totals.rounds.items()},
        "averaging_bytes_total": {
            (direction, lane): nbytes for direction, lanes in directions.items() for lane, nbytes in lanes.items()
        },
        "averaging_waiting_seconds_total": totals.waiting_seconds,
        "averaging_dropped_members_total": {(code.value,): count for code, count in totals.dropped.items()},
    }
