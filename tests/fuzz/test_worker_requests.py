"""Whatever a master with the token sends, a worker answers or refuses it, and serves the next master."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from averaging.errors import AveragingError
from averaging.rl.workers import Handle, HookName, ModelWorker, Payload
from averaging.rl.workers.payload import ATTACH, BLOCKING, REQUEST, decode_payload
from averaging.testing import virtual_time
from averaging.wire.workers_pb2 import Attach, Reply, Request
from tests.support.selection import examples
from tests.workers.backends import Actor, Log, dataset
from tests.workers.memory_workers import MemoryWorkers

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
    },
)
anything = st.recursive(
    st.none() | st.booleans() | numbers | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
hooks = st.lists(
    st.tuples(st.sampled_from([*HookName, "", "x"]), fields | anything | st.lists(steps, max_size=3)), max_size=3
)
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
        "dp_rank": numbers,
        "dp_size": numbers,
    },
).map(msgspec.msgpack.encode)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    before, after = draw(hooks), draw(hooks)
    return {
        "handler": draw(names),
        "handle_name": draw(st.sampled_from([*(set(Handle) - {Handle.FLUSH}), "", "x"])),
        "syn_reply_id": draw(st.sampled_from(["", "0", "1", "s"])),
        "ack_reply_id": draw(st.sampled_from(["", "0", "1", "a"])),
        "no_syn": draw(st.booleans()),
        "data": draw(fields | anything),
        "pre_hooks": [name for name, _ in before],
        "pre_hook_data": [data for _, data in before],
        "post_hooks": [name for name, _ in after],
        "post_hook_data": [data for _, data in after],
    }


HELD = {"shards": [[{"model": "actor"}, {}]], "dp_rank": 0, "dp_size": 1, "endpoints": {"b0": "b0:1"}}
GOOD = msgspec.msgpack.encode(HELD)
START = [
    {"handler": "a0", "handle_name": "fetch", "data": {"count": 2}},
    {"handler": SHARD, "handle_name": "initialize", "data": {"call": "actor", "model": "actor"}},
]


async def answers(network: MemoryWorkers, placement: bytes, sent: list[dict[str, Any]]) -> list[Payload]:
    """Attaches, and sends requests with a flush of all behind them. Returns the replies, without refusals."""
    channel = network.connect("a0:1")
    async with aclosing(channel.stream(ATTACH, Attach(master="m", worker="a0", placement=placement))) as messages:
        session = (await anext(messages)).session
        numbered = [request | {"request_id": str(number)} for number, request in enumerate(sent)]
        held = [request["request_id"] for request in numbered if not request.get("no_syn", True)]
        blocking = [request["request_id"] for request in numbered if request["handle_name"] in BLOCKING]
        blocking = [name for name in blocking if name not in held]
        numbered.append(
            {"handler": "a0", "handle_name": "flush", "request_id": "flush", "data": {"ids": blocking}},
        )
        calls = [
            asyncio.wait_for(
                channel.call(REQUEST, Request(session=session, payload=msgspec.msgpack.encode(request)), math.inf),
                1000.0,
            )
            for request in numbered
        ]
        replies = await asyncio.gather(*calls, return_exceptions=True)
    for request, reply in zip(numbered, replies, strict=True):
        # What is held without an ack, or waits for a flush since, has no reply.
        is_held = isinstance(reply, TimeoutError) and request["request_id"] in held
        assert is_held or isinstance(reply, Reply | AveragingError), reply
    return [decode_payload(reply.payload) for reply in replies if isinstance(reply, Reply) and not reply.stale]


def survives(placement: bytes, sent: list[dict[str, Any]]) -> None:
    """Sends what a hostile master sends, and then what a good one does."""
    unhandled: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        network = MemoryWorkers()
        worker = ModelWorker("a0", {"actor": Actor("a0", Log())}, dataset=dataset(), connect=network.connect)
        async with worker:
            network.serve("a0:1", worker)
            assert [reply.error for reply in await answers(network, GOOD, START)] == ["", "", ""]
            for first in (placement, GOOD):
                with suppress(AveragingError):
                    await answers(network, first, sent)
            spec = {"handler": "a0", "handle_name": "spec"}
            assert [reply.error for reply in await answers(network, GOOD, [spec])] == ["", ""]

    virtual_time.run(main())
    assert unhandled == []


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(placements | st.binary(max_size=20), st.lists(requests(), max_size=4))
@example(msgspec.msgpack.encode(HELD | {"dp_size": 1 << 62}), [])
@example(msgspec.msgpack.encode(HELD | {"dp_size": 0}), [])
@example(msgspec.msgpack.encode(HELD | {"shards": [[{"model": "actor"}, {"dp": 0}]]}), [])
def test_a_hostile_master(placement: bytes, sent: list[dict[str, Any]]) -> None:
    survives(placement, sent)
