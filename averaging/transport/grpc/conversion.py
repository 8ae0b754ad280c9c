"""Converts the dataclasses of `averaging.protocol.messages` to and from bytes.

Every `decode_…` raises ProtocolViolationError if the bytes are not such a message or contain unknown names. Only this
module, `status_conversion` and `receipt_conversion` use the generated classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from averaging.errors import ProtocolViolationError
from averaging.protocol import (
    AveragingData,
    Digest,
    DownloadData,
    ExchangeReply,
    JoinRequest,
    MessageCode,
    MessageFromLeader,
    Record,
    Refusal,
    Rumour,
    WireTensor,
)
from averaging.transport.grpc.channel_options import MAX_DIMENSIONS, MAX_MEMBERS, MAX_RECORDS, MAX_RUMOURS, check_count
from averaging.wire import averaging_pb2, gossip_pb2, runtime_pb2

M = TypeVar("M", bound=Message)

_PART = averaging_pb2.AveragingData.DESCRIPTOR.fields_by_name["tensor_part"].number
_CHUNK = averaging_pb2.DownloadData.DESCRIPTOR.fields_by_name["tensor_part"].number

_BUFFER = runtime_pb2.Tensor.DESCRIPTOR.fields_by_name["buffer"].number


def parse(message: M, raw: bytes) -> M:
    """Parses `raw` into `message`.

    Raises:
        ProtocolViolationError: `raw` is not such a message.
    """
    try:
        message.ParseFromString(raw)
    except DecodeError:
        raise ProtocolViolationError(f"{len(raw)} bytes that are not a {message.DESCRIPTOR.full_name}") from None
    return message


def _code(number: int) -> MessageCode:
    try:
        return MessageCode(number)
    except ValueError:
        raise ProtocolViolationError(f"unknown message code {number}") from None


def encode_nothing(_: None) -> bytes:
    """A request without fields."""
    return b""


def decode_nothing(_: bytes) -> None:
    """A request without fields. Content is ignored, as protobuf ignores unknown fields."""


# Averaging


def encode_join_request(request: JoinRequest) -> bytes:
    """JoinRequest."""
    return averaging_pb2.JoinRequest(
        endpoint=request.endpoint,
        schema_hash=request.schema_hash,
        expiration=request.expiration,
        gather=request.gather,
        client_mode=request.client_mode,
    ).SerializeToString()


def decode_join_request(raw: bytes) -> JoinRequest:
    """JoinRequest."""
    wire = parse(averaging_pb2.JoinRequest(), raw)
    return JoinRequest(wire.endpoint, wire.schema_hash, wire.expiration, wire.gather, wire.client_mode)


def encode_message_from_leader(message: MessageFromLeader) -> bytes:
    """MessageFromLeader."""
    return averaging_pb2.MessageFromLeader(
        code=averaging_pb2.MessageCode.ValueType(message.code),
        group_id=message.group_id,
        suggested_leader=message.suggested_leader,
        ordered_group_endpoints=message.ordered_group_endpoints,
        gathered=message.gathered,
    ).SerializeToString()


def decode_message_from_leader(raw: bytes) -> MessageFromLeader:
    """MessageFromLeader."""
    wire = parse(averaging_pb2.MessageFromLeader(), raw)
    return MessageFromLeader(
        _code(wire.code),
        wire.group_id,
        wire.suggested_leader,
        tuple(check_count(wire.ordered_group_endpoints, MAX_MEMBERS, "members")),
        tuple(check_count(wire.gathered, MAX_MEMBERS, "members")),
    )


def encode_averaging_data(data: AveragingData) -> bytes:
    """AveragingData. It carries the tensors, so its cost matters; the result is cached in `data`."""
    if not data.encoded:
        outer = _encode_outer(data.code, data.group_id, data.endpoint, data.metadata)
        data.encoded.append(_join(outer, _PART, data.tensor_part))
    return data.encoded[0]


@lru_cache(maxsize=16)
def _encode_outer(code: MessageCode, group_id: bytes, endpoint: str, metadata: bytes) -> bytes:
    """AveragingData without its tensor."""
    return averaging_pb2.AveragingData(
        code=averaging_pb2.MessageCode.ValueType(code), group_id=group_id, endpoint=endpoint, metadata=metadata
    ).SerializeToString()


def decode_averaging_data(raw: bytes) -> AveragingData:
    """AveragingData."""
    wire = parse(averaging_pb2.AveragingData(), raw)
    return AveragingData(_code(wire.code), wire.group_id, wire.endpoint, _tensor_from_wire(wire), wire.metadata)


def encode_download_data(data: DownloadData) -> bytes:
    """DownloadData."""
    outer = averaging_pb2.DownloadData(metadata=data.metadata).SerializeToString()
    return _join(outer, _CHUNK, data.tensor_part)


def decode_download_data(raw: bytes) -> DownloadData:
    """DownloadData."""
    wire = parse(averaging_pb2.DownloadData(), raw)
    return DownloadData(wire.metadata, _tensor_from_wire(wire))


def _join(outer: bytes, field: int, tensor: WireTensor | None) -> bytes:
    """Appends the field `field` with a tensor to an encoded message, with one copy of the buffer instead of three."""
    if tensor is None:
        return outer
    nbytes = len(tensor.buffer)
    head = _encode_head(
        field, tensor.size, tensor.dtype, tensor.compression, tensor.chunks, tensor.requires_grad, nbytes
    )
    return b"".join((outer, head, tensor.buffer))


@lru_cache(maxsize=256)
def _encode_head(
    field: int,
    size: tuple[int, ...],
    dtype: str,
    compression: int,
    chunks: int,
    requires_grad: bool,
    nbytes: int,
) -> bytes:
    """Encodes a tensor up to its buffer, its last field. All parts of one size have the same head."""
    tensor = runtime_pb2.Tensor(
        size=size,
        requires_grad=requires_grad,
        dtype=dtype,
        compression=runtime_pb2.CompressionType.ValueType(compression),
        chunks=chunks,
    )
    inner = tensor.SerializeToString() + (_length_prefix(_BUFFER, nbytes) if nbytes else b"")
    return _length_prefix(field, len(inner) + nbytes) + inner


def _length_prefix(field: int, nbytes: int) -> bytes:
    """Encodes what precedes the content of a field with a length: two varints."""
    encoded = bytearray()
    for value in (field << 3 | 2, nbytes):
        while value > 0x7F:
            encoded.append(value & 0x7F | 0x80)
            value >>= 7
        encoded.append(value)
    return bytes(encoded)


def _tensor_from_wire(message: averaging_pb2.AveragingData | averaging_pb2.DownloadData) -> WireTensor | None:
    """Returns the tensor of a message, if it has one."""
    if not message.HasField("tensor_part"):
        return None
    wire = message.tensor_part
    if wire.chunks < 0:
        raise ProtocolViolationError(f"a tensor in {wire.chunks} chunks")
    return WireTensor(
        buffer=wire.buffer,
        size=tuple(check_count(wire.size, MAX_DIMENSIONS, "dimensions")),
        dtype=wire.dtype,
        compression=wire.compression,
        chunks=wire.chunks,
        requires_grad=wire.requires_grad,
    )


# Discovery


def encode_digest(digest: Digest) -> bytes:
    """Digest."""
    return gossip_pb2.Digest(
        run_id=digest.run_id,
        endpoint=digest.endpoint,
        state_hash=digest.state_hash,
        entries=[gossip_pb2.DigestEntry(id=id, version=version) for id, version in digest.entries],
        complete=digest.complete,
        sent=digest.sent,
    ).SerializeToString()


def decode_digest(raw: bytes) -> Digest:
    """Digest."""
    wire = parse(gossip_pb2.Digest(), raw)
    entries = tuple((entry.id, entry.version) for entry in check_count(wire.entries, MAX_RECORDS, "entries"))
    return Digest(wire.run_id, wire.endpoint, wire.state_hash, entries, wire.complete, wire.sent)


def encode_exchange_reply(reply: ExchangeReply) -> bytes:
    """ExchangeReply."""
    records = [_record_to_wire(record) for record in reply.records]
    wire = gossip_pb2.ExchangeReply(records=records, wanted=reply.wanted, differs=reply.differs, sent=reply.sent)
    return wire.SerializeToString()


def decode_exchange_reply(raw: bytes) -> ExchangeReply:
    """ExchangeReply."""
    wire = parse(gossip_pb2.ExchangeReply(), raw)
    wanted = tuple(check_count(wire.wanted, MAX_RECORDS, "ids"))
    return ExchangeReply(_records_from_wire(wire.records), wanted, wire.differs, wire.sent)


def encode_rumours(request: tuple[str, tuple[Rumour, ...]]) -> bytes:
    """Rumours: (run id, rumours)."""
    run_id, rumours = request
    return gossip_pb2.Rumours(
        run_id=run_id,
        rumours=[
            gossip_pb2.Rumour(
                record=_record_to_wire(rumour.record), range_start=rumour.range_start, range_end=rumour.range_end
            )
            for rumour in rumours
        ],
    ).SerializeToString()


def decode_rumours(raw: bytes) -> tuple[str, tuple[Rumour, ...]]:
    """Rumours: (run id, rumours)."""
    wire = parse(gossip_pb2.Rumours(), raw)
    if not all(rumour.HasField("record") for rumour in check_count(wire.rumours, MAX_RUMOURS, "rumours")):
        raise ProtocolViolationError("a rumour without a record")
    rumours = (
        Rumour(_record_from_wire(rumour.record), rumour.range_start, rumour.range_end) for rumour in wire.rumours
    )
    return wire.run_id, tuple(rumours)


def encode_refusals(refusals: tuple[Refusal, ...]) -> bytes:
    """PushReply."""
    refused = [gossip_pb2.Refusal(key=one.key, subkey=one.subkey, reason=one.reason) for one in refusals]
    return gossip_pb2.PushReply(refused=refused).SerializeToString()


def decode_refusals(raw: bytes) -> tuple[Refusal, ...]:
    """PushReply."""
    wire = parse(gossip_pb2.PushReply(), raw)
    return tuple(Refusal(one.key, one.subkey, one.reason) for one in check_count(wire.refused, MAX_RUMOURS, "refusals"))


def encode_records(records: tuple[Record, ...]) -> bytes:
    """Records."""
    return gossip_pb2.Records(records=[_record_to_wire(record) for record in records]).SerializeToString()


def decode_records(raw: bytes) -> tuple[Record, ...]:
    """Records."""
    return _records_from_wire(parse(gossip_pb2.Records(), raw).records)


def encode_key(key: str) -> bytes:
    """ListRecordsRequest."""
    return gossip_pb2.ListRecordsRequest(key=key).SerializeToString()


def decode_key(raw: bytes) -> str:
    """ListRecordsRequest."""
    return parse(gossip_pb2.ListRecordsRequest(), raw).key


def _record_to_wire(record: Record) -> gossip_pb2.Record:
    return gossip_pb2.Record(
        key=record.key,
        subkey=record.subkey,
        value=record.value,
        version=record.version,
        expiration=record.expiration,
        withdrawn=record.withdrawn,
        owner=record.owner,
        signature=record.signature,
        claimed=record.claimed,
    )


def _records_from_wire(wires: Sequence[gossip_pb2.Record]) -> tuple[Record, ...]:
    return tuple(map(_record_from_wire, check_count(wires, MAX_RECORDS, "records")))


def _record_from_wire(wire: gossip_pb2.Record) -> Record:
    return Record(
        key=wire.key,
        subkey=wire.subkey,
        value=wire.value,
        version=wire.version,
        expiration=wire.expiration,
        withdrawn=wire.withdrawn,
        owner=wire.owner,
        signature=wire.signature,
        claimed=wire.claimed,
    )
