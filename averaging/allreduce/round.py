"""One round of a group as a whole: both sides at once, within its deadline, and a farewell if it is given up.

Members that die, go silent or break the protocol are dropped and named, and the round goes on without them. Nothing is
written to the tensors here: the result is handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias

import torch

from averaging.allreduce.hold_ups import HoldUps
from averaging.allreduce.partition import Part, busiest_link, packed_size, packed_sizes, partition, shares
from averaging.allreduce.reducer_side import ReducerSide
from averaging.allreduce.round_account import Adopting, RoundAccount, RoundResult
from averaging.allreduce.send_window import bytes_ahead, reach
from averaging.allreduce.sender_side import SenderSide
from averaging.allreduce.wait_monitor import WaitMonitor
from averaging.config import NonFinite
from averaging.deadlines.donor_rates import SLOW_LINK
from averaging.deadlines.fair_timeout import FairTimeout
from averaging.deadlines.learned_deadlines import Deadline, Deadlines, size_class
from averaging.errors import LyingLeaderError, RoundError
from averaging.observe.receipts import DropCode, Dropped
from averaging.protocol.group import Group
from averaging.protocol.messages import AveragingData, MessageCode
from averaging.protocol.schema import ReplyForm, Schema
from averaging.transport.base import Transport

Prepare: TypeAlias = "Callable[[], Awaitable[Sequence[torch.Tensor]]]"

SPARE = 8
"""So many times `min_part_timeout` before its deadline a round goes on without senders that hold it up, so that the
averages of the others still arrive. It is more where the bytes take long, and half of `timeout` at most."""

FAREWELL_SECONDS = 1.0
"""How long a member that gives up tries to tell the others."""


class AllReduce:
    """One round of `group` at the member `endpoint`.

    Args:
        deadlines: after so long without progress a member is given up; learned further here.
        adopt: see `RoundAccount`; it may write a part's average over that part of the tensors, which is not read
            afterwards.
        proven: see `ReducerSide`.

    Raises:
        RoundError: the weights sum to zero, or nobody can reduce.
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
        adopt: Adopting | None = None,
        proven: Callable[[str], bool] = lambda _: False,
    ) -> None:
        if group.total_weight <= 0:
            raise RoundError(f"the weights of all {len(group.members)} members sum to zero; give somebody a weight")
        self.group = group
        me = group.members[group.index(endpoint)]
        reduced = shares(group.members)
        parts_of = dict(zip(group.endpoints, partition(schema, reduced), strict=True))
        # Allowed in any case so that nobody has to guess how long large tensors take; slower links need more `timeout`.
        self._at_slow_links = busiest_link(reduced, packed_size(schema)) / SLOW_LINK
        own = parts_of[endpoint]
        self._reducers = {name: parts for name, parts in parts_of.items() if me.sends and parts and name != endpoint}
        ahead = bytes_ahead(schema.part_size_bytes, sum(map(bool, parts_of.values())) - 1)
        own_reach = reach(packed_sizes(schema, own), ahead)
        alike = schema.reply is ReplyForm.AVERAGE
        self._schema = schema
        # Where it may turn out that members were announced different groups, nothing is adopted before the end.
        early = adopt if group.committed else None
        self._tally = RoundAccount(group, endpoint, parts_of, reach=own_reach, alike=alike, adopt=early)
        senders = [member for member in group.members if own and member.sends and member is not me]
        self._watch = WaitMonitor(deadlines, size_class(packed_size(schema), len(group.members)), len(senders))
        self._sending = SenderSide(
            endpoint, group, schema, transport, self._tally, watch=self._watch, ahead=ahead, non_finite=non_finite
        )
        self._reducing = ReducerSide(
            me,
            senders,
            own,
            schema,
            self._tally,
            watch=self._watch,
            reach=own_reach,
            non_finite=non_finite,
            proven=proven,
        )

    async def run(self, prepare: Prepare, timeout: float) -> RoundResult:
        """Runs the round until every part is in or given up. Cancelling it tells the others that this member leaves.

        Args:
            prepare: makes what this member contributes: flat CPU tensors, one per tensor of the schema; read until the
                end of the round, never written here. The others' parts are taken in meanwhile.
            timeout: seconds after which it ends at the latest, besides those that it takes on slow links and those in
                which this member itself stood still.

        Raises:
            LyingLeaderError: the leader has announced another group to another member.
        """
        self._tally.begin()
        seconds = timeout + self._at_slow_links
        try:
            async with FairTimeout(Deadline(seconds, "the round's"), seconds), self._watch.running():
                self._reducing.begin()
                tensors = await prepare()
                self._tally.ready()
                self._watch.at_every_look(self._look_for_hold_ups(timeout))
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._reducing.run(tensors))
                    for name, parts in self._reducers.items():
                        tasks.create_task(self._exchange(name, parts, tensors))
        except TimeoutError:
            told = f"timeout + {self._at_slow_links:.1f} s for its bytes at 10 Mbit/s"
            whole = f"the round's deadline of {seconds:.1f} s = {told} passed before"
            self._reducing.drop_unfinished(f"{whole} it was done")
            missing = self._sending.unfinished
            for name in missing:
                self._tally.lose(Dropped(name, f"{whole} its last average came", DropCode.ROUND_DEADLINE))
            if len(self._reducers) == 1:  # of several one is given up earlier, unless all are as slow
                for name in missing:
                    self._watch.held_up(name)
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
        self._reducing.close(MessageCode.CANCELLED)
        return self.result()

    async def leave(self) -> None:
        """Takes no part in the round, instead of `run`, and tells the others so that they do not wait."""
        await self._end(asyncio.CancelledError())

    async def _end(self, error: BaseException) -> None:
        """Gives the round up, and tells the others."""
        leaves = isinstance(error, asyncio.CancelledError | LyingLeaderError)
        code = MessageCode.CANCELLED if leaves else MessageCode.INTERNAL_ERROR
        self._reducing.close(code)
        await self._sending.say_farewell(list(self._reducers), code, FAREWELL_SECONDS)

    def _look_for_hold_ups(self, timeout: float) -> Callable[[float], None]:
        """Gives up who holds the round up, as early as leaves the others the time to finish it.

        Args:
            timeout: of the round, see `run`.
        """
        allowed, whole = self._watch.deadlines.lower, timeout + self._at_slow_links
        spare = min(timeout / 2, max(SPARE * allowed, self._at_slow_links / 2))
        senders = HoldUps(whole - spare, allowed, self._watch.on_probation)
        reducers = HoldUps(whole - spare / 2, allowed, self._watch.on_probation)  # it may itself have waited for one

        def look(now: float) -> None:
            self._reducing.give_up_who_holds_up(senders, now)
            if not self._reducing.unfinished:
                self._sending.give_up_who_holds_up(reducers, now)

        return look

    async def _exchange(self, name: str, parts: Sequence[Part], tensors: Sequence[torch.Tensor]) -> None:
        lost = await self._sending.send_to(name, parts, tensors)
        if lost is None:
            self._reducing.hasten(name, sum(packed_sizes(self._schema, parts)))
        else:
            self._reducing.doubt(lost)

    def result(self) -> RoundResult:
        """What has come of the round so far."""
        return self._tally.result()

    def aggregate_part(
        self, first: AveragingData, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        """Serves one sender's stream, of which `first` has been read already."""
        return self._reducing.serve(first, messages)


def _first(errors: BaseExceptionGroup[LyingLeaderError]) -> LyingLeaderError:
    """Of errors that all say the same."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
