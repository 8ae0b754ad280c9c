"""All-reduce rounds on the memory network, without matchmaking: the group is given."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import torch

from averaging.allreduce import AllReduce, Prepared, ReplyResidual, RoundResult, changes
from averaging.protocol.group import Group, Member, ReplyForm
from averaging.protocol.messages import (
    AveragingData,
    CompressionType,
    DownloadData,
    JoinRequest,
    MessageCode,
    MessageFromLeader,
    Resume,
)
from averaging.receipts.receipt_log import Watched
from averaging.receipts.status import PeerStatus
from averaging.tensors.schema import Schema, describe
from averaging.tensors.shared_tensors import SharedTensors, Write
from averaging.testing.transport import MemoryNetwork, MemoryTransport
from averaging.timing.deadlines import Deadlines

Disturbance = Callable[[dict[str, asyncio.Task[RoundResult]]], Coroutine[Any, Any, None]]
"""What happens during a round, whose tasks are given by member."""

Change = Callable[[AsyncIterator[AveragingData]], AsyncGenerator[AveragingData, None]]
"""Changes a stream of messages."""

STALL_TIMEOUT = 1.0
ROUND_SECONDS = 30.0


def nodes(count: int) -> list[Member]:
    return [Member(f"peer:{port + 1}") for port in range(count)]


def assert_close(tensors: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for tensor, wanted in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor.double(), wanted, rtol=tolerance, atol=tolerance)


class OneRound:
    """A peer that serves only one round."""

    def __init__(self, round_: AllReduce, schema: Schema) -> None:
        self.round, self.schema = round_, schema

    async def aggregate_part(self, messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        first = await anext(messages, None)
        if first is None:
            return
        async with aclosing(self.round.aggregate_part(first, messages)) as replies:
            async for reply in replies:
                yield reply

    def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        raise NotImplementedError

    def download_state(self, resume: Resume | None, caller: str) -> AsyncGenerator[DownloadData, None]:
        raise NotImplementedError

    def get_status(self, receipts: int = 0, after_round: int = 0, peers: bool = False) -> PeerStatus:
        raise NotImplementedError

    def get_schema(self) -> Schema:
        return self.schema

    def watch_rounds(self, last: int) -> AsyncGenerator[Watched, None]:
        raise NotImplementedError


class SilentLeader(OneRound):
    """A peer that answers no request to join, or accepts it and then sends nothing."""

    def __init__(self, accepts: bool) -> None:
        self.accepts = accepts

    async def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        if self.accepts:
            yield MessageFromLeader(MessageCode.ACCEPTED)
        await asyncio.get_running_loop().create_future()


class Simulation:
    """One group with its tensors, rounds and results.

    Attributes:
        tensors: by member, changed by `run` as a peer would change them.
        before: copies of them from before the round.
    """

    def __init__(
        self,
        seed: int,
        members: Sequence[Member],
        shapes: Sequence[tuple[int, ...]] = ((7, 3), (), (0,), (40,)),
        *,
        dtype: torch.dtype = torch.float32,
        compression: CompressionType = CompressionType.NONE,
        reply: ReplyForm = ReplyForm.AVERAGE,
        part_size_bytes: int = 64,
        loss: float = 0.0,
        latency: tuple[float, float] = (0.001, 0.02),
        deadlines: dict[str, Deadlines] | None = None,
        joins_parts: bool = False,
        large_parts: bool = False,
        **describing: Any,
    ) -> None:
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(self.rng, latency=latency, loss=loss)
        group_id = self.rng.randbytes(20)
        self.group = Group(group_id, tuple(members), "", joins_parts, large_parts)
        generator = torch.Generator().manual_seed(seed)
        self.before = {
            member.endpoint: [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
            for member in members
        }
        self.tensors = {name: [tensor.clone() for tensor in tensors] for name, tensors in self.before.items()}
        names = [str(number) for number in range(len(shapes))]
        self.schema = self.describe(
            names, compression=compression, part_size_bytes=part_size_bytes, reply=reply, **describing
        )
        self.preparing: dict[str, Callable[[], Awaitable[object]]] = {}  # what a member does before it sends
        self.transports: dict[str, MemoryTransport] = {}
        self.rounds: dict[str, AllReduce] = {}
        self.deadlines = deadlines or {m.endpoint: Deadlines(STALL_TIMEOUT, STALL_TIMEOUT) for m in members}
        for member in members:
            client = not member.reduces
            transport = self.network.transport(None if client else member.endpoint)
            transport.endpoint = member.endpoint
            self.transports[member.endpoint] = transport
            self.rounds[member.endpoint] = AllReduce(
                self.group,
                member.endpoint,
                self.schema,
                transport,
                deadlines=self.deadlines[member.endpoint],
                residual=self.residual_of(member.endpoint),
            )

    def describe(self, names: Sequence[str], **options: Any) -> Schema:
        return describe(names, next(iter(self.tensors.values())), **options)

    def residual_of(self, name: str) -> ReplyResidual | None:
        return None

    def contributed(self, name: str) -> Sequence[Prepared]:
        return SharedTensors(self.tensors[name]).flat()

    def adopt(self, name: str, result: RoundResult) -> None:
        """Writes a member's result to its tensors."""
        how = Write.ADD if self.schema.reply is ReplyForm.DELTA else Write.REPLACE
        SharedTensors(self.tensors[name]).write(changes(result), how)

    async def one(self, name: str) -> RoundResult:
        """A member's round."""

        async def prepare() -> Sequence[Prepared]:
            if name in self.preparing:
                await self.preparing[name]()
            return self.contributed(name)

        return await self.rounds[name].run(prepare, ROUND_SECONDS)

    async def run(self, disturb: Callable[[dict[str, asyncio.Task[RoundResult]]], object] | None = None) -> None:
        """Runs the rounds of all members and sets `results`, `failures` and `seconds`."""
        for name, transport in self.transports.items():
            await transport.serve(OneRound(self.rounds[name], self.schema), None)
        began = asyncio.get_running_loop().time()
        tasks = {name: asyncio.create_task(self.one(name)) for name in self.rounds}
        disturbing = asyncio.ensure_future(disturb(tasks)) if disturb else None  # type: ignore[call-overload]
        ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
        self.seconds = asyncio.get_running_loop().time() - began
        if disturbing is not None:
            await disturbing
        self.results: dict[str, RoundResult] = {}
        self.failures: dict[str, BaseException] = {}
        for name, end in zip(tasks, ended, strict=True):
            if isinstance(end, RoundResult):
                self.results[name] = end
                self.adopt(name, end)
            else:
                self.failures[name] = end
        assert self.network.errors == []

    def mean(self, *names: str) -> list[torch.Tensor]:
        """The weighted mean, in float64, of the initial tensors of the named members, or of all that send."""
        members = [m for m in self.group.members if (m.endpoint in names if names else m.sends)]
        total = sum(member.weight for member in members)
        return [
            sum((m.weight * self.before[m.endpoint][i].double() for m in members), torch.zeros(shape).double()) / total
            for i, shape in enumerate(tensor.shape for tensor in next(iter(self.before.values())))
        ]

    def assert_between_the_means(self, name: str, survivors: list[str]) -> None:
        """Each element is the mean of all, that of the survivors, or (if its reducer was dropped) the local value."""
        candidates = [self.mean(), self.mean(*survivors), [t.double() for t in self.before[name]]]
        for index, tensor in enumerate(self.tensors[name]):
            off = torch.stack([(tensor.double() - candidate[index]).abs() for candidate in candidates])
            assert off.amin(dim=0).max() < 1e-5 if tensor.numel() else True

    async def cancel(self, task: asyncio.Task[RoundResult]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def kills(self, name: str, after: float) -> Disturbance:
        """For `run`: kills a member after so many seconds, unless it is done."""

        async def kill(tasks: dict[str, asyncio.Task[RoundResult]]) -> None:
            await asyncio.sleep(after)
            if not tasks[name].done():
                self.network.kill(name)
                tasks[name].cancel()

        return kill

    def change_sent(self, name: str, change: Change) -> None:
        """Changes what a member sends as a sender."""
        transport = self.transports[name]
        call = transport.aggregate_part
        transport.aggregate_part = lambda endpoint, messages: call(  # type: ignore[method-assign]
            endpoint, change(messages)
        )

    def change_replies(self, name: str, change: Change) -> None:
        """Changes what a member answers as a reducer."""
        serve = self.rounds[name].aggregate_part
        self.rounds[name].aggregate_part = lambda *given: change(serve(*given))  # type: ignore[method-assign]

    def slow_down(self, name: str, seconds: float) -> None:
        """Delays each message of a sender."""

        async def slowly(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
            async for message in messages:
                await asyncio.sleep(seconds)
                yield message

        self.change_sent(name, slowly)
