"""What it costs to read anything of strangers: four times as much takes four times as long, not sixteen."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from operator import mul
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from msgspec import msgpack

from averaging.common.addresses import covers, is_endpoint
from averaging.common.safe_msgpack import MAX_INTEGER_KEYS, unpack
from averaging.discovery.gossip.membership import BroadcastBranch
from averaging.discovery.gossip.record import GossipSettings, RecordLimits
from averaging.discovery.gossip.record_table import RecordTable
from averaging.discovery.gossip.rumours import Rumours
from averaging.errors import AveragingError
from averaging.matchmaking import rules
from averaging.protocol.group import Mode, pack_gather, unpack_gather
from averaging.protocol.messages import (
    DownloadData,
    MessageCode,
    MessageFromLeader,
    Record,
    Refusal,
    Resume,
    Rumour,
    WireTensor,
)
from averaging.receipts import receipt_log
from averaging.rl.workers import ListDataset, Sample
from averaging.rpc import TensorMessage, TensorReader
from averaging.state.assembler import StateAssembler
from averaging.state.donors import unpack_priority
from averaging.state.manifest import MAX_ITEMS, read_manifest
from averaging.testing import virtual_time
from averaging.training.optimizer_state import load_optimizer
from averaging.transport import RpcMethod
from averaging.transport.grpc import channel_options as headers
from averaging.transport.grpc import methods
from averaging.transport.grpc.authentication import is_token
from tests.fuzz import clashing
from tests.fuzz.material import protobufs, values
from tests.support.receipts import receipt
from tests.support.selection import examples, one_in

TIMES = 4
MOST = 10
"""Of linear cost four times as much takes 4 times as long, of quadratic 16 times."""

UNNOTICED = 0.002
"""Seconds that are nothing: there the clock and the cache decide."""

ATTEMPTS = 6

Read = Callable[[Any], object]
FEW = settings(
    max_examples=examples(40), suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


def seconds(read: Read, given: Any) -> float:
    """Processor time of this thread, so that what else the machine does hardly counts."""
    began = time.thread_time()
    with suppress(AveragingError, ValueError):
        read(given)
    return time.thread_time() - began


def check_growth(make: Callable[[int], Any], read: Read, count: int) -> None:
    """The best of several attempts counts, of each; a machine that is busy with something else delays some."""
    small, large = make(count), make(TIMES * count)
    once = four = float("inf")
    for _ in range(ATTEMPTS):
        once, four = min(once, seconds(read, small)), min(four, seconds(read, large))
        if four <= UNNOTICED + MOST * once:
            return
    raise AssertionError(f"{count} took {once:.4f} s, {TIMES} times as many {four:.4f} s")


# msgpack


def listed(item: bytes) -> Callable[[int], bytes]:
    return lambda count: b"\xdd" + struct.pack(">I", count) + item * count


AS_MANY_AS_ALLOWED = clashing.packed_map(clashing.packed(clashing.integers(1 << 11)[-MAX_INTEGER_KEYS:]))

DOCUMENTS: dict[str, tuple[Callable[[int], bytes], int]] = {
    "timestamps of one hash as keys": (lambda count: clashing.packed_map(clashing.timestamps(count)), 1000),
    "integers that clash as keys": (
        lambda slots: clashing.packed_map(clashing.packed(clashing.integers(slots))),
        1 << 12,
    ),
    "as many integers that clash as are allowed": (listed(AS_MANY_AS_ALLOWED), 5),
    "integers as keys": (lambda count: clashing.packed_map(clashing.packed(range(count))), 1 << 13),
    "timestamps as values": (lambda count: listed(msgpack.encode(datetime.fromtimestamp(1, UTC)))(count), 1 << 13),
    "text as keys": (lambda count: clashing.packed_map(clashing.packed(map(str, range(count)))), 1 << 13),
    "one text as all keys": (lambda count: clashing.packed_map([b"\xa1x"] * count), 1 << 13),
    "bytes as keys": (
        lambda count: clashing.packed_map(struct.pack(">BBI", 0xC4, 4, number) for number in range(count)),
        1 << 13,
    ),
    "empty lists": (listed(b"\x90"), 1 << 14),
    "empty maps": (listed(b"\x80"), 1 << 14),
    "maps of one": (listed(b"\x81\xa1x\xc0"), 1 << 13),
    "maps of fifteen": (listed(msgpack.encode({f"{n}": n for n in range(15)})), 1 << 9),
    "deep lists": (listed(b"\x91" * 60 + b"\xc0"), 1 << 6),
    "deep maps": (listed(b"\x81\xa0" * 60 + b"\xc0"), 1 << 6),
    "a list that is too deep": (lambda count: b"\x91" * count + b"\xc0", 1 << 16),
    "counts that never come": (lambda count: b"\xdd\xff\xff\xff\xff" * count, 1 << 14),
    "counts of maps that never come": (lambda count: b"\xdf\x00\x00\x00\x04\xa0" * count, 1 << 14),
    "a long text": (lambda count: b"\xdb" + struct.pack(">I", 3 * count) + "€".encode() * count, 1 << 20),
    "long bytes": (lambda count: b"\xc6" + struct.pack(">I", count) + bytes(count), 1 << 20),
    "a long extension": (lambda count: b"\xc9" + struct.pack(">IB", count, 5) + bytes(count), 1 << 20),
    "numbers": (listed(b"\xcb" + bytes(8)), 1 << 14),
    "nothing that is msgpack": (lambda count: b"\xc1" * count, 1 << 14),
}  # fmt: skip

READERS: dict[str, Read] = {
    "anything": lambda packed: unpack(packed, 1 << 24),
    "a state's metadata": lambda packed: read_manifest(in_metadata(packed), MAX_ITEMS),
    "what a member gathers": lambda packed: unpack_gather("peer:1", in_gather(packed)),
    "a member's array": lambda packed: unpack_gather("peer:1", packed),
    "a donor's declaration": unpack_priority,
}


def in_metadata(packed: bytes) -> bytes:
    told: bytes = msgpack.encode({"version": 1, "tensors": [], "digest": [], "user": {"": None}})
    return told[:-1] + packed


def in_gather(packed: bytes) -> bytes:
    return b"\x94\xcb" + struct.pack(">d", 1.0) + b"\xc0\x00\xc6" + struct.pack(">I", len(packed)) + packed


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", one_in(2, DOCUMENTS))
def test_hostile_documents(kind: str, reader: str) -> None:
    make, count = DOCUMENTS[kind]
    check_growth(make, READERS[reader], count)


@pytest.mark.parametrize("reader", READERS)
@FEW
@given(values)
@example({"": {}})
def test_any_documents_many_times(reader: str, value: Any) -> None:
    check_growth(listed(msgpack.encode(value)), READERS[reader], 500)


def test_integers_that_clash_cost_little_more_than_others() -> None:
    """Within what is allowed; what is refused costs nothing."""
    clashing_ones = listed(AS_MANY_AS_ALLOWED)(20)
    others = listed(clashing.packed_map(clashing.packed(range(1 << 32, (1 << 32) + MAX_INTEGER_KEYS))))(20)
    read = READERS["anything"]
    assert unpack(clashing_ones, 1 << 24) != unpack(others, 1 << 24)
    plain = min(seconds(read, others) for _ in range(ATTEMPTS))
    assert min(seconds(read, clashing_ones) for _ in range(ATTEMPTS)) < 6 * plain


# Other messages

METHODS: list[RpcMethod[Any, Any]] = list(methods.METHODS)
DECODERS = {f"{m.name}-{side}": getattr(m, f"read_{side}") for m in METHODS for side in ("request", "reply")}


@pytest.mark.parametrize("name", DECODERS)
@FEW
@given(protobufs())
def test_any_fields_many_times(name: str, fields: bytes) -> None:
    check_growth(lambda count: fields * count, DECODERS[name], 200)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("content", [b"", b"\x08\x01", b"\x0a\x01x\x12\x01y", b"peer:1"])
def test_each_field_many_times(name: str, content: bytes) -> None:
    """Repeated ones have as many items then; of others the last counts, or all together."""
    for number in range(1, 23):
        key = number << 3 | 2
        field = bytes([key] if key < 0x80 else [key & 0x7F | 0x80, key >> 7]) + bytes([len(content)]) + content
        check_growth(partial(mul, field), DECODERS[name], 500)


# What becomes of them


def records(count: int, *, places: int | None = None) -> list[Record]:
    """Of as many owners, all of whom want one place unless there are more."""
    return [
        Record(
            "key", f"peer:{number % (places or 1)}", b"", 5, 50.0, owner=struct.pack(">32xQ", number)[-32:], claimed=5
        )
        for number in range(count)
    ]


def merge(table: RecordTable, taken: list[Record]) -> RecordTable:
    for one in taken:
        table.merge(one, 0.0)
    return table


def table_of(taken: list[Record]) -> RecordTable:
    return merge(RecordTable(RecordLimits(), lambda record: True), taken)


def withdraw_one_after_the_other(taken: list[Record]) -> None:
    merge(table_of(taken), [replace(one, version=6, withdrawn=True) for one in taken])


def clashing_ids(slots: int) -> list[tuple[int, int]]:
    return [(number, 1) for number in clashing.integers(slots)]


@pytest.mark.parametrize("read", [table_of, lambda taken: table_of(taken).expire(60.0), withdraw_one_after_the_other])
@pytest.mark.parametrize("places", [1, 1 << 16])
def test_records_of_many_owners(read: Read, places: int) -> None:
    check_growth(lambda count: records(count, places=places), read, 1000)


def test_digests_with_ids_that_clash() -> None:
    table = table_of(records(1000, places=1000))
    check_growth(clashing_ids, table.compare, 1 << 12)


class Deaf:
    """The network and its members: a single one, who takes no push."""

    async def push(self, endpoint: str, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    def branches(self, start: int, end: int, fanout: int) -> list[BroadcastBranch]:
        return [BroadcastBranch(start, end, ("deaf:1",))]

    def suspect(self, endpoint: str, now: float, why: str, *, refused: bool) -> None:
        pass


def test_rumours_for_as_many_ranges() -> None:
    def tell_twice(taken: list[Record]) -> None:
        async def main() -> None:
            deaf: Any = Deaf()
            rumours = Rumours(deaf, "run", deaf, GossipSettings(), virtual_time.clock, lambda *_: None)
            half = len(taken) // 2
            async with asyncio.TaskGroup() as tasks:
                for some in (taken[:half], taken[half:]):  # these wait while those are being pushed
                    for number, record in enumerate(some, 1):
                        rumours.spread(record, number, number)
                    tasks.create_task(rumours.flush())
                    await asyncio.sleep(0.1)

        virtual_time.run(main())

    check_growth(lambda count: records(count, places=count), tell_twice, 2000)


def test_groups() -> None:
    def announce(count: int) -> MessageFromLeader:
        names = tuple(f"peer:{number + 1}" for number in range(count))
        gathered = (pack_gather(1.0, None, Mode.NODE, {"loss": 0.5}),) * count
        return MessageFromLeader(MessageCode.BEGIN_ALLREDUCE, b"id", "", names, gathered)

    check_growth(announce, lambda message: rules.read_group(message, "peer:1", "peer:2", b""), 1000)


def optimizer_of(parameters: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1)) for _ in range(parameters)])


@pytest.mark.parametrize("inside", [False, True])
def test_an_optimizer_s_state_with_integers_that_clash(inside: bool) -> None:
    optimizer = optimizer_of(2)

    def make(slots: int) -> dict[str, Any]:
        state = {"dict": [[number, None] for number in clashing.integers(slots)]}
        return {"class": "SGD", "state": {"dict": [["odd", state]]} if inside else state}

    check_growth(make, lambda packed: load_optimizer(optimizer, {}, packed), 1 << 12)


def test_states_of_many_tensors() -> None:
    def messages(count: int) -> list[DownloadData]:
        told = {
            "version": 1,
            "tensors": [[f"t{number}", "float32", [0, 1]] for number in range(count)],
            "digest": [bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")] * count,
            "user": {},
        }
        empty = DownloadData(b"", WireTensor(b"", (0, 1), "float32", chunks=1))
        return [DownloadData(msgpack.encode(told)), *[empty] * count]

    def read(download: list[DownloadData]) -> None:
        reader = StateAssembler(None)
        for message in download:
            reader.feed(message)
        assert len(reader.finish().tensors) == len(download) - 1
        again = StateAssembler(None, earlier=reader.kept)
        again.feed(download[0])
        assert reader.kept.resume == Resume(joins=True)  # there is not a byte

    check_growth(messages, read, 1000)


TEXTS: dict[str, Read] = {
    "the header of a download": lambda text: headers.read_resume([(headers.RESUME, text)]),
    "a token": lambda text: is_token(text, ["secret"]),
    "an endpoint": is_endpoint,
    "a host": lambda text: covers(["peer.example.org", "192.0.2.7"], text),
    "a line of receipts": lambda text: receipt_log.read([text.encode()]),
}
PIECES = ["1", "a", ".", ":", "[", "{", '{"":', "9" * 40, "Bearer ", "::", " ", "\\u0000", '"', "client::", "0 a", "€"]


@pytest.mark.parametrize("reader", TEXTS)
@pytest.mark.parametrize("piece", PIECES)
def test_long_texts(reader: str, piece: str) -> None:
    check_growth(lambda count: piece * count, TEXTS[reader], 20_000)


def test_long_receipts() -> None:
    line = json.loads(receipt_log.dumps(receipt()))

    def make(count: int) -> bytes:
        return json.dumps(line | {"members": [f"peer:{number}" for number in range(count)]}).encode() + b"\n"

    check_growth(make, lambda raw: receipt_log.read([raw]), 5000)


# Workers


def in_chunks(count: int) -> list[TensorMessage]:
    """A tensor in chunks of one byte."""
    first = TensorMessage(size=[count], dtype="int8", chunks=count, buffer=b"1")
    return [first, *[TensorMessage(buffer=b"1")] * (count - 1)]


def read_tensor(messages: list[TensorMessage]) -> None:
    reader = TensorReader()
    found = [reader.read(message) for message in messages]
    assert found[-1] is not None


def test_a_tensor_in_many_chunks() -> None:
    check_growth(in_chunks, read_tensor, 1 << 12)


def test_a_part_of_a_dataset_that_is_fetched_at_once() -> None:
    def part(count: int) -> ListDataset:
        dataset = ListDataset([Sample(str(n), {}) for n in range(count)])
        dataset.place(0, 1)
        return dataset

    check_growth(part, lambda dataset: dataset.fetch(dataset.size), 1 << 16)
