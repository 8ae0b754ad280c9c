"""One all-reduce of a group: the sender's and the reducer's side at once, with a deadline for the whole.

Members that die, go silent or break the protocol are dropped, and the round goes on without them. The result is
returned; this module writes nothing to the tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias

from averaging.allreduce.part_forms import Prepared, ReplyResidual, forms_of
from averaging.allreduce.partition import busiest_link, packed_size, packed_sizes, partition, shares
from averaging.allreduce.reducer_side import Exchange, ReducerSide
from averaging.allreduce.round_tally import AdoptPart, LyingLeaderError, RoundResult, RoundTally
from averaging.allreduce.sender_side import SenderSide
from averaging.allreduce.stream_limits import DelayBudget, WaitMonitor, send_limits, window_bytes
from averaging.config import NonFinite
from averaging.errors import RoundError
from averaging.protocol import AveragingData, Group, MessageCode, ReplyForm
from averaging.receipts import DropCode, Dropped
from averaging.tensors import Schema
from averaging.timing import SLOW_LINK, Deadline, Deadlines, FairTimeout, size_class
from averaging.transport import Transport

Prepare: TypeAlias = "Callable[[], Awaitable[Sequence[Prepared]]]"

RESERVE = 8
"""A round continues without senders that hold it up this many `min_stall_timeout` before its deadline, so that the
averages of the others still arrive. It is more if the bytes take long, and at most half of `round_timeout`."""

LEAVE_NOTICE_SECONDS = 1.0
"""Limit for the announcement of a member that leaves the round."""


class AllReduce:
    """One all-reduce of `group` at the member `endpoint`.

    Args:
        deadlines: limits for members without progress; updated by the round.
        residual: of this member's replies; None if what they lose is of no interest.
        proven: see `ReducerSide`.

    Raises:
        RoundError: the weights sum to zero, or no member can reduce.
    """

    def __init__(
        self,
        group: Group,
        endpoint: str,
        schema: Schema,
        transport: Transport,
        *,
        deadlines: Deadlines,
        non_finite: NonFinite = NonFinite.REFUSE,
        proven: Callable[[str], bool] = lambda _: False,
        residual: ReplyResidual | None = None,
    ) -> None:
        if group.total_weight <= 0:
            raise RoundError(f"the weights of all {len(group.members)} members sum to zero; give one a weight above 0")
        self.group = group
        me = group.members[group.index(endpoint)]
        reduced = shares(group.members)
        contributors = sum(member.sends for member in group.members)
        forms = forms_of(schema, members=contributors, residual=residual)
        divided = partition(schema, reduced, joins=group.joins_parts, large=group.large_parts)
        parts_of = dict(zip(group.endpoints, divided, strict=True))
        if residual is not None:
            residual.begin()
        nbytes = packed_size(forms, schema.part_size_bytes, contributors)
        # Added to `round_timeout`, so that users need not raise it for large tensors.
        self._transfer_seconds = busiest_link(reduced, nbytes) / SLOW_LINK
        own = parts_of[endpoint]
        self._reducers = {name: parts for name, parts in parts_of.items() if me.sends and parts and name != endpoint}
        # A block of a sparse tensor is a part even if it has more bytes than a part should have.
        largest = max(
            schema.part_size_bytes, *(max(packed_sizes(forms, parts), default=0) for parts in parts_of.values())
        )
        window = window_bytes(largest, sum(map(bool, parts_of.values())) - 1)
        limits = send_limits(packed_sizes(forms, own), window)
        identical = schema.reply is ReplyForm.AVERAGE
        self._schema, self._transport = schema, transport
        self._tally = RoundTally(group, endpoint, parts_of, send_limits=limits, identical=identical)
        senders = [member for member in group.members if own and member.sends and member is not me]
        self._monitor = WaitMonitor(deadlines, size_class(nbytes, len(group.members)), len(senders))
        shared = Exchange(schema, forms, self._tally, self._monitor, non_finite)
        self._reducing = ReducerSide(shared, me, senders, own, send_limits=limits, proven=proven)
        self._sending = SenderSide(shared, endpoint, group, transport, self._reducing, window)

    def waiting_for(self, least: float) -> list[str]:
        return self._monitor.waiting_for(least)

    async def run(self, prepare: Prepare, timeout: float, adopt: AdoptPart | None = None) -> RoundResult:
        """Runs the round until every part is averaged or given up. A cancellation is announced to the others.

        Args:
            prepare: returns this member's contribution: flat CPU tensors, one per tensor of the schema, and a
                `SparseTensor` for each whose compression is TOP_K. They are read until the end of the round and never
                written. Parts of other members are accepted while it runs.
            timeout: seconds for the whole round, plus the transfer time of its bytes at 10 Mbit/s. Seconds in which
                this process was stopped or busy do not count.
            adopt: see `RoundTally.begin`. It may overwrite a part of the tensors with its average; that part is not
                read again.

        Raises:
            LyingLeaderError: the leader announced another group to another member.
        """
        # If the leader could have announced different groups, nothing is adopted before the end.
        self._tally.begin(adopt if self.group.bound else None)
        for name in self._reducers:
            self._transport.prepare_lane(name)
        seconds = timeout + self._transfer_seconds
        try:
            async with FairTimeout(Deadline(seconds, "the round's"), seconds), self._monitor.running():
                self._reducing.begin()
                tensors = await prepare()
                self._tally.ready()
                began = asyncio.get_running_loop().time()
                self._monitor.on_check(self._check_delays(timeout))
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._reducing.run(tensors))
                    for name, parts in self._reducers.items():
                        tasks.create_task(self._sending.send_to(name, parts, tensors))
        except TimeoutError:
            basis = f"round_timeout + {self._transfer_seconds:.1f} s for its bytes at 10 Mbit/s"
            expired = f"the round's deadline of {seconds:.1f} s = {basis} passed before"
            self._reducing.drop_unfinished(f"{expired} it was done")
            missing = self._sending.unfinished
            for name in missing:
                self._tally.drop(Dropped(name, f"{expired} its last average came", DropCode.ROUND_DEADLINE))
            if len(self._reducers) == 1:  # of several reducers one is given up earlier, unless all are equally slow
                for name in missing:
                    self._monitor.record_hold_up(name)
        except BaseExceptionGroup as group:
            lies, others = group.split(LyingLeaderError)
            if lies is None or others is not None:
                await self._end(group)
                raise
            await self._end(lie := _first(lies))
            raise lie from None
        except BaseException as error:
            await self._end(error)
            raise
        else:
            self._monitor.deadlines.record_round(self._tally.busier_bytes, asyncio.get_running_loop().time() - began)
        self._reducing.close(MessageCode.CANCELLED)
        return self.result()

    async def leave(self) -> None:
        await self._end(asyncio.CancelledError())

    async def _end(self, error: BaseException) -> None:
        leaves = isinstance(error, asyncio.CancelledError | LyingLeaderError)
        code = MessageCode.CANCELLED if leaves else MessageCode.INTERNAL_ERROR
        self._reducing.close(code)
        await self._sending.announce_leave(list(self._reducers), code, LEAVE_NOTICE_SECONDS)

    def _check_delays(self, timeout: float) -> Callable[[float], None]:
        """A check that drops members that hold the round up, early enough for the others to finish it."""
        allowed, whole = self._monitor.deadlines.lower, timeout + self._transfer_seconds
        reserve = min(timeout / 2, max(RESERVE * allowed, self._transfer_seconds / 2))
        senders = DelayBudget(whole - reserve, allowed, self._monitor.on_probation)
        reducers = DelayBudget(
            whole - reserve / 2, allowed, self._monitor.on_probation
        )  # it may have waited for a sender

        def check(now: float) -> None:
            self._reducing.drop_delaying(senders, now)
            if not self._reducing.unfinished:
                self._sending.drop_delaying(reducers, now)

        return check

    def result(self) -> RoundResult:
        return self._tally.result()

    def aggregate_part(
        self, first: AveragingData, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        return self._reducing.serve(first, messages)


def _first(errors: BaseExceptionGroup[LyingLeaderError]) -> LyingLeaderError:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
