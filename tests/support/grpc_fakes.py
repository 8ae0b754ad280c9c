"""Services that answer as a test says, and two transports on loopback to call them with."""

import asyncio
import dataclasses
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import repeat
from typing import Any

from averaging.protocol.group import ReplyForm
from averaging.protocol.messages import (
    AveragingData,
    CompressionType,
    Digest,
    DownloadData,
    ExchangeReply,
    JoinRequest,
    MessageCode,
    MessageFromLeader,
    Record,
    Refusal,
    Resume,
    Rumour,
    WireTensor,
)
from averaging.receipts.progress import TrainingProgress
from averaging.receipts.receipt import Dropped, Outcome, Receipt, Totals
from averaging.receipts.receipt_log import Watched
from averaging.receipts.status import PeerStatus
from averaging.security.credentials import Credentials
from averaging.tensors.schema import Schema, TensorSpec
from averaging.timing.deadlines import Learned, Phase
from averaging.transport import RpcMethod
from averaging.transport.direct import DirectTransport
from averaging.transport.grpc import GrpcTransport, methods
from tests.support.ports import free_address

# All methods of a peer.
METHODS: list[RpcMethod[Any, Any]] = [each for each in vars(methods).values() if isinstance(each, RpcMethod)]

MAX_MESSAGE_BYTES = 4 << 20
MAX_PART_BYTES = 2 << 20

REQUEST = JoinRequest("127.0.0.1:4222", b"hash", 1.5e9, b"gather", client_mode=True)
ACCEPTED = MessageFromLeader(MessageCode.ACCEPTED)
RECORD = Record("run.0b", "a:1", b"value", 2**63, 1.75e9, True, b"owner", b"signature", 7)
DIGEST = Digest("run", "a:1", 2**64 - 1, ((2**64 - 2, 3), (4, 5)), complete=True)
SCHEMA = Schema(
    (TensorSpec("w", "float32", (3, 4), CompressionType.FLOAT16), TensorSpec("b", "bfloat16", ())),
    1 << 20,
    ReplyForm.DELTA,
)
RECEIPT = Receipt(
    round=3,
    outcome=Outcome.AVERAGED,
    reason="b:2 was lost",
    members=("a:1", "b:2"),
    dropped=(Dropped("b:2", "connection lost"),),
    seconds=2.5,
    allreduce_seconds=1.5,
    bytes_sent=2**40,
    bytes_received=12,
)
STATUS = PeerStatus(
    endpoint="a:1",
    run_id="run",
    mode="node",
    software="averaging 0.2.0",
    started=1.7e9,
    schema_hash=b"hash",
    group_key="run.0b01",
    looking=True,
    declared_expiration=1.8e9,
    leader="c:3",
    group_id=b"group",
    members=("a:1", "c:3"),
    last_round=RECEIPT,
    rounds=3,
    state_version=-1,
    known_peers=4,
    deadlines=(Learned("b:2", Phase.PART, 12, 5, 0.25, 1.0, "4 × its median of 0.25 s"),),
    training=TrainingProgress(
        "DiLoCo",
        "training",
        *(500, 5, 12.0, 2, 400, 12800.0, 2.5, None),
        sync_every="120s",
        quorum="0.5",
        grace=0.6,
        max_grace=10.0,
        weight_unit="samples",
        missed=3,
    ),
    waiting_for=("c:3",),
    totals=Totals({Outcome.AVERAGED: 3}, 7.5, {"looking": 1.5}, {"direct": 2**40}, {"grpc": 12}, 1.5),
)


def part(number: int, nbytes: int = 4) -> AveragingData:
    """A message whose place in the stream can be told."""
    buffer = number.to_bytes(4, "little") * (nbytes // 4)
    return AveragingData(MessageCode.PART_FOR_AVERAGING, b"group", "a:1", WireTensor(buffer, (nbytes // 4,), "float32"))


def number_of(data: AveragingData) -> int:
    """The number that `part` was given."""
    if data.tensor_part is None:
        raise ValueError("not a part")
    return int.from_bytes(data.tensor_part.buffer[:4], "little")


async def parts(count: int, nbytes: int = 4) -> AsyncGenerator[AveragingData, None]:
    """The first `count` parts."""
    for number in range(count):
        yield part(number, nbytes)


async def floods(_: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
    """An `aggregate` that answers nothing that was asked, as fast as it is taken."""
    while True:
        yield part(0, 1 << 20)


async def endless(pause: asyncio.Event | None = None) -> AsyncGenerator[AveragingData, None]:
    """Parts without end; after the first it waits for `pause`, if given."""
    number = 0
    while True:
        yield part(number)
        number += 1
        if pause is not None:
            await pause.wait()


async def read_all(replies: AsyncGenerator[AveragingData, None]) -> None:
    """Waits for the end of a call."""
    async with aclosing(replies):
        async for _ in replies:
            pass


@dataclasses.dataclass
class FakePeer:
    """An averaging service. Every method can be replaced; `closed` is set when a generator that watches itself ends."""

    join: Callable[[JoinRequest], AsyncGenerator[MessageFromLeader, None]] | None = None
    aggregate: Callable[[AsyncIterator[AveragingData]], AsyncGenerator[AveragingData, None]] | None = None
    status: PeerStatus = STATUS
    schema: Schema = SCHEMA
    started: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    closed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    requests: list[JoinRequest] = dataclasses.field(default_factory=list)

    async def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        self.requests.append(request)
        self.started.set()
        try:
            if self.join is None:
                yield ACCEPTED
                await asyncio.Event().wait()
            else:
                async with aclosing(self.join(request)) as replies:
                    async for reply in replies:
                        yield reply
        finally:
            self.closed.set()

    async def aggregate_part(self, messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        self.started.set()
        try:
            if self.aggregate is None:
                async for message in messages:
                    yield message
            else:
                async with aclosing(self.aggregate(messages)) as replies:
                    async for reply in replies:
                        yield reply
        finally:
            self.closed.set()

    async def download_state(self, resume: Resume | None, caller: str) -> AsyncGenerator[DownloadData, None]:
        return
        yield

    def get_status(self, receipts: int = 0, after_round: int = 0, peers: bool = False) -> PeerStatus:
        asked = (replace(RECEIPT, round=after_round + 1),) * receipts
        return replace(self.status, receipts=asked, peers=("a:1", "c:3") if peers else ())

    def get_schema(self) -> Schema:
        return self.schema

    async def watch_rounds(self, last: int) -> AsyncGenerator[Watched, None]:
        for skipped in range(last):
            yield Watched(RECEIPT, skipped)


class FakeGossip:
    """A gossip service that answers with what it was given."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, tuple[Rumour, ...]]] = []
        self.digests: list[Digest] = []

    async def exchange(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        self.digests.append(digest)
        yield ExchangeReply(records=(RECORD,))
        yield ExchangeReply(wanted=(1, 2**64 - 1), differs=True)

    async def push(self, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        self.pushed.append((run_id, rumours))
        return (Refusal("run.0b", "a:1", "somebody else's"),)

    async def subscribe(self, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        self.digests.append(digest)
        yield (RECORD, RECORD)
        yield ()

    def list_records(self, key: str) -> tuple[Record, ...]:
        return (dataclasses.replace(RECORD, key=key),)


LANE = "AVERAGING_TEST_LANE"
"""Environment variable, for child processes too: `direct` if parts travel beside gRPC. See the fixture `lane`."""

SERVING: dict[str, GrpcTransport] = {}
"""The transports of `serving`, by endpoint."""


class Prepared(DirectTransport):
    """Sends no part before its direct connection is open or refused."""

    async def opened(self, endpoint: str) -> None:
        """Opens the direct connection."""
        self.prepare_lane(endpoint)
        lane = self._lanes._lanes.get(endpoint)
        if lane is not None and lane.opening is not None:
            await asyncio.wait({lane.opening})

    async def aggregate_part(
        self, endpoint: str, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        await self.opened(endpoint)
        async with aclosing(super().aggregate_part(endpoint, messages)) as replies:
            async for reply in replies:
                yield reply


def make_transport(listen: str | None, limit: int, credentials: Credentials | None) -> GrpcTransport:
    """A transport with the lane of this test."""
    if os.environ.get(LANE) == "direct":
        return Prepared(listen, max_message_bytes=limit, max_part_bytes=MAX_PART_BYTES, credentials=credentials)
    return GrpcTransport(listen, max_message_bytes=limit, credentials=credentials)


@asynccontextmanager
async def serving(
    service: FakePeer,
    gossip: FakeGossip | None = None,
    listen: str | None = None,
    limit: int = MAX_MESSAGE_BYTES,
    credentials: Credentials | None = None,
) -> AsyncIterator[tuple[GrpcTransport, str]]:
    """A transport that serves, and its endpoint, at which another may serve later."""
    transport = make_transport(listen or free_address(), limit, credentials)
    endpoint = await transport.bind()
    SERVING[endpoint] = transport
    try:
        await transport.serve(service, gossip)
        yield transport, endpoint
    finally:
        del SERVING[endpoint]
        await transport.close()


@asynccontextmanager
async def client(
    limit: int = MAX_MESSAGE_BYTES, credentials: Credentials | None = None
) -> AsyncIterator[GrpcTransport]:
    """A transport that only calls."""
    transport = make_transport(None, limit, credentials)
    try:
        yield transport
    finally:
        await transport.close()


async def until(true: Callable[[], object]) -> None:
    """Returns when something in this process is so that nobody tells of."""
    for pause in repeat(0.01):
        if true():
            return
        await asyncio.sleep(pause)
