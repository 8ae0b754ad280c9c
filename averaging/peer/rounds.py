"""One attempt of a peer to average a topic: find a group, run the round, write the result, give a receipt."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from averaging.allreduce import AllReduce, RoundResult
from averaging.common.addresses import CLIENT_PREFIX
from averaging.common.sanitize import counted
from averaging.common.threads import offload
from averaging.config import NonFinite, PeerConfig
from averaging.discovery.base import Discovery
from averaging.errors import AveragingError, LyingLeaderError, RoundError, SchemaMismatchError
from averaging.matchmaking import Matchmaking, NoGroupError
from averaging.matchmaking.arrivals import Arrivals
from averaging.matchmaking.exclusions import Exclusions
from averaging.matchmaking.response_history import ResponseHistory
from averaging.matchmaking.schema_differences import Warned
from averaging.observe.receipts import Account, DropCode, LateArrival, Outcome, Receipt, Role
from averaging.peer.liveness import find_gone
from averaging.peer.round_options import Awaited, Enough, Overtaken
from averaging.peer.run_progress import RunProgress
from averaging.peer.service import PeerService
from averaging.peer.topics import Adopt, Topic
from averaging.protocol.group import Group, Mode
from averaging.protocol.schema import Schema
from averaging.security.client_names import is_bound
from averaging.state.snapshots import Snapshots
from averaging.transport.base import Transport

logger = logging.getLogger("averaging.peer")

OVER_LIFETIME = 10.0
"""Seconds for which a record stays that says that a search is over, where the key is that of a single phase. All others
have read it by then, and no later search replaces it."""

MAX_OVER_RECORDS = 64
"""Such records of one peer at a time, since discovery takes only so many; where phases follow each other faster, each
stays for less. When they become faster there may be twice as many for a moment."""

MAX_LASTING = 256
"""Topics whose group bits are remembered; an application may make a new one whenever it averages."""


@dataclass(slots=True)
class _Attempt:
    """What is known of an attempt so far; times are of the running loop."""

    number: int
    topic: Topic
    schema: Schema  # of the topic's phase
    started: float
    wall_clock: float  # when it was started, in seconds since the epoch
    state: str = ""  # digest of what all members must hold alike
    group: Group | None = None
    group_found: float = 0.0  # when
    arrivals: Arrivals | None = None  # of those who look for a group, too
    last_to_arrive: LateArrival | None = None
    step_rates: Mapping[str, float] = field(default_factory=dict)  # of the members that announce one
    round: AllReduce | None = None
    result: RoundResult | None = None
    inputs: list[torch.Tensor] | None = None  # what was contributed, where it is not the tensors themselves
    adopted: bool = False  # whether the result is written
    stages: dict[str, float] = field(default_factory=dict)  # when each began; the receipt calls them phases

    def enter(self, stage: str) -> None:
        """The last stage is over, and the next one begins."""
        self.stages[stage] = asyncio.get_running_loop().time()

    def seconds_of_stages(self, end: float) -> dict[str, float]:
        """How long each took."""
        moments = [*self.stages.values(), end]
        return {stage: after - moment for stage, moment, after in zip(self.stages, moments, moments[1:], strict=False)}


class Rounds:
    """The attempts of one peer, one after the other.

    Args:
        service: told of the group and of the round in progress, since others' requests reach it.

    Attributes:
        conduct: of the others, in all topics.
    """

    def __init__(
        self,
        config: PeerConfig,
        endpoint: str,
        transport: Transport,
        discovery: Discovery,
        progress: RunProgress,
        service: PeerService,
        snapshots: Snapshots,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._config, self._endpoint = config, endpoint
        self._transport, self._discovery = transport, discovery
        self._progress, self._service, self._snapshots = progress, service, snapshots
        self._clock, self._rng = clock, rng
        self._lasting: dict[bytes, Matchmaking] = {}  # by schema hash, the latest last; their group bits move on
        self._attempts = 0
        self._last_ended = asyncio.get_running_loop().time()  # when the last attempt ended, or this peer was entered
        self._phase_searches: deque[float] = deque(maxlen=MAX_OVER_RECORDS)  # when the latest, each for a phase, began
        self._warned = Warned()
        self._answers = ResponseHistory()
        self.conduct = Exclusions()

    def matchmaking(self, schema: Schema, *, lasting: bool = True) -> Matchmaking:
        """The matchmaking for peers with this schema; one that is not `lasting` is made for a single attempt."""
        found = self._lasting.pop(schema.hash, None)
        lasting = lasting or found is not None
        if found is None:
            config = self._config
            found = Matchmaking(
                config.run_id,
                self._endpoint,
                schema,
                self._transport,
                self._discovery,
                group_size=config.group_size,
                min_group_size=config.min_group_size,
                matchmaking_time=config.matchmaking_time,
                group_bits=config.group_bits,
                only_named=config.is_closed,
                over_lifetime=None if lasting else self._over_lifetime(),
                clock=self._clock,
                rng=self._rng,
                conduct=self.conduct,
                answers=self._answers,
                deadlines=self._service.deadlines,
                warned=self._warned,
            )
        if lasting:
            self._lasting[schema.hash] = found
            if len(self._lasting) > MAX_LASTING:
                del self._lasting[next(iter(self._lasting))]
        return found

    def _over_lifetime(self) -> float:
        """Less than usual where phases follow each other so fast that there would be too many records."""
        if len(self._phase_searches) < MAX_OVER_RECORDS:
            return OVER_LIFETIME
        return min(OVER_LIFETIME, asyncio.get_running_loop().time() - self._phase_searches[0])

    async def attempt(
        self,
        topic: Topic,
        gathered: bytes,
        *,
        phase: str,
        enough: int | Enough | None,
        awaited: Awaited | None,
        patience: float,
        overtaken: Overtaken | None,
        state: str,
    ) -> Receipt:
        """Averages with a group.

        Args:
            topic: what is averaged.
            gathered: what the group is told of this peer, packed.
            phase: of the topic; peers in other phases are not met.
            enough: see `Matchmaking.find_group`; or asked for that whenever the others' progress changes.
            awaited: see `Peer.average`.
            patience: seconds to look for a group.
            overtaken: asked whenever the others' progress changes, by endpoint, whether looking has become vain.
            state: see `Receipt`.

        Returns:
            The receipt. One is kept in the service's book in any case, also if this raises.

        Raises:
            TensorError: NaN or infinity in a tensor, unless the peer allows them.
            Exception: what `overtaken` raised.
        """
        self._attempts += 1
        started = asyncio.get_running_loop().time()
        attempt = _Attempt(self._attempts, topic, topic.at(phase), started, self._clock(), state)
        try:
            receipt = await self._average(attempt, gathered, enough, awaited, patience, overtaken)
        except asyncio.CancelledError:
            if attempt.adopted:  # it came too late
                self._service.averaged += 1
                self._service.book.keep(self._receipt(attempt, Outcome.AVERAGED, ""))
            else:
                told = "cancelled by this peer's application"
                self._service.book.keep(self._receipt(attempt, Outcome.CANCELLED, told))
            raise
        except Exception as error:
            self._service.book.keep(self._receipt(attempt, Outcome.FAILED, f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._last_ended = asyncio.get_running_loop().time()
        self._service.book.keep(receipt)
        return receipt

    async def _average(
        self,
        attempt: _Attempt,
        gathered: bytes,
        enough: int | Enough | None,
        awaited: Awaited | None,
        patience: float,
        overtaken: Overtaken | None,
    ) -> Receipt:
        topic = attempt.topic
        if self._config.non_finite is NonFinite.REFUSE and self._config.mode is not Mode.AUXILIARY:
            attempt.enter("checking")
            try:
                check, nbytes = topic.tensors.check_finite, topic.tensors.nbytes
                await topic.tensors.while_locked(check, self._config.timeout, nbytes)
            except RoundError as error:
                return self._receipt(attempt, Outcome.FAILED, str(error))
        attempt.enter("looking")
        lasting = attempt.schema == topic.schema
        matchmaking = self._service.matchmaking = self.matchmaking(attempt.schema, lasting=lasting)
        if not lasting:
            self._phase_searches.append(attempt.stages["looking"])
        if enough is None and self._config.mode is Mode.AUXILIARY:
            enough = self._all_that_train
        first = enough(self._progress.told) if callable(enough) else enough
        arrivals = attempt.arrivals = Arrivals(self._endpoint, attempt.stages["looking"])
        finding = matchmaking.find_group(gathered, self._clock() + patience, first, arrivals)

        def hear(told: Mapping[str, bytes]) -> bool:
            """Whether to look on has become vain; if not, as many are waited for as there are now."""
            if overtaken is not None and overtaken(told):
                return True
            if callable(enough):
                matchmaking.wait_for(enough(told))
            return False

        def missing() -> Collection[str]:
            """Who is waited for and has not come."""
            expected = () if awaited is None else awaited(self._progress.told)
            return [name for name in expected if not matchmaking.has(name)]

        hears = overtaken is not None or callable(enough)
        try:
            group = await self._unless_overtaken(attempt, finding, hear if hears else None, missing)
        except (NoGroupError, SchemaMismatchError) as error:
            return self._receipt(attempt, Outcome.NO_GROUP, str(error))
        # No await from here until the round is known: its members' parts may come at any moment.
        attempt.enter("preparing")
        attempt.group_found = asyncio.get_running_loop().time()
        attempt.step_rates = self._progress.step_rates(group.endpoints)
        # Nobody waits for an auxiliary.
        trainers = [member.endpoint for member in group.members if member.sends]
        attempt.last_to_arrive = arrivals.last(trainers, self._last_ended)
        try:
            this_round = attempt.round = self._service.round = self._new_round(attempt, group)
        except AveragingError as error:
            return self._receipt(attempt, Outcome.FAILED, str(error))
        try:
            if reason := self._too_small(group):
                await this_round.leave()
                return self._receipt(attempt, Outcome.FAILED, reason)
            result = attempt.result = await this_round.run(partial(self._prepare, attempt), self._config.timeout)
            attempt.enter("adopting")
            matchmaking.move_on(group)
            reason = _why_failed(group, self._endpoint, result, topic.adopt)
            if not reason and self._config.mode is not Mode.AUXILIARY:
                adopt, nbytes = partial(self._adopt, attempt, result), topic.tensors.nbytes
                await topic.tensors.while_locked(adopt, self._config.timeout, nbytes)
        except RoundError as error:
            return self._receipt(attempt, Outcome.FAILED, str(error))
        except LyingLeaderError as error:
            self.conduct.note(group.leader, DropCode.PROTOCOL_VIOLATION, self._clock())
            return self._receipt(attempt, Outcome.FAILED, str(error))
        finally:
            self._service.round = None
            self.conduct.note_dropped(this_round.result().offences, self._clock())
        outcome = Outcome.FAILED if reason else Outcome.AVERAGED
        self._service.averaged += outcome is Outcome.AVERAGED
        return self._receipt(attempt, outcome, reason)

    def _too_small(self, group: Group) -> str:
        """Why this peer takes no part in a group; empty if that is large enough."""
        members, least = len(group.members), self._config.min_group_size
        if members >= least:
            return ""
        return (
            f"{group.leader} began a group of {counted(members, 'member')}, and this peer takes part only in groups of "
            f"at least {least} (min_group_size), so it left; give all peers of the run the same min_group_size"
        )

    async def _unless_overtaken(
        self,
        attempt: _Attempt,
        finding: Coroutine[Any, Any, Group],
        overtaken: Overtaken | None,
        missing: Callable[[], Collection[str]],
    ) -> Group:
        """The group that is being looked for.

        Raises:
            NoGroupError: there is none, or the others have gone on or left.
            SchemaMismatchError: everybody else averages other tensors.
            Exception: what `overtaken` raised.
        """
        loop = asyncio.get_running_loop()
        watching: list[asyncio.Task[None]] = []
        failures: list[Exception] = []
        try:
            async with asyncio.timeout(None) as limit:
                if overtaken is not None:
                    sources = (self._progress.watch(), self._without_gone(missing))
                    watching = [
                        asyncio.create_task(
                            self._watch(source, overtaken, failures, lambda: limit.reschedule(loop.time()))
                        )
                        for source in sources
                    ]
                group = attempt.group = await finding
        except TimeoutError:
            if not failures:
                raise NoGroupError("the others have gone on without this peer, or left") from None
        finally:
            for one in watching:
                one.cancel()
        if failures:
            raise failures[0]
        return group

    def _all_that_train(self, told: Mapping[str, bytes]) -> int:
        """How many an auxiliary waits for; where nobody tells that it trains, for a full group."""
        return len(told) or self._config.group_size

    async def _without_gone(self, missing: Callable[[], Collection[str]]) -> AsyncGenerator[dict[str, bytes], None]:
        """Yields the others' progress whenever one who is waited for turns out to be gone."""
        async with aclosing(find_gone(self._transport, missing)) as gone:
            async for name in gone:
                logger.info("nothing listens at %s any more, so it is not waited for", name)
                self._progress.gone(name)
                yield self._progress.told

    async def _watch(
        self,
        progress: AsyncGenerator[dict[str, bytes], None],
        overtaken: Overtaken,
        failures: list[Exception],
        give_up: Callable[[], None],
    ) -> None:
        """Gives up when the others have gone on, or when asking for that fails, which is added to `failures`."""
        try:
            async with aclosing(progress) as changes:
                async for told in changes:
                    if overtaken(told):
                        give_up()
                        return
        except Exception as error:
            failures.append(error)
            give_up()

    def _new_round(self, attempt: _Attempt, group: Group) -> AllReduce:
        topic = attempt.topic
        return AllReduce(
            group,
            self._endpoint,
            attempt.schema,
            self._transport,
            deadlines=self._service.deadlines,
            non_finite=self._config.non_finite,
            proven=self._is_proven,
            adopt=(lambda part, values: topic.write_now(part, values, self._may_write)) if topic.writes_early else None,
        )

    def _is_proven(self, endpoint: str) -> bool:
        """Whether the transport proves that a stream in the name of `endpoint` comes from there."""
        return self._config.tls_cert is not None and (not endpoint.startswith(CLIENT_PREFIX) or is_bound(endpoint))

    async def _prepare(self, attempt: _Attempt) -> list[torch.Tensor]:
        """What is sent: the tensors themselves where they lie on the CPU and nothing is added, else copies."""
        shared, feedback = attempt.topic.tensors, attempt.topic.feedback

        def contributed() -> list[torch.Tensor]:
            tensors = shared.flat()
            if feedback is not None:
                tensors = attempt.inputs = feedback.inputs(tensors)
            return tensors

        tensors = await offload(contributed, shared.nbytes)
        attempt.enter("allreduce")
        return tensors

    def _may_write(self) -> bool:
        return not self._snapshots.at_stake

    def _adopt(self, attempt: _Attempt, result: RoundResult) -> None:
        topic = attempt.topic
        if topic.feedback is not None and attempt.inputs is not None:
            plain = [part for part, _ in result.parts if part not in result.encoded]
            topic.feedback.sent(attempt.inputs, result.encoded, plain)
        topic.write(result)
        if topic.commits:
            self._snapshots.commit(self._snapshots.version + 1)
        attempt.adopted = True

    def _receipt(self, attempt: _Attempt, outcome: Outcome, reason: str) -> Receipt:
        now = asyncio.get_running_loop().time()
        group, result = attempt.group, attempt.result
        if result is None and attempt.round is not None:
            result = attempt.round.result()
        return Receipt(
            round=attempt.number,
            outcome=outcome,
            reason=reason,
            group_id=group.public_id if group else b"",
            members=group.endpoints if group else (),
            dropped=result.dropped if result else (),
            gathered={member.endpoint: member.user for member in group.members} if group else {},
            seconds=now - attempt.started,
            allreduce_seconds=now - attempt.group_found if group else 0.0,
            bytes_sent=result.bytes_sent if result else 0,
            bytes_received=result.bytes_received if result else 0,
            kept_local=result.kept_local if result else 0,
            state_version=self._snapshots.version,
            run_id=self._config.run_id,
            endpoint=self._endpoint,
            topic=attempt.schema.topic,
            started=attempt.wall_clock,
            role=None if group is None else Role.LEADER if group.leader == self._endpoint else Role.FOLLOWER,
            accounts=tuple(_with_arrival(account, attempt) for account in result.accounts) if result else (),
            phases=attempt.seconds_of_stages(now),
            straggler=result.straggler if result else None,
            digest=result.digest if result else "",
            state=self._state(attempt, result),
            last_to_arrive=attempt.last_to_arrive,
        )

    def _state(self, attempt: _Attempt, result: RoundResult | None) -> str:
        """The digest of what all members hold alike; where the result is the state, that of the averages is it."""
        whole = result is not None and attempt.adopted and attempt.topic.commits and not result.kept_local
        return result.digest if whole and result is not None else attempt.state


def _with_arrival(account: Account, attempt: _Attempt) -> Account:
    name = account.endpoint
    waited = None if attempt.arrivals is None else attempt.arrivals.waited(name)
    return replace(account, waited=waited, step_rate=attempt.step_rates.get(name))


def _why_failed(group: Group, endpoint: str, result: RoundResult, adopt: Adopt) -> str:
    """Why a round averaged nothing, or not all that it had to; empty if it is well."""
    told = "; ".join(f"{dropped.endpoint}: {dropped.reason}" for dropped in result.dropped)
    lost = {dropped.endpoint for dropped in result.dropped}
    if not result.heard and lost >= set(group.endpoints) - {endpoint}:
        return f"all other members were lost ({told})"
    if not result.heard and lost:
        # Such as of a client, who has to do with those that reduce and with nobody else.
        return f"nothing came from any other member ({told})"
    if adopt is Adopt.WHOLE and result.kept_local:
        return f"{result.kept_local} elements have no average, since who had to reduce them was lost ({told})"
    return ""
