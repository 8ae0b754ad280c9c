"""The sender's side of a round: this member's parts to their reducer, and their averages back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import torch

from averaging.allreduce.drop_codes import ANSWERS, code_of
from averaging.allreduce.hold_ups import HoldUps
from averaging.allreduce.partition import Part, packed_sizes
from averaging.allreduce.reducer_liveness import ReducerLiveness
from averaging.allreduce.round_account import RoundAccount
from averaging.allreduce.send_window import PATIENCE_SECONDS, SendWindow, reach
from averaging.allreduce.wait_monitor import WaitMonitor
from averaging.common.shared_tensors import finite_as
from averaging.compression import decode_as, encode
from averaging.config import NonFinite
from averaging.deadlines.learned_deadlines import Phase
from averaging.errors import AveragingError, NonFiniteError, ProtocolViolationError, TransportError
from averaging.observe.receipts import DropCode, Dropped
from averaging.protocol.group import Group
from averaging.protocol.messages import AveragingData, MessageCode
from averaging.protocol.schema import ReplyForm, Schema
from averaging.transport.base import Transport

logger = logging.getLogger("averaging.allreduce")


class SenderSide:
    """One member's streams to the reducers of its group.

    Args:
        tally: where averages, bytes and losses are noted.
        watch: keeps the deadlines.
        ahead: see `pace.bytes_ahead`.
    """

    def __init__(
        self,
        endpoint: str,
        group: Group,
        schema: Schema,
        transport: Transport,
        tally: RoundAccount,
        *,
        watch: WaitMonitor,
        ahead: int,
        non_finite: NonFinite,
    ) -> None:
        self._endpoint, self._group = endpoint, group
        self._schema = schema
        self._transport = transport
        self._tally = tally
        self._watch = watch
        self._ahead = ahead
        self._non_finite = non_finite
        self._awaited: dict[str, ReducerLiveness] = {}  # the reducers of which averages are missing
        self._begun = 0  # of how many they were in the beginning

    @property
    def unfinished(self) -> list[str]:
        """The reducers of which averages are missing."""
        return list(self._awaited)

    def give_up_who_holds_up(self, hold_ups: HoldUps, now: float) -> None:
        """Gives up reducers for which alone this member has waited for too long.

        Args:
            hold_ups: of this side.
            now: in seconds since the round began.
        """
        some_are_done = len(self._awaited) < self._begun
        alone = some_are_done or all(map(self._watch.on_probation, self._awaited))
        holding = self.unfinished if alone else []
        for name, deed in hold_ups.look(holding, now).items():
            self._watch.held_up(name)
            self._awaited[name].give_up(deed)

    async def send_to(self, name: str, parts: Sequence[Part], tensors: Sequence[torch.Tensor]) -> Dropped | None:
        """Sends `name` its parts and collects their averages, until all are in or it is lost.

        Args:
            name: a reducer.
            parts: its shard, in order.
            tensors: what they are parts of: flat, on the CPU, one per tensor of the schema; read, never written.

        Returns:
            Why it was lost, if it was.
        """
        received = 0
        pace = SendWindow(reach(packed_sizes(self._schema, parts), self._ahead), PATIENCE_SECONDS)
        answer = MessageCode.AVERAGED_PART

        def done() -> str:
            return f"{received} of {len(parts)} averages"

        try:
            async with (
                asyncio.timeout(None) as limit,
                ReducerLiveness(name, self._transport, self._watch, limit) as silence,
            ):
                self._awaited[name] = silence
                self._begun += 1
                outgoing = self._messages(name, parts, tensors, pace, silence.progress)
                async with aclosing(self._transport.aggregate_part(name, outgoing)) as replies:
                    # Read on after the last reply, to the end of the stream: closing it early would look like a loss.
                    async for reply in replies:
                        if received == len(parts):
                            raise ProtocolViolationError("sent more replies than it was sent parts")
                        answer = reply.code
                        self._tally.compare(name, reply.metadata)
                        self._read(name, parts[received], reply, tensors)
                        received += 1
                        pace.answered()
                        silence.progress()
                        if received == len(parts):
                            silence.answered_all()
            lost = Dropped(name, f"ended its stream after {done()}", DropCode.CONNECTION_LOST)
        except TimeoutError:
            if silence.holds_up:
                lost = Dropped(name, f"{silence.holds_up}, after {done()}", DropCode.ROUND_DEADLINE)
            else:
                lost = Dropped.overdue(name, silence.deed, silence.seconds, *silence.deadline, after=done())
        except TransportError as error:
            lost = Dropped(name, f"{error.reason} after {done()}", code_of(error))
        except ProtocolViolationError as error:
            lost = Dropped(name, f"{error} after {done()}", ANSWERS.get(answer, code_of(error)))
        self._awaited.pop(name, None)  # but not if the round's deadline has passed, which asks who is missing
        if received == len(parts):
            self._watch.done(name, Phase.REPLY)
            return None
        self._tally.lose(lost)
        return lost

    async def _messages(
        self,
        name: str,
        parts: Sequence[Part],
        tensors: Sequence[torch.Tensor],
        pace: SendWindow,
        progress: Callable[[], None],
    ) -> AsyncGenerator[AveragingData, None]:
        """One stream to a reducer; only its first message says who sends what."""
        for number, part in enumerate(parts):
            await pace.wait(number)
            progress()
            values = tensors[part.tensor][part.start : part.stop]
            wire = encode(values, self._schema.tensors[part.tensor].compression)
            self._tally.sent(name, len(wire.buffer))
            if number == 0:
                code, group = MessageCode.PART_FOR_AVERAGING, self._group
                yield AveragingData(code, group.group_id, self._endpoint, wire, self._tally.metadata)
            else:
                yield AveragingData(tensor_part=wire)

    def _read(self, name: str, part: Part, reply: AveragingData, tensors: Sequence[torch.Tensor]) -> None:
        if reply.code is MessageCode.CANCELLED:
            raise ProtocolViolationError("left the round, or gave this peer up (CANCELLED)")
        if reply.code is not MessageCode.AVERAGED_PART or reply.tensor_part is None:
            raise ProtocolViolationError(f"answered with {reply.code.name}")
        dtype = self._schema.tensors[part.tensor].torch_dtype
        values = decode_as(reply.tensor_part, dtype)
        if tuple(values.shape) != (part.numel,):
            raise ProtocolViolationError(f"answered with shape {list(values.shape)} instead of [{part.numel}]")
        if self._non_finite is NonFinite.REFUSE:
            is_delta = self._schema.reply is ReplyForm.DELTA
            kept = tensors[part.tensor][part.start : part.stop] + values.to(dtype) if is_delta else values
            if not finite_as(kept, dtype):
                raise NonFiniteError("answered with NaN or infinity")
        self._tally.received_average(name, part, values, reply.tensor_part.buffer)

    async def say_farewell(self, names: Sequence[str], code: MessageCode, seconds: float) -> None:
        """Tells reducers that this member leaves, so that none waits for its parts; tries for so many seconds."""
        group_id, metadata = self._group.group_id, self._tally.metadata if self._tally.heard_another else b""
        message = AveragingData(code=code, group_id=group_id, endpoint=self._endpoint, metadata=metadata)

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
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                for name in names:
                    tasks.create_task(tell(name))
        except TimeoutError:
            logger.debug("not every member could be told that this one leaves")
