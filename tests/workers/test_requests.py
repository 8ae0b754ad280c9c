"""A request runs once, however often it is sent; the order of a flush; data of messages."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, strategies as st

from averaging.errors import ProtocolViolationError
from averaging.rl.workers import Compute, Handle, HookName, ModelWorker, Payload, SampleBatch
from averaging.rl.workers.model_worker import flush_order
from averaging.rl.workers.requests import (
    ATTACH,
    REQUEST,
    Ids,
    Realloc,
    Step,
    convert,
    decode_payload,
    encode_payload,
    pack,
    unpack,
)
from averaging.testing import virtual_time
from averaging.wire.workers_pb2 import Attach, Reply, Request
from tests.workers.backends import Actor, Log, dataset
from tests.workers.memory_workers import MemoryWorkers

SHARD = "actor@dp0-tp0-pp0"


class Slow(Actor):
    async def generate(self, batch: SampleBatch, step: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(10.0)
        return Actor.generate(self, batch, step)


class Master:
    """Calls one worker directly."""

    def __init__(self) -> None:
        self.network, self.log = MemoryWorkers(), Log()
        self.worker = ModelWorker(
            "a0", {"actor": Slow("a0", self.log)}, dataset=dataset(), connect=self.network.connect
        )
        self.network.serve("a0:1", self.worker)
        self.channel = self.network.connect("a0:1")

    @asynccontextmanager
    async def attached(self, *outstanding: str) -> AsyncGenerator[str, None]:
        placement = pack({"shards": [[{"model": "actor"}, {}]], "dp_rank": 0, "dp_size": 1})
        request = Attach(master="m", worker="a0", placement=placement, outstanding=outstanding)
        async with aclosing(self.channel.stream(ATTACH, request)) as messages:
            yield (await anext(messages)).session

    def send(self, session: str, handle: str, name: str, data: object = None, *received: str) -> asyncio.Task[Reply]:
        handler = "a0" if handle in (Handle.FLUSH, Handle.FETCH, Handle.SPEC) else SHARD
        payload = encode_payload(Payload(handler, handle, name, data=data))
        request = Request(session=session, payload=payload, received=received)
        return asyncio.create_task(self.channel.call(REQUEST, request, 60.0))

    def kinds(self) -> list[str]:
        return self.log.kinds("a0")


def simulated(scenario: Callable[[Master], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Makes a test of what a master and one worker say to each other."""

    async def main() -> None:
        master = Master()
        async with master.worker:
            await scenario(master)

    return lambda: virtual_time.run(main())


async def prepare(master: Master, session: str) -> list[str]:
    """Initializes the model, and returns the ids of two samples."""
    initialize = master.send(session, Handle.INITIALIZE, "i", Compute("actor", "actor"))
    await master.send(session, Handle.FLUSH, "f", Ids(["i"]))
    await initialize
    fetched = decode_payload((await master.send(session, Handle.FETCH, "s", {"count": 2})).payload)
    ids: list[str] = fetched.data["ids"]
    return ids


@simulated
async def test_a_request_that_is_sent_again_runs_once_and_gets_the_same_reply(master: Master) -> None:
    async with master.attached() as session:
        ids = await prepare(master, session)
        compute = Compute("gen", "actor", 1, 1, ids, ["prompt"], ["answer"])
        first = master.send(session, Handle.GENERATE, "g", compute)
        second = master.send(session, Handle.GENERATE, "g", compute)  # while it waits for a flush
        flushes = [master.send(session, Handle.FLUSH, "f2", Ids(["g"])) for _ in range(2)]
        assert [decode_payload((await flush).payload).data for flush in flushes] == [1, 1]
        third = master.send(session, Handle.GENERATE, "g", compute)  # while it runs
        replies = [await task for task in (first, second, third)]
        replies.append(await master.send(session, Handle.GENERATE, "g", compute))  # when it has been carried out
        assert replies == [replies[0]] * 4
        assert decode_payload(replies[0].payload).data["keys"] == ["answer"]
        assert master.kinds() == ["actor.initialize", "actor.generate"]


@simulated
async def test_a_flush_that_overtakes_its_requests_waits_for_them(master: Master) -> None:
    async with master.attached() as session:
        flush = master.send(session, Handle.FLUSH, "f", Ids(["i", "j"]))
        first = master.send(session, Handle.INITIALIZE, "i", Compute("actor", "actor"))
        await asyncio.sleep(5.0)
        assert not flush.done()
        await master.send(session, Handle.SPEC, "s")  # others do not wait
        second = master.send(session, Handle.INITIALIZE, "j", Compute("actor", "actor"))
        assert decode_payload((await flush).payload).data == 2
        assert [decode_payload((await task).payload).data for task in (first, second)] == [0, 0]
        never = master.send(session, Handle.FLUSH, "never", Ids(["lost"]))
        with pytest.raises(ProtocolViolationError, match="a flush whose requests have not arrived"):
            await never


@simulated
async def test_after_a_break_a_master_gets_the_replies_that_it_waits_for_and_old_requests_are_stale(
    master: Master,
) -> None:
    async with master.attached() as old:
        ids = await prepare(master, old)
        compute = Compute("gen", "actor", 1, 1, ids, ["prompt"], ["answer"])
        broken = [master.send(old, Handle.GENERATE, name, compute) for name in ("g", "unwanted")]
        await master.send(old, Handle.FLUSH, "f2", Ids(["g", "unwanted"]))
        master.network.break_streams("a0:1")
        await asyncio.wait(broken)
    async with master.attached("g", "f2") as session:
        assert (await master.send(old, Handle.GENERATE, "late", compute)).stale
        reply = decode_payload((await master.send(session, Handle.GENERATE, "g", compute)).payload)
        assert reply.data["keys"] == ["answer"]
        # The flush was carried out, though its requests are forgotten: the master had received their replies.
        flush = await master.send(session, Handle.FLUSH, "f2", Ids(["g", "unwanted"]))
        assert decode_payload(flush.payload).data == 2
        await master.send(session, Handle.SPEC, "last", None, "g", "f2")
    assert master.kinds() == ["actor.initialize", "actor.generate"]
    assert (await master.send(session, Handle.SPEC, "after the end")).stale
    assert set(master.worker._book) == {"last"}


def queued(call: str, mesh: int = 1, *hooks: str, handle: str = Handle.INFERENCE, publishes: bool = False) -> Payload:
    """A request; `empty` publishes parameters or takes them."""
    payload = Payload("worker", handle, call, data=Compute(call, "model", mesh))
    payload.post_hooks, payload.post_hook_data = list(hooks), [None] * len(hooks)
    if handle == Handle.EMPTY:
        realloc = Realloc("t", "actor", "ref", 1.0, "" if publishes else "w0")
        payload.post_hooks, payload.post_hook_data = [HookName.PARAM_REALLOC], [realloc]
    return decode_payload(encode_payload(payload))


def test_the_order_of_a_flush_does_not_depend_on_the_order_of_arrival() -> None:
    requests = [
        queued("source/publish", handle=Handle.EMPTY, publishes=True),
        queued("b", 1),
        queued("a", 2),
        queued("c", 2, "save"),
        queued("actor_train", 8, "average", "save"),
        queued("critic_train", 1, "average"),
        queued("target/take", handle=Handle.EMPTY),
    ]
    for arrival in itertools.permutations(requests):
        assert sorted(arrival, key=flush_order) == requests


@given(st.binary(max_size=60))
def test_data_of_strangers_is_refused_in_order(raw: bytes) -> None:
    for kind in (Payload, Compute, Step, Realloc):
        with suppress(ProtocolViolationError):
            unpack(raw, kind)


def test_what_is_no_request() -> None:
    hooks = {"handler": "a", "handle_name": "b", "request_id": "c", "pre_hooks": ["a", "b"], "pre_hook_data": [None]}
    with pytest.raises(ProtocolViolationError, match="2 hooks and data for 1"):
        decode_payload(pack(hooks))
    with pytest.raises(ProtocolViolationError, match="is no Compute"):
        convert({"call": 3}, Compute)
    with pytest.raises(ProtocolViolationError, match="is no Step"):
        unpack(pack({"comm_type": "bcast"}), Step)
    with pytest.raises(ProtocolViolationError, match="is no Compute"):
        unpack(pack(Compute("c", "actor", inputs=["x"] * 257)), Compute)
    with pytest.raises(ProtocolViolationError, match="is no Payload"):
        unpack(b"\x81\xa1x" + b"\x91" * 100_000, Payload)
    for eta in (-0.1, 1.1, float("nan"), float("inf")):
        with pytest.raises(ProtocolViolationError, match="is no Realloc"):
            unpack(pack(Realloc("t", "actor", "ref", eta)), Realloc)
