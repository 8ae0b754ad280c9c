"""The reducer's side of a round: parts of this member's shard come in, their averages go out.

What arrives is checked, averaged and answered part by part; a sender that dies, goes silent or breaks the protocol is
dropped, and the others' parts are averaged without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from averaging.allreduce.drop_codes import ANSWERS, code_of
from averaging.allreduce.hold_ups import HoldUps, blocking
from averaging.allreduce.partition import Part, packed_sizes
from averaging.allreduce.robust_reducer import reducer_for
from averaging.allreduce.round_account import RoundAccount
from averaging.allreduce.send_window import SendWindow
from averaging.allreduce.wait_monitor import Overdue, WaitMonitor
from averaging.common.shared_tensors import finite_as
from averaging.compression import decode, decode_as, encode
from averaging.config import NonFinite
from averaging.deadlines.learned_deadlines import Deadline, Phase
from averaging.errors import LyingLeaderError, NonFiniteError, ProtocolViolationError, TransportError
from averaging.observe.receipts import DropCode, Dropped
from averaging.protocol.group import Member
from averaging.protocol.messages import AveragingData, CompressionType, MessageCode, WireTensor
from averaging.protocol.schema import ReplyForm, Schema

logger = logging.getLogger("averaging.allreduce")


@dataclass(frozen=True, slots=True)
class _Delivered:
    """What must be kept of a part until it is answered: its code and, only if the answer is a delta, its values."""

    compression: CompressionType
    values: torch.Tensor


@dataclass(slots=True)
class _Sender:
    """One sender's stream."""

    pace: SendWindow
    """How far its parts are read ahead of the replies it has taken. This bounds what a round holds beyond the tensors,
    however much it sends: the transport's flow control holds it back then."""
    replies: asyncio.Queue[AveragingData] = field(default_factory=asyncio.Queue)
    opened: bool = False
    doubted: bool = False
    farewell: Dropped | None = None  # what a further stream in its name has said
    done: asyncio.Event = field(default_factory=asyncio.Event)
    count: int = 0  # parts that it has delivered
    delivered: dict[int, _Delivered] = field(default_factory=dict)  # its parts that await their average


_NOTHING = torch.empty(0, device="cpu")
_NO_AVERAGE = AveragingData(code=MessageCode.INTERNAL_ERROR)
_Waiting = Sequence[tuple[_Sender, _Delivered]]


class ReducerSide:
    """One member's shard and the streams of those who send it.

    Args:
        me: this member; its own values are in the average if it sends.
        senders: the members whose parts come over the network; none if there are no parts.
        parts: the shard, in order.
        tally: where averages, bytes and losses are noted.
        watch: keeps the deadlines; a sender that lets one pass is given up.
        reach: how many of its parts are read of a sender that has been answered so many, see `pace.reach`.
        proven: whether the transport proves that a stream in the name of a member comes from that member. If not,
            another member could have opened it, so what is wrong with its first message is held against nobody.
    """

    def __init__(
        self,
        me: Member,
        senders: Sequence[Member],
        parts: Sequence[Part],
        schema: Schema,
        tally: RoundAccount,
        *,
        watch: WaitMonitor,
        reach: Sequence[int],
        non_finite: NonFinite,
        proven: Callable[[str], bool],
    ) -> None:
        self._me = me
        self._proven = proven
        self._reach = reach
        self._parts = parts
        self._first_nbytes = sum(packed_sizes(schema, parts[:1]))
        self._schema = schema
        self._tensors: Sequence[torch.Tensor] | None = None  # of this member, which the others may be ahead of
        self._tally = tally
        self._watch = watch
        self._non_finite = non_finite
        self._senders = {member.endpoint: _Sender(SendWindow(reach)) for member in senders}
        weights = {member.endpoint: member.weight for member in senders}
        self._reducer = reducer_for(schema.aggregation, [part.numel for part in parts], weights)
        self._over = False
        self._failure: LyingLeaderError | None = None

    @property
    def unfinished(self) -> list[str]:
        """The senders that are waited for, or for which this member has averages."""
        return [name for name, sender in self._senders.items() if not sender.done.is_set()]

    def give_up_who_holds_up(self, hold_ups: HoldUps, now: float) -> None:
        """Gives up the senders for which others have waited for too long, `now` seconds after the round began."""
        if self._tensors is None:
            return  # all wait for this member
        unfinished = self.unfinished
        counts = {name: one.count for name, one in self._senders.items() if name not in self._tally.dropped}
        holding = blocking(counts, self._reach)
        untaken = all(count == len(self._parts) for count in counts.values()) and len(unfinished) < len(counts)
        if untaken or all(map(self._watch.on_probation, unfinished)):
            holding.update(unfinished)  # only this member waits for them
        for name, deed in hold_ups.look(holding, now).items():
            self._watch.held_up(name)
            self._drop(Dropped(name, deed, DropCode.ROUND_DEADLINE))

    def begin(self) -> None:
        """The senders are waited for from now on. Parts are taken in, but none is answered before `run`."""
        for name, sender in self._senders.items():
            if not sender.opened and not sender.doubted and not sender.done.is_set():
                self._watch.begin(name, Phase.OPENING, self._overdue(name, Phase.OPENING, "sent nothing"))

    async def run(self, tensors: Sequence[torch.Tensor]) -> None:
        """Until every sender has all its averages or was dropped.

        Args:
            tensors: of this member: flat, on the CPU, one per tensor of the schema; read, never written.

        Raises:
            LyingLeaderError: a sender was announced another group.
        """
        if self._failure is None:
            self._tensors = tensors
            self._answer_complete()
            for sender in self._senders.values():
                await sender.done.wait()
        if self._failure is not None:
            raise self._failure

    def doubt(self, lost: Dropped) -> None:
        """If a member has not opened its stream yet, it gets little time from now on to do so.

        It is lost as a reducer: it may be gone, or may never have learned that the group began, since its leader died
        first. Or somebody has said in its name that it leaves, or sent nonsense.
        """
        sender = self._senders.get(lost.endpoint)
        if sender is not None and not sender.opened and not sender.doubted and not sender.done.is_set():
            sender.doubted = True  # the time begins once, however often that is said
            shortest = self._watch.deadlines.shortest
            self._watch.begin(lost.endpoint, Phase.OPENING, lambda *_: self._drop(lost), shortest)

    def hasten(self, name: str, nbytes: int) -> None:
        """A member has answered all that it reduces: if it has not opened its own stream yet, it can hardly do so.

        Args:
            name: the member.
            nbytes: of its averages. A slow link takes longer for a first part that is larger.
        """
        if name in self._senders:
            self._watch.hasten(name, Phase.OPENING, "the last of its averages", self._first_nbytes / nbytes)

    def drop_unfinished(self, reason: str) -> None:
        """Gives up every sender that is not done."""
        for name, sender in self._senders.items():
            after = "" if sender.opened else self._before_opening(name)
            told = f"{reason}, after {after}" if after else reason
            self._drop(Dropped(name, told, DropCode.ROUND_DEADLINE))

    def close(self, code: MessageCode) -> None:
        """The round is over: streams still open, and those that come yet, are answered with `code`."""
        self._over = True
        for sender in self._senders.values():
            if not sender.done.is_set():
                sender.replies.put_nowait(AveragingData(code=code))

    async def serve(
        self, first: AveragingData, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        """Serves one sender's stream, of which `first` has been read already."""
        name = first.endpoint
        sender = self._senders.get(name)
        if first.code in (MessageCode.CANCELLED, MessageCode.INTERNAL_ERROR):
            if sender is not None and not self._over:
                self._hear_farewell(sender, name, first)
            return
        if sender is None or sender.opened:  # not a sender of this group, or its second stream
            yield self._refusal(MessageCode.PROTOCOL_VIOLATION, first)
            return
        if self._over or sender.done.is_set():  # too late
            yield self._refusal(MessageCode.CANCELLED, first)
            return
        try:
            self._tally.compare(name, first.metadata)
            values = self._read(0, first)
        except LyingLeaderError as error:
            self._fail(error)
            yield self._refusal(MessageCode.CANCELLED, first)
            return
        except ProtocolViolationError as error:
            self._part_with(sender, Dropped(name, str(error), code_of(error)))
            yield self._refusal(MessageCode.PROTOCOL_VIOLATION, first)
            return
        sender.opened = True
        self._watch.end(name, Phase.OPENING)
        self._watch.done(name, Phase.OPENING)
        untaken = self._overdue(name, Phase.TAKING, "took no reply")
        reading = asyncio.create_task(self._read_parts(name, sender, first, values, messages))
        handed_over = 0
        lost = Dropped(name, "connection lost", DropCode.CONNECTION_LOST)
        try:
            while handed_over < len(self._parts):
                reply = await sender.replies.get()
                if reply.tensor_part is None:
                    lost = Dropped(name, f"was answered with {reply.code.name}", DropCode.INTERNAL_ERROR)
                    yield self._with_metadata(reply, first)
                    return
                handed_over += 1
                self._tally.sent(name, len(reply.tensor_part.buffer))
                self._watch.begin(name, Phase.TAKING, untaken)
                yield self._with_metadata(reply, first) if handed_over == 1 else reply
                self._watch.end(name, Phase.TAKING)
                sender.pace.answered()
        finally:
            # The verdict first: gRPC may cancel a call once more while it waits below.
            if handed_over == len(self._parts):
                sender.done.set()
                self._watch.done(name, Phase.TAKING)
            else:
                self._drop(sender.farewell or lost)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _refusal(self, code: MessageCode, first: AveragingData) -> AveragingData:
        return self._with_metadata(AveragingData(code=code), first)

    def _with_metadata(self, reply: AveragingData, first: AveragingData) -> AveragingData:
        """A reply to a stream that began with `first`: only who has sent metadata is sent some."""
        return replace(reply, metadata=self._tally.metadata, encoded=[]) if first.metadata else reply

    def _hear_farewell(self, sender: _Sender, name: str, farewell: AveragingData) -> None:
        lost = Dropped(name, f"left the round ({farewell.code.name})", ANSWERS[farewell.code])
        try:
            self._tally.compare(name, farewell.metadata)
        except LyingLeaderError as error:
            self._fail(error)
            return
        except ProtocolViolationError as error:
            lost = Dropped(name, str(error), code_of(error))
        self._part_with(sender, lost)

    def _part_with(self, sender: _Sender, lost: Dropped) -> None:
        """A stream in the name of a sender, which has no other yet, says that it leaves, or begins with nonsense.

        If it is proved whose stream that is, the sender is dropped at once. If not, the stream changes nothing while
        the sender's own is open, and before that it leaves the sender a little time to open it.
        """
        if sender.opened:
            sender.farewell = lost
        elif self._proven(lost.endpoint):
            self._drop(lost)
        else:
            self.doubt(lost)

    def _fail(self, error: LyingLeaderError) -> None:
        """The round ends at this member without a result."""
        self._failure, self._over = error, True
        for sender in self._senders.values():
            sender.replies.put_nowait(AveragingData(code=MessageCode.CANCELLED))
            sender.done.set()

    async def _read_parts(
        self,
        name: str,
        sender: _Sender,
        first: AveragingData,
        first_values: torch.Tensor,
        messages: AsyncIterator[AveragingData],
    ) -> None:
        """Takes the parts of one sender as fast as it takes its replies."""
        message: AveragingData | None = first
        overdue = self._overdue(name, Phase.PART, "sent nothing")
        try:
            for number in range(len(self._parts)):
                await sender.pace.wait(number)
                if number and not sender.done.is_set():
                    self._watch.begin(name, Phase.PART, overdue)
                    message = await anext(messages, None)
                if sender.done.is_set():
                    return  # it was given up meanwhile
                if number:
                    self._watch.end(name, Phase.PART, heard=message is not None)
                if message is None:
                    reason = f"ended its stream after {number} of {len(self._parts)} parts"
                    self._drop(sender.farewell or Dropped(name, reason, DropCode.CONNECTION_LOST))
                    return
                if message.code in (MessageCode.CANCELLED, MessageCode.INTERNAL_ERROR):
                    self._drop(Dropped(name, f"left the round ({message.code.name})", ANSWERS[message.code]))
                    return
                self._take(name, sender, number, message, self._read(number, message) if number else first_values)
            self._watch.done(name, Phase.PART)
        except ProtocolViolationError as error:
            self._drop(Dropped(name, str(error), code_of(error)), MessageCode.PROTOCOL_VIOLATION)
        except TransportError as error:
            self._drop(Dropped(name, error.reason, code_of(error)))
        except Exception as error:
            logger.exception("group %s: could not take a part of %s", self._tally.group_id.hex()[:8], name)
            reason = f"internal error at this peer, {type(error).__name__}; its log tells more"
            self._drop(Dropped(name, reason, DropCode.INTERNAL_ERROR), MessageCode.INTERNAL_ERROR)

    def _overdue(self, name: str, phase: Phase, deed: str) -> Overdue:
        def overdue(waited: float, deadline: Deadline) -> None:
            self._watch.missed(name, phase)
            after = self._before_opening(name) if phase is Phase.OPENING else ""
            self._drop(Dropped.overdue(name, deed, waited, deadline.seconds, deadline.basis, after=after))

        return overdue

    def _before_opening(self, name: str) -> str:
        """What a sender without a stream has done; a peer behind a firewall learns from nobody else's receipt."""
        answering = self._tally.has_heard(name)
        return f"answering this peer all the same; can it reach {self._me.endpoint}?" if answering else ""

    def _read(self, number: int, message: AveragingData) -> torch.Tensor:
        """The values of a part.

        Raises:
            ProtocolViolationError: it is no part, or not the one that is expected.
        """
        if message.tensor_part is None or message.code not in (MessageCode.PART_FOR_AVERAGING, MessageCode.NO_CODE):
            raise ProtocolViolationError(f"sent {message.code.name} instead of part {number}")
        dtype = self._schema.tensors[self._parts[number].tensor].torch_dtype
        values = decode_as(message.tensor_part, dtype)
        if self._non_finite is NonFinite.REFUSE and not finite_as(values, dtype):
            raise NonFiniteError(f"sent NaN or infinity in part {number}")
        if tuple(values.shape) != (self._parts[number].numel,):
            expected = self._parts[number].numel
            raise ProtocolViolationError(f"sent part {number} with shape {list(values.shape)} instead of [{expected}]")
        return values

    def _take(self, name: str, sender: _Sender, number: int, message: AveragingData, values: torch.Tensor) -> None:
        wire = message.tensor_part or WireTensor()
        self._reducer.add(name, values)
        sender.count += 1
        self._tally.received_part(name, len(wire.buffer))
        kept = values if self._schema.reply is ReplyForm.DELTA else _NOTHING
        sender.delivered[number] = _Delivered(CompressionType(wire.compression), kept)
        self._answer_complete()

    def _drop(self, lost: Dropped, code: MessageCode = MessageCode.CANCELLED) -> None:
        """Goes on without a sender; parts that waited only for it become complete."""
        name = lost.endpoint
        sender = self._senders[name]
        if sender.done.is_set():
            return
        # In a run without certificates any member could have sent what a sender is dropped for.
        self._tally.lose(lost, proven=self._proven(name))
        sender.done.set()
        self._watch.forget(name, Phase.OPENING, Phase.PART, Phase.TAKING)
        sender.delivered.clear()
        sender.replies.put_nowait(AveragingData(code=code))
        self._reducer.drop(name)
        self._answer_complete()

    def _answer_complete(self) -> None:
        """Averages every part that has become complete and hands the replies to the senders' streams."""
        if self._over or self._tensors is None:
            return  # nobody waits for it and the tensors are the application's again, or there are none yet
        for number in self._reducer.take_complete():
            part = self._parts[number]
            local = self._tensors[part.tensor][part.start : part.stop] if self._me.sends else None
            average = self._reducer.finish(number, local, self._me.weight)
            waiting = [
                (sender, sender.delivered.pop(number))
                for sender in self._senders.values()
                if number in sender.delivered
            ]
            if average is None:
                for sender, _ in waiting:
                    sender.replies.put_nowait(_NO_AVERAGE)
            elif self._schema.reply is ReplyForm.DELTA:
                self._answer_with_deltas(number, average, local, waiting)
            else:
                self._answer_with_average(number, average, local, waiting)

    def _answer_with_average(
        self, number: int, average: torch.Tensor, local: torch.Tensor | None, waiting: _Waiting
    ) -> None:
        """Encodes once for all and adopts what the others will decode, so that all end with the same bytes."""
        part = self._parts[number]
        spec = self._schema.tensors[part.tensor]
        replies: dict[CompressionType, AveragingData] = {}
        # The schema's own code first: others are those of senders that know only these.
        for compression in dict.fromkeys((spec.compression, *(delivered.compression for _, delivered in waiting))):
            sent = _as_sent(average, spec.torch_dtype, compression)
            wire = encode(sent, compression)
            kept = sent if compression is CompressionType.NONE else decode(wire)
            if not self._is_sound("the average", number, kept):
                replies[compression] = _NO_AVERAGE
                continue
            replies[compression] = AveragingData(MessageCode.AVERAGED_PART, tensor_part=wire)
            if compression is spec.compression:
                self._tally.averaged = True
                self._tally.reduced(wire.buffer)
                if local is not None:
                    self._tally.put(part, kept)
        for sender, delivered in waiting:
            sender.replies.put_nowait(replies[delivered.compression])

    def _answer_with_deltas(
        self, number: int, average: torch.Tensor, local: torch.Tensor | None, waiting: _Waiting
    ) -> None:
        part = self._parts[number]
        spec = self._schema.tensors[part.tensor]
        if local is not None:
            own = _as_sent(average - local, spec.torch_dtype, CompressionType.NONE)
            if self._is_sound("this peer's own delta", number, local + own):
                self._tally.averaged = True
                self._tally.put(part, own)
        for sender, delivered in waiting:
            delta = _as_sent(average - delivered.values, spec.torch_dtype, delivered.compression)
            wire = encode(delta, delivered.compression)
            kept = delta if delivered.compression is CompressionType.NONE else decode(wire)
            reply = _NO_AVERAGE
            if self._is_sound("a delta", number, delivered.values + kept):
                self._tally.averaged = True
                reply = AveragingData(MessageCode.AVERAGED_PART, tensor_part=wire)
            sender.replies.put_nowait(reply)

    def _is_sound(self, what: str, number: int, result: torch.Tensor) -> bool:
        """Whether a result may be adopted and answered: that of finite contributions can overflow where it is kept."""
        dtype = self._schema.tensors[self._parts[number].tensor].torch_dtype
        if self._non_finite is NonFinite.ALLOW or finite_as(result, dtype):
            return True
        logger.warning(
            "group %s: %s of part %d of %s overflows %s, though what was sent is finite; the part keeps its local "
            "values. Look for values that have grown too large",
            self._tally.group_id.hex()[:8],
            what,
            number,
            self._me.endpoint,
            str(dtype).removeprefix("torch."),
        )
        return False


def _as_sent(values: torch.Tensor, dtype: torch.dtype, compression: CompressionType) -> torch.Tensor:
    """Uncompressed values travel in the tensor's own dtype; the codes take the sum's full precision."""
    return values.to(dtype) if compression is CompressionType.NONE and values.dtype != dtype else values
