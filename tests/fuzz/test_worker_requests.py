"""Whatever a master with the token sends, a worker answers or ends the stream, and serves the next master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from averaging.errors import AveragingError
from averaging.rl.workers import Handle, HookName, ModelWorker
from averaging.rl.workers.payload import REQUEST_REPLY_STREAM
from averaging.testing import virtual_time
from averaging.wire.workers_pb2 import Attach, MasterMessage, WorkerMessage
from averaging.wire.workers_pb2 import Payload as Message
from tests.support.memory_workers import MemoryWorkers
from tests.support.selection import examples
from tests.support.worker_backends import Actor, Log, dataset

SHARD = "actor@dp0-tp0-pp0"

numbers = st.integers(-(1 << 63), (1 << 64) - 1) | st.sampled_from([-1, 0, 1, 2, 1 << 62]) | st.floats()
names = st.sampled_from(["", "a0", "b0", "actor", "prompt", "answer", "sample-0", "sample-1", SHARD, "..", "x" * 1000])
lists = st.lists(names, max_size=3)
steps = st.fixed_dictionaries(
    {
        "comm_type": st.sampled_from(["bcast", "gather", "scatter", ""]),
        "root": names,
        "srcs": lists,
        "dsts": lists,
        "ids": st.lists(lists, max_size=3),
        "keys": lists,
    }
)
fields = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("call", "model", "path", "transfer", "source", "target", "origin"), names),
        **dict.fromkeys(("mesh", "step", "count", "eta", "takers"), numbers),
        **dict.fromkeys(("ids", "inputs", "outputs"), lists),
        "steps": st.lists(steps, max_size=3),
    },
)
anything = st.recursive(
    st.none() | st.booleans() | numbers | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
packed = st.one_of(st.binary(max_size=20), (fields | anything).map(msgspec.msgpack.encode))
hooks = st.lists(st.tuples(st.sampled_from([*HookName, "", "x"]), packed), max_size=3)
placements = st.fixed_dictionaries(
    {},
    optional={
        "shards": st.lists(
            st.tuples(
                st.fixed_dictionaries({"model": names}, optional={"dp_rank": numbers, "is_dp_head": st.booleans()}),
                st.fixed_dictionaries({}, optional=dict.fromkeys(("dp", "tp", "pp"), numbers)),
            ),
            max_size=2,
        ),
        "endpoints": st.dictionaries(names, names, max_size=3),
        "keys": st.dictionaries(
            names,
            st.fixed_dictionaries({"dtype": names, "shape": st.lists(st.none() | numbers, max_size=3)}),
            max_size=2,
        ),
        "dp_rank": numbers,
        "dp_size": numbers,
    },
).map(msgspec.msgpack.encode)


@st.composite
def requests(draw: st.DrawFn) -> Message:
    before, after = draw(hooks), draw(hooks)
    return Message(
        handler=draw(names),
        handle_name=draw(st.sampled_from([*Handle, "", "x"])),
        request_id=draw(st.sampled_from(["", "1", "2", "3"])),
        syn_reply_id=draw(st.sampled_from(["", "1", "s"])),
        ack_reply_id=draw(st.sampled_from(["", "1", "2"])),
        no_syn=draw(st.booleans()),
        data=draw(packed),
        pre_hooks=[name for name, _ in before],
        pre_hook_data=[data for _, data in before],
        post_hooks=[name for name, _ in after],
        post_hook_data=[data for _, data in after],
    )


def attach(placement: bytes, outstanding: tuple[str, ...] = ()) -> MasterMessage:
    return MasterMessage(attach=Attach(master="m", worker="a0", placement=placement, outstanding=outstanding))


HELD = {"shards": [[{"model": "actor"}, {}]], "dp_rank": 0, "dp_size": 1, "endpoints": {"b0": "b0:1"}}
GOOD = msgspec.msgpack.encode(HELD)
FLUSH = Message(handler="a0", handle_name="flush", request_id="flush", no_syn=True)
SPEC = Message(handler="a0", handle_name="spec", request_id="last", no_syn=True)
START = [
    Message(handler="a0", handle_name="fetch", request_id="f", no_syn=True, data=msgspec.msgpack.encode({"count": 2})),
    Message(
        handler=SHARD,
        handle_name="initialize",
        request_id="i",
        no_syn=True,
        data=msgspec.msgpack.encode({"call": "actor", "model": "actor"}),
    ),
    FLUSH,
]


async def answers(network: MemoryWorkers, *messages: MasterMessage) -> list[WorkerMessage]:
    async def sent() -> AsyncGenerator[MasterMessage, None]:
        for message in messages:
            yield message

    async with aclosing(network.connect("a0:1").stream(REQUEST_REPLY_STREAM, sent())) as replies:
        return [reply async for reply in replies]


def survives(placement: bytes, sent: list[Message]) -> None:
    """Sends what a hostile master sends, and then what a good one does."""
    unhandled: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        network = MemoryWorkers()
        worker = ModelWorker(
            "a0", {"actor": Actor("a0", Log())}, dataset=dataset(), connect=network.connect, inline=True
        )
        async with worker:
            network.serve("a0:1", worker)
            assert len(await answers(network, attach(GOOD), MasterMessage(requests=START))) > 1
            for first in (placement, GOOD):
                with suppress(AveragingError):
                    await answers(network, attach(first), MasterMessage(requests=[*sent, FLUSH]))
            [attached, *replies] = await answers(network, attach(GOOD), MasterMessage(requests=[SPEC]))
            assert attached.HasField("attached")
            assert [one.request_id for message in replies for one in message.replies] == ["last"]

    virtual_time.run(main())
    assert unhandled == []


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(placements | packed, st.lists(requests(), max_size=4))
@example(msgspec.msgpack.encode(HELD | {"dp_size": 1 << 62}), [])
@example(msgspec.msgpack.encode(HELD | {"dp_size": 0}), [])
@example(msgspec.msgpack.encode(HELD | {"shards": [[{"model": "actor"}, {"dp": 0}]]}), [])
def test_a_hostile_master(placement: bytes, sent: list[Message]) -> None:
    survives(placement, sent)
