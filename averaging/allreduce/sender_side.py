"""The sender's side of a round: it sends this member's parts to their reducers and receives the averages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from averaging.allreduce.part_forms import Part, Prepared, have_arrived
from averaging.allreduce.partition import packed_sizes
from averaging.allreduce.reducer_side import Exchange, ReducerSide
from averaging.allreduce.round_tally import ANSWERS, code_of
from averaging.allreduce.stream_limits import MAX_HOLD_SECONDS, SendWindow, WaitMonitor, send_limits
from averaging.config import NonFinite
from averaging.errors import AveragingError, ProtocolViolationError, TransportError, ViolationKind
from averaging.protocol import AveragingData, Group, MessageCode, ReplyForm
from averaging.receipts import DropCode, Dropped
from averaging.timing import Deadline, Phase, expire
from averaging.transport import Transport, is_alive

# How long a sender waits for a reducer, which may wait for another sender and is pinged before it is dropped.


LANE_FACTOR = 3
"""Multiple of the longest learned deadline for which a reducer may send nothing over a direct connection."""


class ReducerLiveness:
    """Enforces the deadline of one reducer's replies; a context manager around the reading of them.

    The reducer is pinged shortly before its learned deadline. While it answers, the sender waits for up to twice
    `stall_timeout` without progress, because the reducer may wait for another sender. If nothing is learned yet, the
    reducer is pinged after a third of `stall_timeout` and has the rest to answer: the ping may queue behind a part.
    `limit` expires when the reducer is given up. Then `symptom` says what was missing, `seconds` how long there had
    been no progress, and `deadline` what has passed.
    """

    def __init__(self, name: str, transport: Transport, monitor: WaitMonitor, limit: asyncio.Timeout) -> None:
        self._name, self._transport, self._monitor, self._limit = name, transport, monitor, limit
        self._pinging: asyncio.Task[None] | None = None
        self._longest = Deadline(2 * monitor.deadlines.upper, "2 × stall_timeout")
        self.symptom, self.seconds, self.deadline = "no reply", 0.0, self._longest

    async def __aenter__(self) -> Self:
        deadlines = self._monitor.deadlines
        self._learned, self._ping_deadline = self._monitor.deadline(self._name, Phase.REPLY), deadlines.shortest
        if self._learned.seconds >= deadlines.upper:
            self._ping_deadline = Deadline(max(deadlines.lower, 2 / 3 * deadlines.upper), "2/3 × stall_timeout")
        # Early enough that the answer to the ping is due at the learned deadline.
        early = max(deadlines.lower, self._learned.seconds - self._ping_deadline.seconds)
        self._until_ping = Deadline(early, self._learned.basis)
        self._wait = self._monitor.wait(self._name, Phase.REPLY, self._overdue, self._until_ping)
        self._wait.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._monitor.forget(self._name, Phase.REPLY, Phase.ANSWER)
        self._wait.overdue = None  # it refers to this object, which refers to it
        if self._pinging is not None:
            self._pinging.cancel()
            await asyncio.gather(self._pinging, return_exceptions=True)

    def progress(self) -> None:
        if self._pinging is not None:  # whatever it answers, it is alive
            self._pinging.cancel()
        self.seconds = 0.0
        self._wait.deadline = self._until_ping
        self._wait.again()

    def answered_all(self) -> None:
        # Only the end of the stream is missing.
        self._wait.deadline, self._wait.overdue = self._monitor.deadlines.shortest, lambda *_: expire(self._limit)
        self._wait.begin()

    def _overdue(self, waited: float, _: Deadline) -> None:
        self.seconds = waited
        if waited >= self._longest.seconds:
            self._give_up()
        else:
            self._pinging = asyncio.create_task(self._ping())

    async def _ping(self) -> None:
        """Continues the wait if the reducer answers. What is learned from it is the whole time without progress."""
        self._wait.deadline = self._longest
        self._wait.begin(self.seconds)
        pinged = asyncio.get_running_loop().time()
        alive = await self._is_alive()
        self.seconds += asyncio.get_running_loop().time() - pinged
        if alive and self._lane_is_lost():
            self.symptom, self.deadline = "no reply over the direct connection", self._learned
            self._give_up()
        elif alive:
            seconds = min(self.seconds + self._until_ping.seconds, self._longest.seconds)
            self._wait.deadline = Deadline(seconds, self._longest.basis)
            self._wait.begin(self.seconds)
        else:
            self.symptom, self.deadline = "no reply and no answer to a ping", self._learned
            self._give_up()

    def _lane_is_lost(self) -> bool:
        # A ping travels over gRPC and says nothing about a direct connection. The reducer may wait for another sender,
        # but for no longer than this member would wait for one as a reducer.
        lane = self._transport.lane(self._name)
        known = max(self._learned.seconds, self._monitor.longest_learned(Phase.PART))
        return lane is not None and lane.name != "grpc" and self.seconds >= LANE_FACTOR * known

    def _give_up(self) -> None:
        self._monitor.record_miss(self._name, Phase.REPLY)
        expire(self._limit)

    async def _is_alive(self) -> bool:
        try:
            async with asyncio.timeout(None) as limit:
                self._monitor.begin(self._name, Phase.ANSWER, lambda *_: expire(limit), self._ping_deadline)
                return await is_alive(self._transport, self._name)
        except TimeoutError:
            return False
        finally:
            self._monitor.forget(self._name, Phase.ANSWER)


logger = logging.getLogger("averaging.allreduce")

ARRIVAL_SECONDS = 0.001
"""Interval at which a sender looks whether a part has come from a device."""


class SenderSide:
    """One member's streams to the reducers of its group, of which `reducing` expects streams."""

    def __init__(
        self,
        shared: Exchange,
        endpoint: str,
        group: Group,
        transport: Transport,
        reducing: ReducerSide,
        window: int,
    ) -> None:
        self._schema, self._forms, self._non_finite = shared.schema, shared.forms, shared.non_finite
        self._tally, self._monitor = shared.tally, shared.monitor
        self._endpoint, self._group = endpoint, group
        self._transport, self._reducing = transport, reducing
        self._window = window
        self.unfinished: dict[str, None] = {}  # reducers whose averages are missing

    async def send_to(self, name: str, parts: Sequence[Part], tensors: Sequence[Prepared]) -> None:
        """Sends a reducer its parts and collects their averages, until all have arrived or it is dropped."""
        received, sizes = 0, packed_sizes(self._forms, parts)
        window = SendWindow(send_limits(sizes, self._window), MAX_HOLD_SECONDS)
        answer = MessageCode.AVERAGED_PART

        def done() -> str:
            return f"{received} of {len(parts)} averages"

        try:
            async with (
                asyncio.timeout(None) as limit,
                ReducerLiveness(name, self._transport, self._monitor, limit) as liveness,
            ):
                self.unfinished[name] = None
                outgoing = self._messages(name, parts, tensors, window, liveness.progress)
                async with aclosing(self._transport.aggregate_part(name, outgoing)) as replies:
                    if (lane := self._transport.lane(name)) is not None:
                        self._tally.lane(name, lane.name, lane.reason)
                    # Read to the end of the stream: closing it early would look like a lost connection.
                    async for reply in replies:
                        if received == len(parts):
                            raise ProtocolViolationError("sent more replies than it got parts")
                        answer = reply.code
                        self._read(name, parts[received], reply, tensors)
                        received += 1
                        window.answered()
                        liveness.progress()
                        if received == len(parts):
                            liveness.answered_all()
            dropped = Dropped(name, f"ended its stream after {done()}", DropCode.CONNECTION_LOST)
        except TimeoutError:
            deadline = liveness.deadline
            dropped = Dropped.overdue(
                name, liveness.symptom, liveness.seconds, deadline.seconds, deadline.basis, after=done()
            )
        except TransportError as error:
            dropped = Dropped(name, f"{error.reason} after {done()}", code_of(error))
        except ProtocolViolationError as error:
            dropped = Dropped(name, f"{error} after {done()}", ANSWERS.get(answer, code_of(error)))
        # After the deadline of the round this is not reached, so `unfinished` still names the missing reducers.
        self.unfinished.pop(name, None)
        if received == len(parts):
            self._monitor.done(name, Phase.REPLY)
        else:
            self._tally.drop(dropped)
            self._reducing.suspect(dropped)

    async def _messages(
        self,
        name: str,
        parts: Sequence[Part],
        tensors: Sequence[Prepared],
        window: SendWindow,
        progress: Callable[[], None],
    ) -> AsyncGenerator[AveragingData, None]:
        """The messages of one stream to a reducer; only the first names the group and the sender."""
        for number, part in enumerate(parts):
            if window.holds(number):
                await window.wait(number)
            progress()
            # What is on a device comes at the speed of the bus.
            while not have_arrived(tensors, part):  # noqa: ASYNC110
                await asyncio.sleep(ARRIVAL_SECONDS)
            form = self._forms[part.tensor]
            self._tally.clamped += form.clamped(form.own(tensors, part))
            wire = form.encode(tensors, part)
            self._tally.sent_part(name, len(wire.buffer))
            if number == 0:
                code, group = MessageCode.PART_FOR_AVERAGING, self._group
                yield AveragingData(code, group.group_id, self._endpoint, wire)
            else:
                yield AveragingData(tensor_part=wire)

    def _read(self, name: str, part: Part, reply: AveragingData, tensors: Sequence[Prepared]) -> None:
        if reply.code is MessageCode.CANCELLED:
            raise ProtocolViolationError("left the round or dropped this peer (CANCELLED)")
        if reply.code is not MessageCode.AVERAGED_PART or reply.tensor_part is None:
            raise ProtocolViolationError(f"answered with {reply.code.name}")
        form = self._forms[part.tensor]
        if tuple(reply.tensor_part.size) != (part.numel,):
            raise ProtocolViolationError(
                f"answered with shape {list(reply.tensor_part.size)} instead of [{part.numel}]"
            )
        values: Any = form.decode_answer(reply.tensor_part, part)
        self._tally.clamped += form.clamped(values)
        if self._non_finite is NonFinite.REFUSE:
            kept = values
            if self._schema.reply is ReplyForm.DELTA:
                own: Any = form.own(tensors, part)
                kept = own + values.to(own.dtype)
            if not form.is_finite(kept):
                raise ProtocolViolationError("answered with NaN or infinity", kind=ViolationKind.NON_FINITE)
        self._tally.received_average(name, part, values, reply.tensor_part.buffer)

    async def announce_leave(self, names: Sequence[str], code: MessageCode, seconds: float) -> None:
        """Announces that this member leaves, so that no reducer waits for its parts. Gives up after `seconds`."""
        message = AveragingData(code=code, group_id=self._group.group_id, endpoint=self._endpoint)

        async def announce(name: str) -> None:
            async def once() -> AsyncGenerator[AveragingData, None]:
                yield message

            try:
                async with aclosing(self._transport.aggregate_part(name, once())) as replies:
                    async for _ in replies:
                        break
            except AveragingError as error:
                logger.debug("could not announce to %s that this member leaves: %s", name, error)

        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                for name in names:
                    tasks.create_task(announce(name))
        except TimeoutError:
            logger.debug("could not announce to every member within %g s that this one leaves", seconds)
