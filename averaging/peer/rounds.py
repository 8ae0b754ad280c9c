"""The rounds of one peer: find a group, run the all-reduce, adopt the result, return a receipt."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from averaging.allreduce import AllReduce, Prepared, RoundResult
from averaging.common import counted, spelled
from averaging.config import NonFinite, PeerConfig
from averaging.discovery import Discovery
from averaging.errors import AveragingError, ClosedError, RoundError
from averaging.matchmaking import Arrivals, Conduct, Matchmaking, NoGroupError, SearchConfig
from averaging.peer.run_progress import RunProgress
from averaging.peer.service import ExpectedInSearch, PeerService
from averaging.peer.topics import (
    Adopt,
    ErrorFeedback,
    ExpectedPeers,
    RoundOptions,
    SparseFeedback,
    StartSize,
    StopSearch,
    Topic,
)
from averaging.protocol import Fingerprint, Group, Mode, Statement, detach
from averaging.receipts import Account, Drift, DropCode, LateArrival, Outcome, Receipt, Role
from averaging.tensors import Schema, StagedTensor, in_thread, offload
from averaging.timing import expire
from averaging.transport import Transport

logger = logging.getLogger("averaging.peer")

OVER_LIFETIME = 10.0
"""Seconds for which the record of an ended search stays under the key of a single phase. By then all others have read
it; no later search replaces it."""

MAX_OVER_RECORDS = 64
"""Such records of one peer at a time, since discovery limits their number. If phases follow each other faster, each
record stays for less time; while they become faster there may be twice as many."""

DECISION_SECONDS = 5.0  # time limit for the decision of a leader that has accepted a peer which leaves its run

WITHDRAWN_SECONDS = 20.0
"""A member whose records are all gone so soon after a group has withdrawn them: those of a dead peer last longer."""

SPARSE_SLOWNESS = 16  # how much longer choosing the largest elements takes than copying as many bytes; see `takes_long`

MAX_LASTING = 256
"""Topics whose group bits are remembered, since an application may create topics without end."""


@dataclass(slots=True)
class _Round:
    """The state of one round; times are of the running loop."""

    number: int
    topic: Topic
    options: RoundOptions
    schema: Schema  # of the topic's phase
    started: float
    wall_clock: float  # start in seconds since the epoch
    receipt: Receipt = field(init=False)  # once it is over
    drift: tuple[Drift, ...] = ()
    group: Group | None = None
    group_found: float = 0.0  # time
    arrivals: Arrivals | None = None
    last_to_arrive: LateArrival | None = None
    step_rates: Mapping[str, float] = field(default_factory=dict)  # of members that announce one
    allreduce: AllReduce | None = None
    result: RoundResult | None = None
    inputs: list[torch.Tensor] | None = None  # what was sent, if not the tensors themselves
    adopted: bool = False  # whether the result is written
    stages: dict[str, float] = field(default_factory=dict)  # start time of each; "phases" in the receipt

    def enter(self, stage: str) -> None:
        self.stages[stage] = asyncio.get_running_loop().time()

    def seconds_of_stages(self, end: float) -> dict[str, float]:
        moments = [*self.stages.values(), end]
        return {stage: after - moment for stage, moment, after in zip(self.stages, moments, moments[1:], strict=False)}


class _NotAveragedError(Exception):
    """Ends a round without an average; its arguments are the outcome and the reason for the receipt."""


class Rounds:
    """Runs the rounds of one peer, one at a time."""

    def __init__(
        self,
        config: PeerConfig,
        endpoint: str,
        transport: Transport,
        discovery: Discovery,
        progress: RunProgress,
        service: PeerService,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._config, self._endpoint = config, endpoint
        self._transport, self._discovery = transport, discovery
        self._progress, self._service, self._snapshots = progress, service, service.snapshots
        self._clock, self._rng = clock, rng
        self._lasting: dict[bytes, Matchmaking] = {}  # by schema hash, the latest last; they keep the group bits
        self._count = 0
        self._last_ended = asyncio.get_running_loop().time()  # end of the last round, or when this peer was entered
        self._phase_searches: deque[float] = deque(maxlen=MAX_OVER_RECORDS)  # start times of searches for one phase
        self._companions: dict[str, float] = {}  # members of recent groups, and the time of the last one
        self._searching: asyncio.Timeout | None = None  # of the present search; it expires only when it is ended
        self._current: asyncio.Timeout | None = None  # of the `average` in progress; it expires when the peer closes
        self._idle = asyncio.Event()  # there is none
        self._idle.set()
        self._drained = False
        self.conduct = Conduct(service.deadlines)  # of the other peers, in all topics

    def matchmaking(self, schema: Schema, *, lasting: bool = True) -> Matchmaking:
        """The matchmaking for peers with this schema, kept for later rounds if `lasting`."""
        matchmaking = self._lasting.pop(schema.hash, None)
        lasting = lasting or matchmaking is not None
        if matchmaking is None:
            given = self._config
            config = SearchConfig(
                given.run_id,
                self._endpoint,
                given.group_size,
                given.min_group_size,
                given.group_wait,
                self._clock,
                self._rng,
                ended_lifetime=None if lasting else self._over_lifetime(OVER_LIFETIME),
                in_group_lifetime=self._over_lifetime(given.round_timeout),
            )
            matchmaking = Matchmaking(
                config,
                schema,
                self._transport,
                self._discovery,
                group_bits=given.group_bits,
                conduct=self.conduct,
                is_gone=self._progress.is_gone,
            )
        if lasting:
            self._lasting[schema.hash] = matchmaking
            if len(self._lasting) > MAX_LASTING:
                del self._lasting[next(iter(self._lasting))]
        return matchmaking

    def _over_lifetime(self, seconds: float) -> float:
        if len(self._phase_searches) < MAX_OVER_RECORDS:
            return seconds
        return min(seconds, asyncio.get_running_loop().time() - self._phase_searches[0])

    @property
    def in_progress(self) -> bool:
        return self._current is not None

    async def close(self) -> None:
        if self._current is not None:
            expire(self._current)
        await self._idle.wait()

    async def average(self, topic: Topic, gathered: bytes, options: RoundOptions) -> Receipt:
        """See `Peer.average`; raises also what a function among the options raises.

        The service's book keeps a receipt in any case.
        """
        if self._current is not None:
            raise RoundError("another average() of this peer is in progress; await it first")
        self._current = current = asyncio.timeout(None)
        try:
            async with current:
                return await self._average(topic, gathered, options)
        except TimeoutError:
            if current.expired():
                raise ClosedError(f"{self._endpoint} was closed while it averaged") from None
            raise
        finally:
            self._current = None
            self._idle.set()

    async def _average(self, topic: Topic, gathered: bytes, options: RoundOptions) -> Receipt:
        if self._drained:
            await asyncio.Event().wait()  # until the peer closes
        self._idle.clear()
        self._count += 1
        started, schema = asyncio.get_running_loop().time(), topic.at(options.get("phase", ""))
        round_ = _Round(self._count, topic, options, schema, started, self._clock())
        with self._booked(round_):
            await self._check_finite(round_)
            group = await self._find_group(round_, gathered)
            with self._reducing(round_, group) as allreduce:
                if reason := self._too_small(group):
                    await allreduce.leave()
                    raise RoundError(reason)
                round_.result = await allreduce.run(partial(self._prepare, round_, group), self._config.round_timeout)
                await self._adopt(round_, group, round_.result)
        if round_.group is not None and not round_.receipt.averaged:
            await self._let_another_begin(round_)
        return round_.receipt

    async def _let_another_begin(self, round_: _Round) -> None:
        """Where a key may have one group only, another one may begin after a group that has failed.

        The records of members that are still in it, or have averaged, remain. Those of a dead member would, too.
        """
        matchmaking = self._service.matchmaking
        if matchmaking is None or not await matchmaking.withdraw():
            return
        await self._progress.mark_refusing([lost.endpoint for lost in round_.receipt.dropped])

    async def drain(self) -> None:
        """Begins no further round, and waits for the end of the one in progress. Call it once.

        A search ends without a group, unless a leader has accepted this peer already: then its group is the last one.
        Calls of `average` that come later wait until they are cancelled.
        """
        self._drained = True
        await self.end_search()
        await self._idle.wait()

    async def end_search(self) -> None:
        matchmaking = self._service.matchmaking
        if self._searching is not None and matchmaking is not None:
            can_end = await matchmaking.end_search(DECISION_SECONDS)
            if can_end and self._searching is not None:
                expire(self._searching)

    @contextmanager
    def _booked(self, round_: _Round) -> Iterator[None]:
        outcome, reason = Outcome.CANCELLED, "cancelled by this peer's application"
        try:
            yield
            outcome, reason = Outcome.AVERAGED, ""
        except _NotAveragedError as over:
            outcome, reason = over.args
        except asyncio.CancelledError:
            if round_.adopted:  # it was cancelled after the result was written
                outcome, reason = Outcome.AVERAGED, ""
            raise
        except Exception as error:
            outcome, reason = Outcome.FAILED, f"{type(error).__name__}: {error}"
            raise
        finally:
            self._last_ended = asyncio.get_running_loop().time()
            self._service.averaged += outcome is Outcome.AVERAGED
            round_.receipt = self._receipt(round_, outcome, reason)
            self._service.book.keep(round_.receipt)

    async def _check_finite(self, round_: _Round) -> None:
        # Infinity and NaN have no place in a table of `top_k`, and would stay in the residuals for ever.
        refuses = self._config.non_finite is NonFinite.REFUSE or isinstance(round_.topic.feedback, SparseFeedback)
        if not refuses or self._config.mode is Mode.AUXILIARY:
            return
        round_.enter("checking")
        tensors = round_.topic.tensors
        try:
            await tensors.while_locked(tensors.check_finite, self._config.round_timeout, tensors.nbytes)
        except RoundError as error:
            raise _NotAveragedError(Outcome.FAILED, str(error)) from error

    async def _find_group(self, round_: _Round, gathered: bytes) -> Group:
        round_.enter("looking")
        options, began = round_.options, round_.stages["looking"]
        lasting = round_.schema == round_.topic.schema
        matchmaking = self._service.matchmaking = self.matchmaking(round_.schema, lasting=lasting)
        if not lasting:
            self._phase_searches.append(began)
        default: StartSize | None = None
        if self._config.mode is Mode.AUXILIARY:
            default = lambda trained: len(trained) or self._config.group_size  # noqa: E731
        start_size, stop_search = options.get("start_size", default), options.get("stop_search")
        expected_peers: ExpectedPeers = options.get("expected_peers", _nobody)
        announcements = self._progress.announcements
        first = start_size(announcements) if callable(start_size) else start_size
        seconds = options.get("search_timeout", self._config.round_timeout)
        deadline = self._clock() + (seconds(announcements) if callable(seconds) else seconds)
        arrivals = round_.arrivals = Arrivals(self._endpoint, began)
        search = matchmaking.find_group(
            gathered,
            deadline,
            first,
            arrivals,
            quorum=options.get("quorum"),
            follows=options.get("follows", False),
        )

        def update(announcements: Mapping[str, bytes]) -> bool:
            """Updates the size at which the group begins. Returns whether the search ends instead."""
            if stop_search is not None and stop_search(announcements):
                return True
            if callable(start_size):
                matchmaking.set_target_contributors(start_size(announcements))
            return False

        def missing() -> Collection[str]:
            return [name for name in expected_peers(self._progress.announcements) if not matchmaking.is_member(name)]

        watches = stop_search is not None or callable(start_size)
        self._service.search = ExpectedInSearch(began, missing)
        try:
            return await self._search(round_, search, update if watches else None, missing)
        except NoGroupError as error:
            raise _NotAveragedError(Outcome.NO_GROUP, str(error)) from error
        finally:
            self._service.search = None

    @contextmanager
    def _reducing(self, round_: _Round, group: Group) -> Iterator[AllReduce]:
        """The all-reduce of a group. Other members may send parts at any moment, so nothing is awaited before."""
        round_.enter("preparing")
        round_.group_found = round_.stages["preparing"]
        round_.step_rates = self._progress.step_rates(group.endpoints)
        trainers = [member.endpoint for member in group.members if member.sends]  # nobody waits for an auxiliary
        if round_.arrivals is not None:
            round_.last_to_arrive = round_.arrivals.last(trainers, self._last_ended)
        if (drift := round_.options.get("drift")) is not None:
            round_.drift = drift.compare(self._endpoint, self._fingerprints(group))
        try:
            feedback = round_.topic.feedback
            allreduce = round_.allreduce = self._service.round = AllReduce(
                group,
                self._endpoint,
                round_.schema,
                self._transport,
                deadlines=self._service.deadlines,
                non_finite=self._config.non_finite,
                residual=None if feedback is None else feedback.replies,
            )
        except AveragingError as error:
            raise _NotAveragedError(Outcome.FAILED, str(error)) from error
        averaged = False
        try:
            yield allreduce
            averaged = True
        except RoundError as error:
            raise _NotAveragedError(Outcome.FAILED, str(error)) from error
        finally:
            self._service.round = None
            result = allreduce.result()
            self._note_faults(group, result)
            if self._service.matchmaking is not None:
                self._service.matchmaking.note_end(whole=averaged and not result.dropped)

    def _note_faults(self, group: Group, result: RoundResult) -> None:
        at_fault = {*result.one_way}
        at_fault |= {lost.endpoint for lost in result.dropped if lost.code is DropCode.PROTOCOL_VIOLATION}
        for name in at_fault:
            self.conduct.note_fault(name, asyncio.get_running_loop().time())
        for name in set(result.answered) - at_fault:
            self.conduct.note_well(name)

    def _too_small(self, group: Group) -> str:
        members, minimum = len(group.members), self._config.min_group_size
        if members >= minimum:
            return ""
        option = spelled("min_group_size")
        return (
            f"{group.leader} began a group of {counted(members, 'member')}, but this peer takes part only in groups of "
            f"at least {minimum} ({option}), so it left; give all peers of the run the same {option}"
        )

    async def _search(
        self,
        round_: _Round,
        search: Coroutine[Any, Any, Group],
        stop_search: StopSearch | None,
        missing: Callable[[], Collection[str]],
    ) -> Group:
        watching: list[asyncio.Task[None]] = []
        failures: list[Exception] = []
        try:
            async with asyncio.timeout(None) as limit:
                self._searching = limit
                if stop_search is not None:
                    sources = (self._progress.watch(), self._without_gone(missing))
                    watching = [
                        asyncio.create_task(self._watch(source, stop_search, failures, lambda: expire(limit)))
                        for source in sources
                    ]
                group = round_.group = await search
        except TimeoutError:
            if self._drained:
                raise NoGroupError("this peer leaves its run, as it was asked to") from None
            if not failures:
                raise NoGroupError("the other peers have advanced without this one, or have left") from None
        finally:
            self._searching = None
            for task in watching:
                task.cancel()
        if failures:
            raise failures[0]
        return group

    async def _without_gone(self, missing: Callable[[], Collection[str]]) -> AsyncGenerator[dict[str, bytes], None]:
        """Yields the others' progress whenever an expected peer turns out to be gone."""
        async with aclosing(self._progress.mark_missing(missing)) as gone:
            async for name in gone:
                logger.info("%s refuses connections, so this round does not wait for it", name)
                yield self._progress.announcements

    async def _watch(
        self,
        progress: AsyncGenerator[dict[str, bytes], None],
        stop_search: StopSearch,
        failures: list[Exception],
        stop: Callable[[], None],
    ) -> None:
        try:
            async with aclosing(progress) as changes:
                async for announcements in changes:
                    if stop_search(announcements):
                        stop()
                        return
        except Exception as error:
            failures.append(error)
            stop()

    async def _prepare(self, round_: _Round, group: Group) -> Sequence[Prepared]:
        """What is sent: the tensors themselves if they are on the CPU and no error feedback is added, else copies.

        The copies of tensors on a device are made while the first parts are sent.
        """
        shared, feedback = round_.topic.tensors, round_.topic.feedback
        prepare = round_.options.get("prepare")

        def contributed() -> Sequence[Prepared]:
            if prepare is not None:
                prepare(_gathered(group))
            tensors = shared.flat()
            if self._config.mode is Mode.AUXILIARY or feedback is None:
                # An auxiliary sends nothing. Of what is on a device the first part is here, and the rest follows.
                for staged in [tensor for tensor in tensors if isinstance(tensor, StagedTensor)][:1]:
                    staged[:1]
                return tensors
            whole = [tensor.whole() if isinstance(tensor, StagedTensor) else tensor for tensor in tensors]
            if isinstance(feedback, SparseFeedback):
                return feedback.inputs(whole)
            share = group.members[group.index(self._endpoint)].weight / group.total_weight
            round_.inputs = feedback.inputs(whole, share)
            return round_.inputs

        slowness = SPARSE_SLOWNESS if isinstance(feedback, SparseFeedback) else 1
        if shared.waits:
            tensors = await in_thread(contributed)
        else:
            tensors = await offload(contributed, shared.nbytes * slowness)
        round_.enter("allreduce")
        return tensors

    async def _adopt(self, round_: _Round, group: Group, result: RoundResult) -> None:
        round_.enter("adopting")
        if self._service.matchmaking is not None:
            self._service.matchmaking.update_group_bits(group)
        confirm, tensors = round_.options.get("confirm"), round_.topic.tensors
        reason = _why_failed(group, self._endpoint, result, round_.topic.adopt)
        if not reason and confirm is not None:
            reason = await confirm(group)
        if reason:
            raise RoundError(reason)
        if self._config.mode is not Mode.AUXILIARY:
            write = partial(self._write, round_, result)
            await tensors.while_locked(write, self._config.round_timeout, tensors.nbytes)
        elif (feedback := round_.topic.feedback) is not None:
            feedback.replies.applied()  # by the others

    def _write(self, round_: _Round, result: RoundResult) -> None:
        topic = round_.topic
        if isinstance(topic.feedback, ErrorFeedback) and round_.inputs is not None:
            plain = [part for part, _ in result.parts if part not in result.encoded]
            topic.feedback.sent(round_.inputs, result.encoded, plain)
        topic.write(result)
        if topic.commits:
            self._snapshots.commit(self._snapshots.version + 1)
        round_.adopted = True

    def _left(self, round_: _Round) -> tuple[str, ...]:
        """The members of recent groups that have withdrawn their records since. Those of a dead peer stay longer."""
        now, discovery = asyncio.get_running_loop().time(), self._discovery
        if round_.group:
            members = set(round_.group.endpoints) - {self._endpoint}
            self._companions |= {name: now for name in members if discovery.knows(name)}
        recent = {name for name, last in self._companions.items() if now - last < WITHDRAWN_SECONDS}
        gone = {name for name in recent if discovery.withdrew(name)}
        self._companions = {name: self._companions[name] for name in recent - gone}
        return tuple(sorted(gone))

    def _receipt(self, round_: _Round, outcome: Outcome, reason: str) -> Receipt:
        now = asyncio.get_running_loop().time()
        group, result = round_.group, round_.result
        if result is None and round_.allreduce is not None:
            result = round_.allreduce.result()
        return Receipt(
            round=round_.number,
            outcome=outcome,
            reason=reason,
            group_id=group.public_id if group else b"",
            members=group.endpoints if group else (),
            dropped=result.dropped if result else (),
            gathered=_gathered(group) if group else {},
            seconds=now - round_.started,
            allreduce_seconds=now - round_.group_found if group else 0.0,
            bytes_sent=result.bytes_sent if result else 0,
            bytes_received=result.bytes_received if result else 0,
            part_bytes_sent=result.part_bytes_sent if result else 0,
            part_bytes_received=result.part_bytes_received if result else 0,
            kept_local=result.kept_local if result else 0,
            clamped=result.clamped if result else 0,
            state_version=self._snapshots.version,
            run_id=self._config.run_id,
            endpoint=self._endpoint,
            topic=round_.schema.topic,
            started=round_.wall_clock,
            role=None if group is None else Role.LEADER if group.leader == self._endpoint else Role.FOLLOWER,
            accounts=tuple(_with_arrival(account, round_) for account in result.accounts) if result else (),
            phases=round_.seconds_of_stages(now),
            straggler=result.straggler if result else None,
            digest=result.digest if result else "",
            state=self._state(round_, result),
            last_to_arrive=round_.last_to_arrive,
            drift=round_.drift,
            left=self._left(round_),
            strategy="" if self._service.training is None else self._service.training().strategy,
        )

    def _state(self, round_: _Round, result: RoundResult | None) -> str:
        if result is not None and round_.adopted and round_.topic.commits and not result.kept_local:
            return result.digest
        drift = round_.options.get("drift")
        return "" if drift is None or drift.own.moment != round_.options.get("phase", "") else drift.own.digest

    def _fingerprints(self, group: Group) -> dict[str, Fingerprint]:
        sent = {member.endpoint: detach(member.user)[1] for member in group.members}
        return {
            name: fingerprint
            for name, fingerprint in sent.items()
            if fingerprint is not None and name != self._endpoint
        }


def _gathered(group: Group) -> dict[str, Any]:
    return {member.endpoint: detach(member.user)[0] for member in group.members}


def _nobody(_: Mapping[str, bytes]) -> Collection[str]:
    return ()


def _with_arrival(account: Account, round_: _Round) -> Account:
    name = account.endpoint
    waited = None if round_.arrivals is None else round_.arrivals.waited(name)
    group = round_.group
    said = Statement.read(None if group is None else group.members[group.index(name)].user)
    unit = "samples" if said.unit == "samples" else ""
    rate = round_.step_rates.get(name)
    discount = None if said.age is None else said.discount
    return replace(account, waited=waited, step_rate=rate, age=said.age, discount=discount, weight_unit=unit)


def _why_failed(group: Group, endpoint: str, result: RoundResult, adopt: Adopt) -> str:
    """Why a round averaged nothing, or less than required; empty if it succeeded."""
    causes = "; ".join(f"{dropped.endpoint}: {dropped.reason}" for dropped in result.dropped)
    lost = {dropped.endpoint for dropped in result.dropped}
    if lost >= set(group.endpoints) - {endpoint} and (not result.received_any or (lost and adopt is Adopt.WHOLE)):
        return f"all other members were lost ({causes})"  # what they had sent may be in some elements only
    if not result.received_any and lost:
        # For example a client, which exchanges parts with the reducers only.
        return f"nothing came from any other member ({causes})"
    if adopt is Adopt.WHOLE and result.kept_local:
        return f"{result.kept_local} elements have no average, since their reducer was lost ({causes})"
    return ""
