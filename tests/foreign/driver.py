"""The foreign peers of `tests/foreign` from the side of the tests, and peers of ours that they meet.

The foreign ones run in a process of their own, since both sides register the same protobuf symbols in one pool.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from grpc_tools import protoc

from averaging import Peer, Receipt
from averaging.discovery.base import Entry
from averaging.discovery.gossip import GossipDiscovery
from averaging.peer import PeerContext
from averaging.state.manifest import ExtraState
from averaging.timing import deadlines as learned_deadlines
from averaging.transport.base import Transport
from tests.foreign import split
from tests.support.tuned import tuned

ROOT = Path(__file__).parents[2]
FOREIGN = ROOT / "tests" / "foreign"

DEADLINE = 30.0
"""Seconds within which the other process must start, or answer: generous, since machines that run tests are shared."""

OUR_TIME, EARLIER = 40.0, 20.0
"""Seconds for which our peer waits in one declaration unless told otherwise, and a time that is over before its own.

No test waits them out, and all that it does meanwhile may take its time.
"""

RUN = "run"

Message = dict[str, Any]


def compile_seed(into: Path) -> None:
    """Compiles the foreign protos; the parser alone runs here, no symbol is registered."""
    protos = [str(FOREIGN / "averaging.proto"), str(FOREIGN / "runtime.proto")]
    include = [f"-I{FOREIGN}", f"-I{files('grpc_tools') / '_proto'}"]
    outputs = [f"--python_out={into}", f"--grpc_python_out={into}", f"--descriptor_set_out={into / 'seed.bin'}"]
    assert protoc.main(["protoc", *include, *outputs, *protos]) == 0


class ForeignProcess:
    """The process of all foreign peers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, compiled: Path) -> ForeignProcess:
        """Starts it, with the protos that `compile_seed` compiled."""
        command, pipe = [sys.executable, "-m", "tests.foreign.control"], asyncio.subprocess.PIPE
        env = os.environ | {"PYTHONPATH": str(compiled)}
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=env, cwd=ROOT))

    async def stop(self) -> None:
        """Kills it."""
        self._process.kill()
        async with asyncio.timeout(DEADLINE):
            await self._process.wait()
            await self._reading

    async def call(self, peer: str, method: str, arguments: dict[str, Any]) -> Any:
        """What that method of that foreign peer returns; an AssertionError if it raises or takes too long."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(msgpack.packb([number, peer, method, arguments]))
        try:
            async with asyncio.timeout(DEADLINE):
                result, failure = await answer
        except TimeoutError:
            raise AssertionError(f"the foreign peer did not finish {method}({arguments})") from None
        finally:
            del self._answers[number]
        assert failure is None, f"{method}: {failure}"
        return result

    async def _read(self) -> None:
        assert self._process.stdout is not None
        frames = msgpack.Unpacker(max_buffer_size=0)
        while data := await self._process.stdout.read(1 << 16):
            frames.feed(data)
            for number, result, failure in frames:
                if (answer := self._answers.get(number)) is not None and not answer.done():
                    answer.set_result((result, failure))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result((None, "its process ended"))


class ForeignPeer:
    """One foreign peer. Every method of `Peer` in tests/foreign/peer.py can be called; it runs over there."""

    def __init__(self, process: ForeignProcess, number: int) -> None:
        self._process = process
        self._number = str(number)
        self.endpoint = ""

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda **arguments: self._process.call(self._number, method, arguments)


class Foreign:
    """Makes foreign peers."""

    def __init__(self, process: ForeignProcess) -> None:
        self._process = process
        self._numbers = itertools.count(1)

    async def peer(self, host: str = "127.0.0.1") -> ForeignPeer:
        """One that listens; `host` stands in its endpoint."""
        peer = ForeignPeer(self._process, next(self._numbers))
        peer.endpoint = await peer.serve(host=host)
        return peer

    async def client(self) -> ForeignPeer:
        """One in client mode."""
        peer = ForeignPeer(self._process, next(self._numbers))
        peer.endpoint = await peer.name()
        return peer

    async def call(self, method: str, **arguments: Any) -> Any:
        """A method of the process."""
        return await self._process.call("", method, arguments)


@dataclass(frozen=True)
class Ours:
    """A peer of ours, and its discovery, through which a test declares what foreign peers would."""

    peer: Peer
    discovery: GossipDiscovery
    endpoint: str

    @property
    def schema(self) -> Message:
        """What a foreign peer must know to average with it."""
        schema = self.peer.schema
        return {
            "shapes": [list(spec.shape) for spec in schema.tensors],
            "dtype": schema.tensors[0].dtype,
            "compression": schema.tensors[0].compression.name,
            "part_size_bytes": schema.part_size_bytes,
            "reply": schema.reply.value,
        }

    @property
    def key(self) -> str:
        return self.peer.status.group_key

    async def declare(self, endpoint: str, seconds: float = EARLIER, *, looking: object = True) -> None:
        """Declares that `endpoint` waits for a group for so long; our peer asks whose time ends before its own."""
        await self.declare_until(endpoint, time.time() + seconds, looking=looking)

    async def declare_until(self, endpoint: str, expiration: float, *, looking: object = True) -> None:
        """The same, until a moment in seconds since the epoch."""
        await self.discovery.store(self.key, endpoint, msgpack.packb(looking), expiration)

    async def name(self, endpoint: str) -> None:
        """Has discovery know `endpoint` without declaring that it looks for a group."""
        await self.discovery.store(f"{RUN}.others", endpoint, b"", time.time() + 60)

    async def declare_donor(self, endpoint: str, priority: float) -> None:
        await self.discovery.store(f"{RUN}.all_averagers", endpoint, msgpack.packb(priority), time.time() + 60)

    async def declares(self, key: str, after: float = 0.0) -> Entry:
        """Its declaration under `key` that expires later than `after`, as soon as there is one."""
        async with asyncio.timeout(DEADLINE), aclosing(self.discovery.watch(key)) as changes:
            async for entries in changes:
                if self.endpoint in entries and entries[self.endpoint].expiration > after:
                    return entries[self.endpoint]
        raise AssertionError("its discovery has ended")

    @asynccontextmanager
    async def averaging(self, **arguments: Any) -> AsyncGenerator[asyncio.Task[Receipt], None]:
        """Its `average` as a task, from the moment at which it has declared itself."""
        before = self.discovery.get(self.key).get(self.endpoint)
        task = asyncio.create_task(self.peer.average(**arguments))
        try:
            await self.declares(self.key, after=before.expiration if before else 0.0)
            yield task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def asks_to_join(
        self, follower: ForeignPeer, gather: bytes = b"", leader: ForeignPeer | None = None, **fields: Any
    ) -> str:
        """The verdict on a request of `follower` that is in order but for `fields`; it asks this peer or `leader`."""
        request = {"schema_hash": self.peer.schema.hash, "expiration": time.time() + 60, "gather": gather} | fields
        verdict: Message = await follower.ask(leader=(leader or self).endpoint, **request)
        assert set(verdict) == {"code"}, verdict
        return str(verdict["code"])

    async def accepts_at_last(self, follower: ForeignPeer, *, refusal: str) -> None:
        """Has `follower` ask until it is accepted; before that, the only verdict is `refusal`."""
        async with asyncio.timeout(DEADLINE):
            request = {"schema_hash": self.peer.schema.hash, "expiration": time.time() + 60}
            while (code := (await follower.ask(leader=self.endpoint, **request))["code"]) != "ACCEPTED":
                assert code == refusal

    async def begins(self, *followers: ForeignPeer) -> Message:
        """The group that this peer begins with them, as it tells each of them."""
        group, *others = await self.fates(*followers)
        assert all(other == group for other in others)
        assert group.pop("code") == "BEGIN_ALLREDUCE"
        return group

    async def fates(self, *followers: ForeignPeer) -> list[Message]:
        return list(await asyncio.gather(*(follower.next_message(leader=self.endpoint) for follower in followers)))


@asynccontextmanager
async def our_peer(
    tensors: Sequence[torch.Tensor] | Mapping[str, torch.Tensor] | None = None,
    *,
    extra_state: Callable[[], ExtraState] | None = None,
    **options: Any,
) -> AsyncGenerator[Ours, None]:
    """A peer of ours on loopback with gossip; groups of 2 unless told otherwise. It gives others time for a verdict."""
    made: list[GossipDiscovery] = []

    def discovery(endpoint: str, transport: Transport) -> GossipDiscovery:
        made.append(GossipDiscovery(RUN, endpoint, transport, join=options.get("join", ())))
        return made[0]

    defaults: dict[str, Any] = {"group_size": 2, "group_wait": OUR_TIME, "round_timeout": 2 * OUR_TIME}
    waits: dict[str, Any] = {"stall_timeout": DEADLINE, "min_stall_timeout": DEADLINE}
    chosen = tuned({"run_id": RUN, **defaults, **waits, **options})
    tensors = [torch.ones(8)] if tensors is None else tensors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learned_deadlines, "VERDICT_SECONDS", DEADLINE)
        async with Peer(tensors, extra_state=extra_state, context=PeerContext(discovery=discovery), **chosen) as peer:
            yield Ours(peer, made[0], peer.endpoint)


gather = split.pack_gather
"""What a member tells about itself, packed without help of the library."""


def whole_numbers(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of multiples of 60 up to ±60,000: any average of few of them with small whole weights is exact."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-1000, 1001, shape, generator=generator).to(torch.float32) * 60 for shape in shapes]


def as_bytes(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]


def from_bytes(tensors: list[bytes], like: list[torch.Tensor]) -> list[torch.Tensor]:
    """The reverse."""
    pairs = zip(tensors, like, strict=True)
    return [torch.frombuffer(bytearray(b), dtype=t.dtype).reshape(t.shape) if b else t for b, t in pairs]


def begun(us: Ours, *members: ForeignPeer) -> Message:
    """A group of our peer and these, as a leader announces it."""
    endpoints = [us.endpoint, *(member.endpoint for member in members)]
    return {"group_id": bytes(range(20)), "ordered_group_endpoints": endpoints, "gathered": [gather()] * len(endpoints)}


async def ends_together(us: Ours, receipt: asyncio.Task[Receipt], group: Message, *members: ForeignPeer) -> None:
    """The round of a group that was begun is averaged by all of its members, who average one tensor of ones."""
    tensors = as_bytes([torch.ones(8)])
    await asyncio.gather(*(member.average(group=group, schema=us.schema, tensors=tensors) for member in members))
    told = await receipt
    assert told.averaged, told.reason
    assert told.dropped == ()
    assert list(told.members) == group["ordered_group_endpoints"]


async def leads(us: Ours, receipt: asyncio.Task[Receipt], leader: ForeignPeer, *, accepts: bool = True) -> None:
    """A leader that was asked accepts our peer, unless it has, begins a group of both, and that averages."""
    if accepts:
        await leader.answer(follower=us.endpoint, code="ACCEPTED")
    group = begun(us, leader)
    await leader.begin(group=group)
    await ends_together(us, receipt, group, leader)


async def is_led(us: Ours, receipt: asyncio.Task[Receipt], *followers: ForeignPeer) -> None:
    """Our peer begins a group with these, which it has accepted, and that averages."""
    await ends_together(us, receipt, await us.begins(*followers), *followers)
