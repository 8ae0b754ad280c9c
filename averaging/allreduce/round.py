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
from averaging.allreduce.round_tally import RoundResult, RoundTally
from averaging.allreduce.sender_side import SenderSide
from averaging.allreduce.stream_limits import WaitMonitor, send_limits, window_bytes
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
    """One all-reduce of `group` at the member `endpoint`; a RoundError if nobody has a weight, or nobody can reduce.

    It updates `deadlines`, the limits for members without progress. `residual` is that of this member's replies; None
    if what they lose is of no interest.
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
        self._reducing = ReducerSide(shared, me, senders, own, send_limits=limits)
        self._sending = SenderSide(shared, endpoint, group, transport, self._reducing, window)

    def waiting_for(self, least: float) -> list[str]:
        return self._monitor.waiting_for(least)

    async def run(self, prepare: Prepare, timeout: float) -> RoundResult:
        """Runs the round until every part is averaged or given up. A cancellation is announced to the others.

        `prepare` returns this member's contribution: flat CPU tensors, one per tensor of the schema, and a
        `SparseTensor` or `VisibleTensor` for each whose compression is TOP_K or VISIBLE. They are read until the end of
        the round and never written.
        Parts of other members are accepted while it runs. `timeout` is in seconds for the whole round, plus the
        transfer time of its bytes at 10 Mbit/s. Seconds in which this process was stopped or busy do not count.
        """
        self._tally.begin()
        for name in self._reducers:
            self._transport.prepare_lane(name)
        seconds = timeout + self._transfer_seconds
        try:
            async with FairTimeout(Deadline(seconds, "the round's"), seconds), self._monitor.running():
                self._reducing.begin()
                tensors = await prepare()
                self._tally.ready()
                began = asyncio.get_running_loop().time()
                reserve = min(timeout / 2, max(RESERVE * self._monitor.deadlines.lower, self._transfer_seconds / 2))
                self._monitor.check = lambda now: (
                    self._reducing.drop_delaying(now) if now >= seconds - reserve else None
                )
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._reducing.run(tensors))
                    for name, parts in self._reducers.items():
                        tasks.create_task(self._sending.send_to(name, parts, tensors))
        except TimeoutError:
            basis = f"round_timeout + {self._transfer_seconds:.1f} s for its bytes at 10 Mbit/s"
            expired = f"the round's deadline of {seconds:.1f} s = {basis} passed before"
            self._reducing.drop_unfinished(f"{expired} it was done")
            for name in self._sending.unfinished:
                self._tally.drop(Dropped(name, f"{expired} its last average came", DropCode.ROUND_DEADLINE))
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
        code = MessageCode.CANCELLED if isinstance(error, asyncio.CancelledError) else MessageCode.INTERNAL_ERROR
        self._reducing.close(code)
        await self._sending.announce_leave(list(self._reducers), code, LEAVE_NOTICE_SECONDS)

    def result(self) -> RoundResult:
        return self._tally.result()

    def aggregate_part(
        self, first: AveragingData, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        return self._reducing.serve(first, messages)
