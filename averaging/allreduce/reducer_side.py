"""The reducer's side of a round: it receives the parts of this member's shard and returns their averages.

Each part is checked, averaged and answered. A sender that dies, goes silent or breaks the protocol is dropped, and the
remaining parts are averaged without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from averaging.allreduce.part_forms import AnyForm, Averaged, DenseForm, Part, Prepared
from averaging.allreduce.round_tally import ANSWERS, RoundTally, code_of
from averaging.allreduce.shard_reducer import ShardReducer
from averaging.allreduce.stream_limits import Overdue, SendWindow, WaitMonitor
from averaging.config import NonFinite
from averaging.errors import ProtocolViolationError, TransportError, ViolationKind
from averaging.protocol import AveragingData, CompressionType, Member, MessageCode, ReplyForm, WireTensor
from averaging.receipts import DropCode, Dropped
from averaging.tensors import Schema
from averaging.timing import Deadline, Phase

logger = logging.getLogger("averaging.allreduce")


@dataclass(frozen=True, slots=True)
class _Delivered:  # a part that awaits its average
    compression: CompressionType
    values: torch.Tensor  # empty unless the reply is a delta


@dataclass(slots=True)
class _Sender:
    # Bounds how far its parts are read ahead of the replies it has taken, and so the memory of a round. Beyond it the
    # transport's flow control stops the sender.
    window: SendWindow
    replies: deque[AveragingData] = field(default_factory=deque)
    answered: asyncio.Future[None] | None = None  # while its stream waits for a reply
    opened: bool = False
    suspected: bool = False
    done: bool = False
    delivered: dict[int, _Delivered] = field(default_factory=dict)

    def answer(self, reply: AveragingData) -> None:
        self.replies.append(reply)
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(None)

    async def next_reply(self) -> AveragingData:
        while not self.replies:
            self.answered = asyncio.get_running_loop().create_future()
            try:
                await self.answered
            finally:
                self.answered = None
        return self.replies.popleft()


_NOTHING = torch.empty(0, device="cpu")
_NO_AVERAGE = AveragingData(code=MessageCode.INTERNAL_ERROR)
_Waiting = Sequence[tuple[_Sender, _Delivered]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What both sides of one member's round have in common."""

    schema: Schema
    forms: Sequence[AnyForm]  # of each tensor of the schema
    tally: RoundTally
    monitor: WaitMonitor  # enforces the deadlines; a member that exceeds one is dropped
    non_finite: NonFinite


class ReducerSide:
    """One member's shard and the streams of its senders.

    `me` is this member, whose own values are in the average if it sends; `senders` are those whose parts come over the
    network, none if there are no parts; `parts` are the shard, in order.
    """

    def __init__(
        self,
        shared: Exchange,
        me: Member,
        senders: Sequence[Member],
        parts: Sequence[Part],
        *,
        send_limits: Sequence[int],
    ) -> None:
        forms = shared.forms
        self._schema, self._forms, self._non_finite = shared.schema, forms, shared.non_finite
        self._tally, self._monitor = shared.tally, shared.monitor
        self._me, self._parts = me, parts
        self._tensors: Sequence[Prepared] | None = None  # of this member; other members may be ready earlier
        self._senders = {member.endpoint: _Sender(SendWindow(send_limits)) for member in senders}
        weights = {member.endpoint: member.weight for member in senders}
        sizes = [part.numel for part in parts]
        # Not `self._form`: a reference cycle would keep the averages of the round until Python's garbage collector
        # runs, some rounds later.
        self._reducer = ShardReducer(sizes, weights, lambda number: forms[parts[number].tensor].reducer())
        self._all_done = asyncio.Event()
        if not self._senders:
            self._all_done.set()
        self._over = False
        self._held_up: defaultdict[str, float] = defaultdict(float)  # seconds, by sender, near the end of the round
        self._checked: float | None = None

    @property
    def unfinished(self) -> list[str]:
        return [name for name, sender in self._senders.items() if not sender.done]

    def drop_delaying(self, now: float) -> None:
        """Drops senders that keep others waiting; called from time to time near the end of the round.

        At its end all members would give up, and the parts of all senders would be lost.
        """
        passed, self._checked = now - (self._checked or now), now
        for name in self._tally.blocking if self._tensors is not None else ():  # else all wait for this member
            self._held_up[name] += passed
            if self._held_up[name] >= self._monitor.deadlines.lower:
                reason = "kept the others waiting until shortly before the end of the round"
                self._drop(Dropped(name, reason, DropCode.ROUND_DEADLINE))

    def begin(self) -> None:
        for name, sender in self._senders.items():
            if not sender.opened and not sender.suspected and not sender.done:
                self._monitor.begin(name, Phase.OPENING, self._overdue(name, Phase.OPENING, "sent nothing"))

    async def run(self, tensors: Sequence[Prepared]) -> None:
        """Returns when every sender has all its averages or was dropped; `tensors` are read, never written."""
        self._tensors = tensors
        self._answer_complete()
        await self._all_done.wait()

    def suspect(self, dropped: Dropped) -> None:
        """Reduces the deadline of a member that has not opened its stream yet to the shortest one.

        It failed as a reducer: it may be gone, or never have learned that the group began because its leader died.
        """
        sender = self._senders.get(dropped.endpoint)
        if sender is not None and not sender.opened and not sender.suspected and not sender.done:
            sender.suspected = True  # later suspicions do not restart the deadline
            shortest = self._monitor.deadlines.shortest
            self._monitor.begin(dropped.endpoint, Phase.OPENING, lambda *_: self._drop(dropped), shortest)

    def drop_unfinished(self, reason: str) -> None:
        for name, sender in self._senders.items():
            after = "" if sender.opened else self._before_opening(name)
            self._drop(Dropped(name, f"{reason}, after {after}" if after else reason, DropCode.ROUND_DEADLINE))

    def close(self, code: MessageCode) -> None:
        self._over = True
        for sender in self._senders.values():
            if not sender.done:
                sender.answer(AveragingData(code=code))

    async def serve(
        self, first: AveragingData, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        name = first.endpoint
        sender = self._senders.get(name)
        if first.code in (MessageCode.CANCELLED, MessageCode.INTERNAL_ERROR):
            if sender is not None and not self._over:
                self._drop(_left(name, first.code))
            return
        if sender is None or sender.opened:
            yield AveragingData(code=MessageCode.PROTOCOL_VIOLATION)
            return
        if self._over or sender.done:
            yield AveragingData(code=MessageCode.CANCELLED)
            return
        try:
            values = self._read(0, first)
        except ProtocolViolationError as error:
            self._drop(Dropped(name, str(error), code_of(error)))
            yield AveragingData(code=MessageCode.PROTOCOL_VIOLATION)
            return
        # From here on the stream is the sender's, and a later one in its name is refused, or says that it leaves.
        sender.opened = True
        self._monitor.end(name, Phase.OPENING)
        self._monitor.done(name, Phase.OPENING)
        taking = self._monitor.wait(name, Phase.TAKING, self._overdue(name, Phase.TAKING, "took no reply"))
        # Parts are read and averages sent at the same time: a sender that waits for averages before it sends more would
        # otherwise stop both. The window keeps the reading at most so many parts ahead of the averages.
        reading = asyncio.create_task(self._read_parts(name, sender, first, values, messages))
        replies_sent = 0
        dropped = Dropped(name, "connection lost", DropCode.CONNECTION_LOST)
        try:
            while replies_sent < len(self._parts):
                reply = sender.replies.popleft() if sender.replies else await sender.next_reply()
                if reply.tensor_part is None:
                    dropped = Dropped(name, f"got the answer {reply.code.name}", DropCode.INTERNAL_ERROR)
                    yield reply
                    return
                replies_sent += 1
                self._tally.sent_average(name, len(reply.tensor_part.buffer))
                # The generator resumes when the transport has room for the next message, that is when the sender reads.
                taking.begin()
                yield reply
                taking.end()
                sender.window.answered()
        finally:
            # Before any await: gRPC may cancel the call a second time while it waits below.
            if replies_sent == len(self._parts):
                self._finish(sender)
                self._monitor.done(name, Phase.TAKING)
            else:
                self._drop(dropped)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _finish(self, sender: _Sender) -> None:
        sender.done = True
        if not self.unfinished:
            self._all_done.set()

    async def _read_parts(
        self,
        name: str,
        sender: _Sender,
        first: AveragingData,
        first_values: Any,
        messages: AsyncIterator[AveragingData],
    ) -> None:
        message: AveragingData | None = first
        arriving = self._monitor.wait(name, Phase.PART, self._overdue(name, Phase.PART, "sent nothing"))
        try:
            for number in range(len(self._parts)):
                if sender.window.holds(number):
                    await sender.window.wait(number)
                if number and not sender.done:
                    arriving.begin()
                    message = await anext(messages, None)
                if sender.done:
                    return
                if message is None:
                    self._monitor.forget(name, Phase.PART)
                    reason = f"ended its stream after {number} of {len(self._parts)} parts"
                    self._drop(Dropped(name, reason, DropCode.CONNECTION_LOST))
                    return
                if number:
                    arriving.end()
                if message.code in (MessageCode.CANCELLED, MessageCode.INTERNAL_ERROR):
                    self._drop(_left(name, message.code))
                    return
                self._take(name, sender, number, message, self._read(number, message) if number else first_values)
            self._monitor.done(name, Phase.PART)
        except ProtocolViolationError as error:
            self._drop(Dropped(name, str(error), code_of(error)), MessageCode.PROTOCOL_VIOLATION)
        except TransportError as error:
            self._drop(Dropped(name, error.reason, code_of(error)))
        except Exception as error:
            logger.exception("group %s: internal error on a part of %s", self._tally.group_id.hex()[:8], name)
            reason = f"internal error at this peer, {type(error).__name__}; see this peer's log"
            self._drop(Dropped(name, reason, DropCode.INTERNAL_ERROR), MessageCode.INTERNAL_ERROR)

    def _overdue(self, name: str, phase: Phase, symptom: str) -> Overdue:
        def overdue(waited: float, deadline: Deadline) -> None:
            self._monitor.record_miss(name, phase)
            after = self._before_opening(name) if phase is Phase.OPENING else ""
            self._drop(Dropped.overdue(name, symptom, waited, deadline.seconds, deadline.basis, after=after))

        return overdue

    def _before_opening(self, name: str) -> str:
        """A hint if a member reduces for this peer but never opened its stream: a firewall may block it."""
        answers = self._tally.has_received_from(name)
        return f"it answered parts of this peer; can it reach {self._me.endpoint}?" if answers else ""

    def _read(self, number: int, message: AveragingData) -> Any:
        """The values of part `number`, as its form decodes them; or raises a ProtocolViolationError."""
        if message.tensor_part is None or message.code not in (MessageCode.PART_FOR_AVERAGING, MessageCode.NO_CODE):
            raise ProtocolViolationError(f"sent {message.code.name} instead of part {number}")
        part, form = self._parts[number], self._form(number)
        if (size := tuple(message.tensor_part.size)) != (part.numel,):
            raise ProtocolViolationError(f"sent part {number} with shape {list(size)} instead of [{part.numel}]")
        values = form.decode(message.tensor_part, part)
        if self._non_finite is NonFinite.REFUSE and not form.is_finite(values):
            raise ProtocolViolationError(f"sent NaN or infinity in part {number}", kind=ViolationKind.NON_FINITE)
        return values

    def _form(self, number: int) -> AnyForm:
        return self._forms[self._parts[number].tensor]

    def _take(self, name: str, sender: _Sender, number: int, message: AveragingData, values: Any) -> None:
        wire = message.tensor_part or WireTensor()
        self._reducer.add(name, values, spare=self._is_spare(wire))
        self._tally.received_part(name, len(wire.buffer))
        kept = values if self._schema.reply is ReplyForm.DELTA else _NOTHING
        sender.delivered[number] = _Delivered(CompressionType(wire.compression), kept)
        self._answer_complete()

    def _is_spare(self, wire: WireTensor) -> bool:
        """Whether nobody else reads the values of a part, so that the sum may be made in their place.

        They are a copy, or in the buffer in which they were received: a transport that passes on memory of others, or
        what Python takes for constant, makes it read-only.
        """
        if self._schema.reply is ReplyForm.DELTA:
            return False
        return wire.compression != CompressionType.NONE or not memoryview(wire.buffer).readonly

    def _drop(self, dropped: Dropped, code: MessageCode = MessageCode.CANCELLED) -> None:
        name = dropped.endpoint
        sender = self._senders[name]
        if sender.done:
            return
        self._tally.drop(dropped)
        self._finish(sender)
        self._monitor.forget(name, Phase.OPENING, Phase.PART, Phase.TAKING)
        sender.delivered.clear()
        sender.answer(AveragingData(code=code))
        self._reducer.drop(name)
        self._answer_complete()

    def _answer_complete(self) -> None:
        if self._over or self._tensors is None:
            return
        for number in self._reducer.take_complete():
            part, form = self._parts[number], self._form(number)
            local: Any = form.own(self._tensors, part) if self._me.sends else None
            average = self._reducer.finish(number, local, self._me.weight)
            waiting = [
                (sender, sender.delivered.pop(number))
                for sender in self._senders.values()
                if number in sender.delivered
            ]
            if average is None:
                for sender, _ in waiting:
                    sender.answer(_NO_AVERAGE)
            elif self._schema.reply is ReplyForm.DELTA:
                self._answer_with_deltas(number, average, local, waiting)
            else:
                self._answer_with_average(number, average, waiting)

    def _answer_with_average(self, number: int, average: Any, waiting: _Waiting) -> None:
        """Encodes the average once for all members and adopts the decoded values, so that all hold the same bytes."""
        part, form = self._parts[number], self._form(number)
        spec = self._schema.tensors[part.tensor]
        replies: dict[CompressionType, AveragingData] = {}
        # The schema's compression first; other software may use another one.
        for compression in dict.fromkeys((spec.compression, *(delivered.compression for _, delivered in waiting))):
            wire, kept = form.answer(average, compression, part)
            if not self._is_usable("the average", number, kept):
                replies[compression] = _NO_AVERAGE
                continue
            replies[compression] = AveragingData(MessageCode.AVERAGED_PART, tensor_part=wire)
            if compression is spec.compression:
                self._tally.averaged = True
                self._tally.clamped += form.clamped(kept)
                self._tally.reduced(wire.buffer)
                if self._me.sends:
                    self._tally.put(part, kept)
        for sender, delivered in waiting:
            sender.answer(replies[delivered.compression])

    def _answer_with_deltas(
        self, number: int, average: torch.Tensor, local: torch.Tensor | None, waiting: _Waiting
    ) -> None:
        part, form = self._parts[number], cast("DenseForm", self._form(number))
        if local is not None:
            own = (average - local).to(self._schema.tensors[part.tensor].torch_dtype)
            if self._is_usable("this peer's own delta", number, local + own):
                self._tally.averaged = True
                self._tally.put(part, own)
        for sender, delivered in waiting:
            delta = average - delivered.values
            wire, kept = form.answer(delta, delivered.compression, part)
            reply = _NO_AVERAGE
            if self._is_usable("a delta", number, delivered.values + kept):
                self._tally.averaged = True
                reply = AveragingData(MessageCode.AVERAGED_PART, tensor_part=wire)
            sender.answer(reply)

    def _is_usable(self, what: str, number: int, result: Averaged) -> bool:
        """Whether a result may be adopted and sent: the average of finite contributions can overflow its dtype."""
        if self._non_finite is NonFinite.ALLOW or self._form(number).is_finite(result):
            return True
        logger.warning(
            "group %s: %s of part %d of %s overflows %s although all contributions are finite; the part keeps its "
            "local values. Check the tensors for values that have grown too large",
            self._tally.group_id.hex()[:8],
            what,
            number,
            self._me.endpoint,
            self._schema.tensors[self._parts[number].tensor].dtype,
        )
        return False


def _left(name: str, code: MessageCode) -> Dropped:
    return Dropped(name, f"left the round ({code.name})", ANSWERS[code])
