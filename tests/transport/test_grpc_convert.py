"""The bytes of every message: there and back, and what is no such message."""

import random
from collections.abc import Mapping
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, strategies as st

from averaging.errors import ProtocolViolationError
from averaging.protocol.group import MAX_TRIM, Aggregation, AggregationKind, ReplyForm
from averaging.protocol.messages import (
    AveragingData,
    CompressionType,
    Digest,
    DownloadData,
    ExchangeReply,
    JoinRequest,
    MeanOver,
    MessageCode,
    MessageFromLeader,
    Record,
    Refusal,
    Rumour,
    TopK,
    WireTensor,
)
from averaging.receipts.receipt import Receipt
from averaging.receipts.receipt_log import Watched
from averaging.receipts.status import PeerStatus
from averaging.tensors import AVERAGED_DTYPES
from averaging.tensors.schema import Schema, TensorSpec
from averaging.timing.deadlines import Phase
from averaging.transport import RpcMethod, parse
from averaging.transport.grpc import methods
from averaging.transport.grpc.conversion import AVERAGING_DATA
from averaging.wire import averaging_pb2, gossip_pb2, runtime_pb2, status_pb2
from tests.support.grpc_fakes import METHODS
from tests.support.spelling import spelled


def several(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


names = st.text(st.characters(codec="utf-8"), max_size=20)
uint32, uint64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    str: names,
    bytes: st.binary(),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bytes | memoryview: st.binary(),
}
INTEGERS = {
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: uint32,
}


def values(hint: Any, field: Any) -> st.SearchStrategy[Any]:
    """Any values of a type, as a field of a message can hold them."""
    arguments, kind = get_args(hint), get_origin(hint) or hint
    if hint in LEAVES:
        return LEAVES[hint]
    if NoneType in arguments:
        return st.none() | values(next(each for each in arguments if each is not NoneType), field)
    if kind is tuple and arguments[-1] is Ellipsis:
        return several(values(arguments[0], field))
    if kind is tuple:
        return st.tuples(*(values(each, field) for each in arguments))
    if isinstance(kind, type) and issubclass(kind, Mapping):
        key, value = (values(each, field) for each in arguments)
        return st.dictionaries(key, value, max_size=3)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    if hint is int:
        return INTEGERS.get(field.type, uint64)
    return built(hint, field.message_type)


def built(kind: Any, wire: Any, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any objects of a dataclass, with the fields that its message has too."""
    hints, there = get_type_hints(kind), wire.fields_by_name
    drawn = {name: values(hint, there[name]) for name, hint in hints.items() if name in there and name not in given}
    return st.builds(kind, **drawn, **given)


averaging_wire, gossip_wire, status_wire = (
    file.DESCRIPTOR.message_types_by_name for file in (averaging_pb2, gossip_pb2, status_pb2)
)
tensors = built(
    WireTensor,
    runtime_pb2.Tensor.DESCRIPTOR,
    chunks=st.integers(0, 2**31 - 1),
    compression=INTEGERS[FieldDescriptor.TYPE_INT32],
)
averaging_data = built(AveragingData, averaging_wire["AveragingData"], tensor_part=st.none() | tensors)
records, digests = built(Record, gossip_wire["Record"]), built(Digest, gossip_wire["Digest"])
specs = built(TensorSpec, status_wire["TensorSpec"], dtype=st.sampled_from(sorted(AVERAGED_DTYPES)))
receipts = built(Receipt, status_wire["Receipt"])
statuses = built(
    PeerStatus, status_wire["PeerStatus"], group_id=st.binary(min_size=1), members=several(names)
)  # in a message of their own
aggregations = (
    st.sampled_from([Aggregation(), Aggregation(AggregationKind.MEDIAN)])
    | st.integers(1, MAX_TRIM).map(lambda count: Aggregation(AggregationKind.TRIMMED, float(count)))
    | st.floats(0, exclude_min=True, allow_infinity=False).map(
        lambda distance: Aggregation(AggregationKind.CLIP, distance)
    )
)
MESSAGES: dict[str, tuple[st.SearchStrategy[Any], st.SearchStrategy[Any]]] = {
    "rpc_join_group": (
        built(JoinRequest, averaging_wire["JoinRequest"]),
        built(MessageFromLeader, averaging_wire["MessageFromLeader"]),
    ),
    "rpc_aggregate_part": (averaging_data, averaging_data),
    "rpc_download_state": (
        st.none(),
        built(DownloadData, averaging_wire["DownloadData"], tensor_part=st.none() | tensors),
    ),
    "Exchange": (digests, built(ExchangeReply, gossip_wire["ExchangeReply"])),
    "Push": (
        st.tuples(names, several(built(Rumour, gossip_wire["Rumour"]))),
        several(built(Refusal, gossip_wire["Refusal"])),
    ),
    "Subscribe": (digests, several(records)),
    "ListRecords": (names, several(records)),
    "GetStatus": (st.tuples(uint32, uint64, st.booleans()), statuses),
    "WatchRounds": (uint32, built(Watched, status_wire["WatchedRound"])),
    "GetSchema": (
        st.none(),
        st.builds(Schema, several(specs), uint64, st.sampled_from(ReplyForm), names, aggregations),
    ),
}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@given(data=st.data())
def test_there_and_back(method: RpcMethod[Any, Any], data: st.DataObject) -> None:
    requests, replies = MESSAGES[method.name]
    request, reply = data.draw(requests), data.draw(replies)
    raw_request, raw_reply = method.request.SerializeToString(request), method.reply.SerializeToString(reply)
    assert isinstance(raw_request, bytes)  # all that gRPC takes
    assert isinstance(raw_reply, bytes)
    assert spelled(method.read_request(raw_request)) == spelled(request)
    assert spelled(method.read_reply(raw_reply)) == spelled(reply)


def test_the_methods_are_those_of_the_protos() -> None:
    declared = {
        f"/{service.full_name}/{method.name}"
        for file in (averaging_pb2, gossip_pb2, status_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert {method.path for method in METHODS} == declared


def test_the_codes_are_those_of_the_protos() -> None:
    assert dict(averaging_pb2.MessageCode.items()) == {code.name: code.value for code in MessageCode}
    assert dict(runtime_pb2.CompressionType.items()) == {code.name: code.value for code in CompressionType}


def test_a_wait_of_which_only_later_releases_know_is_left_out() -> None:
    told = [status_pb2.LearnedDeadline(endpoint="a:1", phase=phase) for phase in ("nap", "part")]
    status = methods.GET_STATUS.read_reply(status_pb2.PeerStatus(deadlines=told).SerializeToString())
    assert [one.phase for one in status.deadlines] == [Phase.PART]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (status_pb2.Schema(reply="echo"), "unknown reply form 'echo'"),
        (status_pb2.Schema(reply="delta", tensors=[status_pb2.TensorSpec(name="w", dtype="int3")]), "dtype 'int3'"),
        (status_pb2.Schema(reply="delta", aggregation="trimmed:0"), "unknown aggregation 'trimmed:0'"),
        (status_pb2.Schema(reply="delta", schema_hash=b"another"), "does not match its own hash"),
        (status_pb2.Schema(reply="average", sparse=status_pb2.TopK(bits=2, mean_over="all")), "top_k: density"),
        (status_pb2.Schema(reply="average", sparse=status_pb2.TopK(density=0.5, bits=2)), "mean"),
    ],
)
def test_an_impossible_schema(schema: status_pb2.Schema, words: str) -> None:
    with pytest.raises(ProtocolViolationError, match=words):
        methods.GET_SCHEMA.read_reply(schema.SerializeToString())


def test_a_schema_with_top_k_arrives_as_it_is() -> None:
    tensors = (TensorSpec("w", "float32", (64, 64), CompressionType.TOP_K), TensorSpec("b", "float32", (2,)))
    for sparse in (TopK(), TopK(1 / 3, 8, MeanOver.ALL)):
        schema = Schema(tensors, 1 << 20, topic="changes", sparse=sparse)
        assert methods.GET_SCHEMA.read_reply(methods.GET_SCHEMA.reply.SerializeToString(schema)) == schema


MANY = 1 << 20
TENSOR = runtime_pb2.Tensor(size=[1] * MANY)


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        (methods.PUSH, b"\x12\0" * MANY),
        (methods.EXCHANGE, b"\x22\0" * (MANY // 4)),
        (methods.SUBSCRIBE, b"\x22\0" * (MANY // 4)),
        (methods.AGGREGATE_PART, averaging_pb2.AveragingData(tensor_part=TENSOR).SerializeToString()),
    ],
    ids=["rumours", "digest", "subscription", "dimensions"],
)
def test_what_a_request_repeats_is_counted_before_it_is_taken(method: RpcMethod[Any, Any], raw: bytes) -> None:
    with pytest.raises(ProtocolViolationError, match=r"a message with \d+ .*; at most \d+ are accepted"):
        method.read_request(raw)


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        (methods.JOIN_GROUP, b"\x22\0" * MANY),
        (methods.JOIN_GROUP, b"\x2a\0" * MANY),
        (methods.AGGREGATE_PART, averaging_pb2.AveragingData(tensor_part=TENSOR).SerializeToString()),
        (methods.DOWNLOAD_STATE, averaging_pb2.DownloadData(tensor_part=TENSOR).SerializeToString()),
        (methods.EXCHANGE, b"\x0a\0" * MANY),
        (methods.EXCHANGE, gossip_pb2.ExchangeReply(wanted=[1] * (MANY // 8)).SerializeToString()),
        (methods.PUSH, b"\x0a\0" * (MANY // 2)),
        (methods.SUBSCRIBE, b"\x0a\0" * MANY),
        (methods.LIST_RECORDS, b"\x0a\0" * MANY),
        (methods.GET_SCHEMA, b"\x22\x07average" + b"\x12\0" * MANY),
    ],
)
def test_what_a_reply_repeats_is_counted_before_it_is_taken(method: RpcMethod[Any, Any], raw: bytes) -> None:
    with pytest.raises(ProtocolViolationError, match=r"a message with \d+ .*; at most \d+ are accepted"):
        method.read_reply(raw)


@pytest.mark.parametrize("method", [method for method in METHODS if method.max_request_bytes is not None])
def test_messages_are_no_longer_than_they_can_be(method: RpcMethod[Any, Any]) -> None:
    # Of a field that nobody knows: what is read of it does not count.
    raw = b"\xfa\x7f" + bytes([0x80, 0x80, 0x80, 0x03]) + bytes(6 << 20)
    reads = [method.read_request]
    if method in (methods.EXCHANGE, methods.PUSH, methods.SUBSCRIBE):
        reads.append(method.read_reply)
    for read in reads:
        with pytest.raises(ProtocolViolationError, match=r"a message of \d+ bytes in .*; at most \d+ are accepted"):
            read(raw)


def test_the_largest_of_discovery_fit() -> None:
    record = Record(
        key="k" * 256,
        subkey="s" * 256,
        value=bytes(1024),
        version=2**63 - 1,
        expiration=1.0,
        withdrawn=True,
        owner=bytes(32),
        signature=bytes(64 + 4096),
        claimed=2**63 - 1,
    )
    request = ("r" * 128, (Rumour(record, 2**64 - 1, 2**64 - 1),) * 1024)
    assert methods.PUSH.read_request(methods.PUSH.request.SerializeToString(request)) == request
    refusals = (Refusal("k" * 256, "s" * 256, "r" * 256),) * 1024
    assert methods.PUSH.read_reply(methods.PUSH.reply.SerializeToString(refusals)) == refusals
    reply = ExchangeReply((record,) * 128, (2**64 - 1,) * (1 << 15), sent=1.7e9)
    assert methods.EXCHANGE.read_reply(methods.EXCHANGE.reply.SerializeToString(reply)) == reply
    assert methods.SUBSCRIBE.read_reply(methods.SUBSCRIBE.reply.SerializeToString((record,) * 1024)) == (record,) * 1024
    digest = Digest("r" * 128, "e" * 256, 2**64 - 1, ((2**64 - 1, 2**63 - 1),) * (1 << 15), True, 1.7e9)
    for method in (methods.EXCHANGE, methods.SUBSCRIBE):
        assert method.read_request(method.request.SerializeToString(digest)) == digest
    request_to_join = JoinRequest("e" * 300, bytes(32), 1.0, bytes(64 << 10), True)
    assert (
        methods.JOIN_GROUP.read_request(methods.JOIN_GROUP.request.SerializeToString(request_to_join))
        == request_to_join
    )


# Messages with a tensor are joined from pieces


LARGE = 4096

large_tensors = st.builds(
    WireTensor,
    buffer=st.integers(0, 3).map(lambda n: random.Random(n).randbytes(LARGE + n)),
    size=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    dtype=st.sampled_from(["", "float32", "bfloat16"]),
    compression=st.integers(0, 20),
    chunks=st.integers(0, 2**31 - 1),
    requires_grad=st.booleans(),
)
large_messages = st.builds(
    AveragingData,
    code=st.sampled_from(list(MessageCode)),
    group_id=st.binary(max_size=20),
    endpoint=st.text(max_size=20),
    tensor_part=large_tensors,
)


@given(large_messages)
def test_protobuf_reads_what_was_written_and_so_do_we(message: AveragingData) -> None:
    raw = AVERAGING_DATA.SerializeToString(message)
    wire = averaging_pb2.AveragingData.FromString(raw)
    assert message.tensor_part is not None
    assert wire.tensor_part.buffer == message.tensor_part.buffer
    assert tuple(wire.tensor_part.size) == message.tensor_part.size
    assert (int(wire.code), wire.group_id, wire.endpoint) == (int(message.code), message.group_id, message.endpoint)
    assert parse(AVERAGING_DATA, raw) == message
    assert parse(AVERAGING_DATA, wire.SerializeToString()) == message


@pytest.mark.parametrize(
    "unknown",
    [
        b"\x78\xac\x02",
        b"\x78" + b"\xff" * 9 + b"\x01",
        b"\x79" + b"\x22" * 8,
        b"\x7a\x04" + b"\x22" * 4,
        b"\x7d" + b"\x22" * 4,
    ],
    ids=["varint", "negative", "fixed64", "bytes", "fixed32"],
)
def test_fields_of_later_versions_are_stepped_over(unknown: bytes) -> None:
    """Field 15 of every kind, before the tensor and after it; the bytes in it would begin a tensor."""
    part = AVERAGING_DATA.SerializeToString(AveragingData(tensor_part=WireTensor(b"x" * LARGE)))
    data = parse(AVERAGING_DATA, unknown + part + unknown)
    assert data == AveragingData(tensor_part=WireTensor(b"x" * LARGE))
