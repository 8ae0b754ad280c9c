"""One butterfly all-reduce of a group: every member sends each reducer its parts and gets their averages back.

What arrives is checked, averaged and answered part by part; a member that dies, goes silent or breaks the protocol is
dropped and named, and the round goes on without it. Nothing is written to the tensors here: the result is handed over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import torch

from averaging.compression import decode, encode
from averaging.config import NonFinite
from averaging.errors import AveragingError, ProtocolViolationError, RoundError, TransportError
from averaging.group import Group
from averaging.messages import AveragingData, CompressionType, MessageCode
from averaging.observe.receipts import Dropped
from averaging.partition import Part, partition, shares
from averaging.reducer import ShardReducer
from averaging.schema import ReplyForm, Schema
from averaging.tensors import all_finite
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)

READ_AHEAD = 8
"""Parts of one sender that may be in a reducer's hands before it has taken the reply to the first of them.

This bounds what a round holds beyond the tensors; the sender is held back by the transport's flow control."""

FAREWELL_SECONDS = 1.0
"""How long a member that gives up tries to tell the others."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What came out of a round.

    Attributes:
        parts: the parts whose reply arrived, with the average or the delta: 1-D, on the CPU, not to be written.
        dropped: members that were lost, in the order in which they were.
        kept_local: elements without a reply, which keep their local values.
        heard: whether a part or an average of another member is in it.
    """

    parts: list[tuple[Part, torch.Tensor]]
    dropped: tuple[Dropped, ...]
    kept_local: int
    heard: bool
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True)
class _Delivered:
    """What must be kept of a part until it is answered: its code and, only if the answer is a delta, its values."""

    compression: CompressionType
    values: torch.Tensor


@dataclass(slots=True)
class _Sender:
    """The reducer's side of one sender's stream."""

    replies: asyncio.Queue[AveragingData] = field(default_factory=asyncio.Queue)
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READ_AHEAD))
    opened: bool = False
    offered_at: float | None = None  # since when the transport has a reply that the sender has not taken
    progress_at: float = 0.0  # when it last delivered a part or took a reply
    came: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    delivered: dict[int, _Delivered] = field(default_factory=dict)  # its parts that await their average


_NOTHING = torch.empty(0)
_Waiting = Sequence[tuple[_Sender, _Delivered]]


class AllReduce:
    """One round of `group` at the member `endpoint`.

    Args:
        tensors: flat CPU tensors, one per tensor of the schema; read during the round, never written.
        part_timeout: seconds without progress after which a member is given up.

    Raises:
        RoundError: the weights sum to zero, or nobody can reduce.
    """

    def __init__(
        self,
        group: Group,
        endpoint: str,
        schema: Schema,
        tensors: Sequence[torch.Tensor],
        transport: Transport,
        *,
        part_timeout: float,
        non_finite: NonFinite = NonFinite.REFUSE,
    ) -> None:
        if group.total_weight <= 0:
            raise RoundError(f"the weights of all {len(group.members)} members sum to zero; give somebody a weight")
        self.group = group
        self._me = group.members[group.index(endpoint)]
        self._schema = schema
        self._tensors = tensors
        self._transport = transport
        self._part_timeout = part_timeout
        self._non_finite = non_finite
        by_member = partition(schema, shares(group.members))
        self._parts_of = dict(zip(group.endpoints, by_member, strict=True))
        self._own_parts = self._parts_of[endpoint]
        weights = {m.endpoint: m.weight for m in group.members if m.sends and m is not self._me}
        self._senders = {name: _Sender() for name in weights} if self._own_parts else {}
        self._reducer = ShardReducer([part.numel for part in self._own_parts], weights)
        self._results: dict[Part, torch.Tensor] = {}
        self._dropped: dict[str, str] = {}
        self._bytes_sent = self._bytes_received = 0
        self._over = self._heard = False

    # The round as a whole

    async def run(self, deadline: float) -> RoundResult:
        """Runs the round until every part is in or given up, at most until `deadline` in the running loop's time.

        Cancelling it tells the other members that this one leaves.
        """
        try:
            async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as tasks:
                self._answer_complete()
                for name, sender in self._senders.items():
                    tasks.create_task(self._expect(name, sender))
                for name in self._reducers():
                    tasks.create_task(self._send_to(name))
        except TimeoutError:
            for name, sender in self._senders.items():
                if not sender.done.is_set():
                    self._drop(name, "the round's deadline passed before it was done")
            for name in self._reducers():
                if any(part not in self._results for part in self._parts_of[name]):
                    self._note(name, "the round's deadline passed before its last average came")
        except BaseException as error:
            code = MessageCode.CANCELLED if isinstance(error, asyncio.CancelledError) else MessageCode.INTERNAL_ERROR
            self._close(code)
            await self._say_farewell(code)
            raise
        self._close(MessageCode.CANCELLED)
        return self._result()

    def _result(self) -> RoundResult:
        parts = [part for parts in self._parts_of.values() for part in parts] if self._me.sends else []
        return RoundResult(
            parts=[(part, self._results[part]) for part in parts if part in self._results],
            dropped=tuple(Dropped(name, reason) for name, reason in self._dropped.items()),
            kept_local=sum(part.numel for part in parts if part not in self._results),
            heard=self._heard,
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
        )

    def _reducers(self) -> list[str]:
        """The other members this one sends parts to."""
        if not self._me.sends:
            return []
        return [name for name, parts in self._parts_of.items() if parts and name != self._me.endpoint]

    def _close(self, code: MessageCode) -> None:
        self._over = True
        for sender in self._senders.values():
            if not sender.done.is_set():
                sender.replies.put_nowait(AveragingData(code=code))

    async def _say_farewell(self, code: MessageCode) -> None:
        """Tells every reducer that this member leaves, so that none waits for its parts."""
        message = AveragingData(code=code, group_id=self.group.group_id, endpoint=self._me.endpoint)

        async def tell(name: str) -> None:
            async def once() -> AsyncGenerator[AveragingData, None]:
                yield message

            try:
                async with aclosing(self._transport.aggregate_part(name, once())) as replies:
                    async for _ in replies:
                        break
            except AveragingError as error:
                logger.debug("could not tell %s that this member leaves: %s", name, error)

        try:
            async with asyncio.timeout(FAREWELL_SECONDS), asyncio.TaskGroup() as tasks:
                for name in self._reducers():
                    tasks.create_task(tell(name))
        except TimeoutError:
            logger.debug("not every member could be told that this one leaves")

    def _note(self, name: str, reason: str) -> None:
        if self._dropped.setdefault(name, reason) is reason:
            logger.info("group %s: lost %s: %s", self.group.group_id.hex()[:8], name, reason)

    # As a sender

    async def _send_to(self, name: str) -> None:
        """Sends `name` its parts and collects their averages."""
        parts = self._parts_of[name]
        received = 0
        try:
            async with asyncio.timeout(None) as last, asyncio.timeout(None) as limit:

                def progress() -> None:
                    # A reducer waits up to one part_timeout for another sender, so its replies may pause that long.
                    patience = asyncio.get_running_loop().time() + 2 * self._part_timeout
                    limit.reschedule(patience)
                    last.reschedule(patience + FAREWELL_SECONDS)  # should even the end of the call hang

                progress()
                outgoing = self._outgoing(parts, progress)
                async with aclosing(self._transport.aggregate_part(name, outgoing)) as replies:
                    # Read on after the last reply, to the end of the stream: closing it early would look like a loss.
                    async for reply in replies:
                        if received == len(parts):
                            raise ProtocolViolationError("sent more replies than it was sent parts")
                        self._results[parts[received]] = self._check_reply(parts[received], reply)
                        self._heard = True
                        received += 1
                        progress()
            reason = "ended its stream"
        except TimeoutError:
            reason = f"no reply for {2 * self._part_timeout:g} s"
        except TransportError as error:
            reason = error.reason
        except ProtocolViolationError as error:
            reason = str(error)
        if received < len(parts):
            self._note(name, f"{reason} after {received} of {len(parts)} averages")

    async def _outgoing(
        self, parts: Sequence[Part], progress: Callable[[], None]
    ) -> AsyncGenerator[AveragingData, None]:
        """The messages of one stream to a reducer; only the first says who sends what."""
        for number, part in enumerate(parts):
            progress()
            wire = encode(self._local(part), self._schema.tensors[part.tensor].compression)
            self._bytes_sent += len(wire.buffer)
            if number == 0:
                yield AveragingData(
                    MessageCode.PART_FOR_AVERAGING, self.group.group_id, self._me.endpoint, tensor_part=wire
                )
            else:
                yield AveragingData(tensor_part=wire)

    def _check_reply(self, part: Part, reply: AveragingData) -> torch.Tensor:
        if reply.code is MessageCode.CANCELLED:
            raise ProtocolViolationError("left the round, or gave this peer up (CANCELLED)")
        if reply.code is not MessageCode.AVERAGED_PART or reply.tensor_part is None:
            raise ProtocolViolationError(f"answered with {reply.code.name}")
        values = decode(reply.tensor_part)
        if tuple(values.shape) != (part.numel,):
            raise ProtocolViolationError(f"answered with shape {list(values.shape)} instead of [{part.numel}]")
        if self._non_finite is NonFinite.REFUSE and not all_finite(values):
            raise ProtocolViolationError("answered with NaN or infinity")
        self._bytes_received += len(reply.tensor_part.buffer)
        return values

    def _local(self, part: Part) -> torch.Tensor:
        return self._tensors[part.tensor][part.start : part.stop]

    # As a reducer

    async def aggregate_part(
        self, first: AveragingData, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        """Serves one sender's stream, of which `first` has been read already."""
        name = first.endpoint
        sender = self._senders.get(name)
        if first.code in (MessageCode.CANCELLED, MessageCode.INTERNAL_ERROR):
            if sender is not None:
                self._drop(name, f"left the round ({first.code.name})")
            return
        if sender is None or sender.opened:  # not a sender of this group, or its second stream
            yield AveragingData(code=MessageCode.PROTOCOL_VIOLATION)
            return
        if self._over or sender.done.is_set():  # too late
            yield AveragingData(code=MessageCode.CANCELLED)
            return
        sender.opened = True
        sender.progress_at = asyncio.get_running_loop().time()
        sender.came.set()
        reading = asyncio.create_task(self._read_parts(name, sender, first, messages))
        handed_over = 0
        lost = "connection lost"
        try:
            while handed_over < len(self._own_parts):
                reply = await sender.replies.get()
                sender.offered_at = asyncio.get_running_loop().time()
                if reply.tensor_part is None:
                    lost = f"was answered with {reply.code.name}"
                    yield reply
                    return
                handed_over += 1
                self._bytes_sent += len(reply.tensor_part.buffer)
                yield reply
                sender.offered_at = None
                sender.progress_at = asyncio.get_running_loop().time()
                sender.room.release()
        finally:
            # The verdict first: gRPC may cancel a call once more while it waits below.
            if handed_over == len(self._own_parts):
                sender.done.set()
            else:
                self._drop(name, lost)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _expect(self, name: str, sender: _Sender) -> None:
        """Waits until a sender has all its replies or was dropped; it must open its stream and take them in time."""
        try:
            async with asyncio.timeout(self._part_timeout):
                await sender.came.wait()
        except TimeoutError:
            self._drop(name, f"sent nothing for {self._part_timeout:g} s")
        while not sender.done.is_set():
            try:
                async with asyncio.timeout(self._part_timeout):
                    await sender.done.wait()
            except TimeoutError:
                now = asyncio.get_running_loop().time()
                if sender.offered_at is not None and now - sender.offered_at >= self._part_timeout:
                    self._drop(name, f"took no reply for {self._part_timeout:g} s")
                elif now - sender.progress_at >= 2 * self._part_timeout:
                    # It may have to wait for one other sender, but no longer: whatever hangs, the round does not.
                    self._drop(name, f"made no progress for {2 * self._part_timeout:g} s")

    async def _read_parts(
        self, name: str, sender: _Sender, first: AveragingData, messages: AsyncIterator[AveragingData]
    ) -> None:
        """Takes the parts of one sender as fast as it takes its replies."""
        message: AveragingData | None = first
        try:
            for number in range(len(self._own_parts)):
                await sender.room.acquire()
                if number:
                    async with asyncio.timeout(self._part_timeout):
                        message = await anext(messages, None)
                if message is None:
                    self._drop(name, f"ended its stream after {number} of {len(self._own_parts)} parts")
                    return
                self._take_part(name, sender, number, message)
        except TimeoutError:
            self._drop(name, f"sent nothing for {self._part_timeout:g} s")
        except ProtocolViolationError as error:
            self._drop(name, str(error), MessageCode.PROTOCOL_VIOLATION)
        except TransportError as error:
            self._drop(name, error.reason)
        except Exception:
            logger.exception("group %s: could not take a part of %s", self.group.group_id.hex()[:8], name)
            self._drop(name, "internal error at this peer", MessageCode.INTERNAL_ERROR)

    def _take_part(self, name: str, sender: _Sender, number: int, message: AveragingData) -> None:
        if message.code in (MessageCode.CANCELLED, MessageCode.INTERNAL_ERROR):
            self._drop(name, f"left the round ({message.code.name})")
            return
        if message.tensor_part is None or message.code not in (MessageCode.PART_FOR_AVERAGING, MessageCode.NO_CODE):
            raise ProtocolViolationError(f"sent {message.code.name} instead of part {number}")
        values = decode(message.tensor_part)
        if self._non_finite is NonFinite.REFUSE and not all_finite(values):
            raise ProtocolViolationError(f"sent NaN or infinity in part {number}")
        self._reducer.add(name, values)
        sender.progress_at = asyncio.get_running_loop().time()
        self._heard = True
        self._bytes_received += len(message.tensor_part.buffer)
        compression = CompressionType(message.tensor_part.compression)
        sender.delivered[number] = _Delivered(
            compression, values if self._schema.reply is ReplyForm.DELTA else _NOTHING
        )
        self._answer_complete()

    def _drop(self, name: str, reason: str, code: MessageCode = MessageCode.CANCELLED) -> None:
        """Goes on without a sender; parts that waited only for it become complete."""
        sender = self._senders[name]
        if sender.done.is_set():
            return
        self._note(name, reason)
        sender.came.set()
        sender.done.set()
        sender.delivered.clear()
        sender.replies.put_nowait(AveragingData(code=code))
        self._reducer.drop(name)
        self._answer_complete()

    def _answer_complete(self) -> None:
        """Averages every part that has become complete and hands the replies to the senders' streams."""
        for number in self._reducer.take_complete():
            part = self._own_parts[number]
            local = self._local(part) if self._me.sends else None
            average = self._reducer.finish(number, local, self._me.weight)
            waiting = [
                (sender, sender.delivered.pop(number))
                for sender in self._senders.values()
                if number in sender.delivered
            ]
            if average is None:
                for sender, _ in waiting:
                    sender.replies.put_nowait(AveragingData(code=MessageCode.INTERNAL_ERROR))
            elif self._schema.reply is ReplyForm.DELTA:
                self._answer_with_deltas(part, average, local, waiting)
            else:
                self._answer_with_average(part, average, local, waiting)

    def _answer_with_average(
        self, part: Part, average: torch.Tensor, local: torch.Tensor | None, waiting: _Waiting
    ) -> None:
        """Encodes once for all and adopts what the others will decode, so that all end with the same bytes."""
        spec = self._schema.tensors[part.tensor]
        replies = {}
        for compression in {spec.compression, *(delivered.compression for _, delivered in waiting)}:
            replies[compression] = encode(_as_sent(average, spec.torch_dtype, compression), compression)
        if local is not None:
            self._results[part] = decode(replies[spec.compression])
        for sender, delivered in waiting:
            reply = replies[delivered.compression]
            sender.replies.put_nowait(AveragingData(MessageCode.AVERAGED_PART, tensor_part=reply))

    def _answer_with_deltas(
        self, part: Part, average: torch.Tensor, local: torch.Tensor | None, waiting: _Waiting
    ) -> None:
        spec = self._schema.tensors[part.tensor]
        if local is not None:
            self._results[part] = average - local
        for sender, delivered in waiting:
            delta = _as_sent(average - delivered.values, spec.torch_dtype, delivered.compression)
            reply = encode(delta, delivered.compression)
            sender.replies.put_nowait(AveragingData(MessageCode.AVERAGED_PART, tensor_part=reply))


def _as_sent(values: torch.Tensor, dtype: torch.dtype, compression: CompressionType) -> torch.Tensor:
    """Uncompressed values travel in the tensor's own dtype; the codes take the sum's full precision."""
    return values.to(dtype) if compression is CompressionType.NONE else values


def changes(result: RoundResult) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The result as `SharedTensors.write` takes it: (tensor index, first element, values)."""
    for part, values in result.parts:
        yield part.tensor, part.start, values
