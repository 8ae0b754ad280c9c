"""Learns the peers of a run from any of them, and asks each for its status.

A peer has a task of its own, so that one that does not answer delays no other. Each is asked again `INTERVAL` seconds
after its answer, so that it never gets two calls in that time, whatever the network does to them. Successive answers
give its rates.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import NamedTuple, Self

from averaging.common import CLIENT_PREFIX, counted, is_endpoint
from averaging.errors import AveragingError
from averaging.monitor.snapshot import PeerView, RunSnapshot
from averaging.receipts import Outcome, PeerStatus, Receipt, Totals
from averaging.rpc import Credentials
from averaging.timing import is_set_within
from averaging.transport.grpc import GrpcTransport

# Seconds over which rates are measured, once a peer was watched for LEAST_WINDOW. Before, since it started.
WINDOW = 60.0
LEAST_WINDOW = 10.0  # seconds of two answers from which rates are computed
KEPT_RECEIPTS = 64  # receipts of each peer that are kept for display
CLIENT = "a client, which accepts no calls"


class CounterSample(NamedTuple):
    """When an answer came, in seconds since the epoch, and the sums over all rounds of the peer until then."""

    time: float
    totals: Totals


class PeerHistory:
    """The answers of one peer: the last one, why there is none, and its last receipts, the oldest first."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.status: PeerStatus | None = None
        self.error = ""
        self.receipts: deque[Receipt] = deque(maxlen=KEPT_RECEIPTS)
        self._new: list[Receipt] = []
        self._answers: deque[CounterSample] = deque()
        self._answered = 0.0
        self._round_trip = 0.0

    @property
    def last_round(self) -> int:
        return self.receipts[-1].round if self.receipts else 0

    def answered(self, status: PeerStatus, now: float, round_trip: float) -> None:
        if self.status is not None and status.started != self.status.started:  # it was restarted
            self._answers.clear()
            self.receipts.clear()
        self.status, self.error = status, ""
        self._answered, self._round_trip = now, round_trip
        for receipt in status.receipts:
            if receipt.round > self.last_round:
                self.receipts.append(receipt)
                self._new.append(receipt)
        del self._new[:-KEPT_RECEIPTS]
        if not self._answers:
            self._answers.append(CounterSample(min(status.started, now), Totals()))
        self._answers.append(CounterSample(now, status.totals or Totals()))
        # The oldest answer in the window is the first of those from which rates are computed.
        if now - self._answers[1].time >= LEAST_WINDOW and self._answers[0].time < now - WINDOW:
            self._answers.popleft()

    def failed(self, reason: str) -> None:
        self.error = reason.removeprefix(f"{self.endpoint}: ") or "no answer"

    def view(self, now: float) -> PeerView:
        """The peer as it is shown now. Each receipt is in one view only."""
        new, self._new = tuple(self._new), []
        silent = None if self.status is None else max(0.0, now - self._answered)
        view = PeerView(self.endpoint, self.error, silent, self.status, self._round_trip, receipts=new)
        return _with_rates(view, self._answers[0], self._answers[-1]) if len(self._answers) > 1 else view


def _with_rates(view: PeerView, first: CounterSample, last: CounterSample) -> PeerView:
    seconds = last.time - first.time
    if not seconds > 0:  # also if the peer says that it started at NaN
        return view
    then, now = first.totals, last.totals

    def per_second(after: Mapping[str, int], before: Mapping[str, int]) -> float:
        return max(0.0, (sum(after.values()) - sum(before.values())) / seconds)

    averaged = now.rounds.get(Outcome.AVERAGED, 0) - then.rounds.get(Outcome.AVERAGED, 0)
    rounds = sum(now.rounds.values()) - sum(then.rounds.values())
    phases = {name: total - then.phase_seconds.get(name, 0.0) for name, total in now.phase_seconds.items()}
    return replace(
        view,
        window_seconds=seconds,
        rounds_per_minute=max(0.0, 60 * averaged / seconds),
        bytes_sent_per_second=per_second(now.bytes_sent, then.bytes_sent),
        bytes_received_per_second=per_second(now.bytes_received, then.bytes_received),
        waiting_share=min(1.0, max(0.0, (now.waiting_seconds - then.waiting_seconds) / seconds)),
        phase_seconds={name: max(0.0, total) / rounds for name, total in phases.items()} if rounds > 0 else {},
    )


INTERVAL = 2.0  # seconds between an answer of a peer, or its failure, and the next call to it
ANSWER_SECONDS = 3.0  # time limit of a call
# Calls at a time, and those to peers that did not answer the last time, so that these do not delay the others.
CONCURRENT, CONCURRENT_RETRIES = 32, 8
MAX_PEERS = 1024  # peers that are asked. A hostile peer may name any number
FORGET_SECONDS = 600.0  # after which a peer is no longer shown that neither answers nor is named by one that does
MAX_MESSAGE_BYTES = 4 << 20  # limit of an answer: 16 receipts of rounds with 1,000 members have 2 MiB


class Collector:
    """Collects what the peers of one run say of themselves. An async context manager; it belongs to one event loop.

    Args:
        given: `host:port` of peers of the run. One that answers is enough.
        credentials: certificates and tokens, see `averaging.rpc.read_credentials`.
        receipts: maximum number of past receipts in the first answer of each peer; also of later ones, which have only
            those of rounds since the answer before. 0 for none.
        interval: seconds between an answer of a peer, or its failure, and the next call to it; also between snapshots.
        clock: clock in seconds since the epoch.
    """

    def __init__(
        self,
        given: Sequence[str],
        credentials: Credentials | None = None,
        *,
        receipts: int = 0,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._given = tuple(dict.fromkeys(given))
        self._transport = GrpcTransport(
            None, max_message_bytes=MAX_MESSAGE_BYTES, credentials=credentials, given=self._given
        )
        self._receipts, self._interval, self._clock = receipts, interval, clock
        self._peers: dict[str, PeerHistory] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._named: dict[str, float] = {}  # when each peer was named last
        self._left_out = 0
        self._next_naming = 0.0
        self._unasked: set[str] = set()
        self._settled = asyncio.Event()
        self._calls, self._retries = asyncio.Semaphore(CONCURRENT), asyncio.Semaphore(CONCURRENT_RETRIES)
        self._stack = AsyncExitStack()
        self.run_id = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._transport.bind()
            stack.push_async_callback(self._transport.close)
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(lambda: [task.cancel() for task in self._tasks.values()])
            for endpoint in self._given:
                self._watch(endpoint)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def snapshots(self) -> AsyncGenerator[RunSnapshot, None]:
        """Yields a snapshot every `interval` seconds, the first as soon as all known peers were asked once."""
        await is_set_within(self._interval, self._settled)
        while True:
            yield self.snapshot()
            await asyncio.sleep(self._interval)

    async def collect(self) -> RunSnapshot:
        """Returns a snapshot once all known peers were asked, also those that the first answers name."""
        await is_set_within(3 * ANSWER_SECONDS, self._settled)
        return self.snapshot()

    def snapshot(self) -> RunSnapshot:
        """What is known now. The receipts in it are in no other snapshot."""
        now = self._clock()
        self._forget(now)
        left_out = f"{counted(self._left_out, 'further peer')} not asked: at most {MAX_PEERS} are"
        notes = (left_out,) if self._left_out else ()
        return RunSnapshot(
            time=now,
            run_id=self.run_id,
            peers=tuple(self._peers[name].view(now) for name in sorted(self._peers)),
            notes=notes,
        )

    def receipts_of(self, endpoint: str) -> tuple[Receipt, ...]:
        """The last receipts of a peer, the oldest first."""
        history = self._peers.get(endpoint)
        return tuple(history.receipts) if history else ()

    def _watch(self, endpoint: str) -> None:
        """Begins to ask a peer. A client, which accepts no calls, is only shown."""
        history = self._peers[endpoint] = PeerHistory(endpoint)
        if endpoint.startswith(CLIENT_PREFIX):
            history.failed(CLIENT)
            return
        self._unasked.add(endpoint)
        self._settled.clear()
        self._tasks[endpoint] = self._group.create_task(self._keep_asking(endpoint))

    async def _keep_asking(self, address: str) -> None:
        history = self._peers[address]
        while True:
            async with self._retries if history.error else self._calls:
                await self._ask(address, history)
            self._was_asked(address)
            if self._peers.get(history.endpoint) is not history:
                return
            await asyncio.sleep(self._interval)

    async def _ask(self, address: str, history: PeerHistory) -> None:
        began = asyncio.get_running_loop().time()
        naming = began >= self._next_naming or (address in self._given and history.status is None)
        if naming:
            self._next_naming = began + self._interval
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                status = await self._transport.get_status(
                    address, receipts=self._receipts, after_round=history.last_round, peers=naming
                )
        except (TimeoutError, AveragingError) as error:
            silent = f"no answer within {ANSWER_SECONDS:g} s: it is stopped or overloaded, or packets are lost"
            history.failed(error.reason if isinstance(error, AveragingError) else silent)
            if naming:
                self._next_naming = 0.0  # the next peer is asked for the others
        else:
            self._answered(address, history, status, asyncio.get_running_loop().time() - began)

    def _answered(self, address: str, history: PeerHistory, status: PeerStatus, seconds: float) -> None:
        self.run_id = self.run_id or status.run_id
        if status.run_id != self.run_id:
            history.failed(f"belongs to run {status.run_id!r}")
            return
        if address in self._given and not self._rename(address, history, status.endpoint):
            return
        now = self._clock()
        history.answered(status, now, seconds)
        self._learn(status, now)

    def _rename(self, address: str, history: PeerHistory, endpoint: str) -> bool:
        """Shows a peer under its endpoint, which may differ from the given address. Returns whether it is shown."""
        if endpoint == history.endpoint or not is_endpoint(endpoint):
            return True
        self._peers.pop(history.endpoint, None)
        if endpoint in self._peers:  # it is asked under another address
            return False
        history.endpoint = endpoint
        self._peers[endpoint] = history
        return True

    def _learn(self, status: PeerStatus, now: float) -> None:
        """Takes the peers that an answer names: older software names only the members of its last round."""
        last = status.last_round
        for name in status.peers or (last.members if last else ()):
            if name in self._peers:
                self._named[name] = now
            elif len(self._peers) >= MAX_PEERS:
                self._left_out = max(self._left_out, len(status.peers) - MAX_PEERS, 1)
            elif is_endpoint(name):
                self._named[name] = now
                self._watch(name)

    def _was_asked(self, address: str) -> None:
        self._unasked.discard(address)
        if not self._unasked:
            self._settled.set()

    def _forget(self, now: float) -> None:
        for name, history in list(self._peers.items()):
            gone = history.error and name not in self._given and now - self._named.get(name, now) > FORGET_SECONDS
            if gone:
                del self._peers[name]
                self._named.pop(name, None)
                self._was_asked(name)
                if task := self._tasks.pop(name, None):
                    task.cancel()
