"""Converts a peer's status and schema to and from the messages of `averaging.v1.Status`."""

from __future__ import annotations

from averaging.deadlines.learned_deadlines import Learned, Phase
from averaging.errors import ConfigError, ProtocolViolationError
from averaging.observe.status import PeerStatus
from averaging.protocol.aggregation import MEAN, parse_aggregation
from averaging.protocol.messages import CompressionType
from averaging.protocol.schema import DTYPES, ReplyForm, Schema, TensorSpec
from averaging.transport.grpc.conversion import parse
from averaging.transport.grpc.message_limits import MAX_DIMENSIONS, MAX_TENSORS, check_count
from averaging.transport.grpc.receipt_conversion import receipt_from_wire, receipt_to_wire
from averaging.wire import status_pb2

_PHASES = frozenset(Phase)


def encode_status(status: PeerStatus) -> bytes:
    """PeerStatus."""
    in_round = bool(status.group_id)
    return status_pb2.PeerStatus(
        endpoint=status.endpoint,
        run_id=status.run_id,
        mode=status.mode,
        software=status.software,
        started=status.started,
        schema_hash=status.schema_hash,
        group_key=status.group_key,
        looking=status.looking,
        declared_expiration=status.declared_expiration,
        leader=status.leader,
        current_group=status_pb2.CurrentGroup(group_id=status.group_id, members=status.members) if in_round else None,
        last_round=None if status.last_round is None else receipt_to_wire(status.last_round),
        rounds=status.rounds,
        state_version=status.state_version,
        known_peers=status.known_peers,
        deadlines=map(_learned_to_wire, status.deadlines),
    ).SerializeToString()


def _learned_to_wire(learned: Learned) -> status_pb2.LearnedDeadline:
    return status_pb2.LearnedDeadline(
        endpoint=learned.endpoint,
        phase=learned.phase.value,
        size=learned.size,
        waits=learned.waits,
        median=learned.median,
        deadline=learned.deadline,
        basis=learned.basis,
    )


def decode_status(raw: bytes) -> PeerStatus:
    """PeerStatus, without `gathered` of the last round."""
    wire = parse(status_pb2.PeerStatus(), raw)
    return PeerStatus(
        endpoint=wire.endpoint,
        run_id=wire.run_id,
        mode=wire.mode,
        software=wire.software,
        started=wire.started,
        schema_hash=wire.schema_hash,
        group_key=wire.group_key,
        looking=wire.looking,
        declared_expiration=wire.declared_expiration,
        leader=wire.leader,
        group_id=wire.current_group.group_id,
        members=tuple(wire.current_group.members),
        last_round=receipt_from_wire(wire.last_round) if wire.HasField("last_round") else None,
        rounds=wire.rounds,
        state_version=wire.state_version,
        known_peers=wire.known_peers,
        deadlines=tuple(
            Learned(one.endpoint, Phase(one.phase), one.size, one.waits, one.median, one.deadline, one.basis)
            for one in wire.deadlines
            if one.phase in _PHASES  # later releases may add phases
        ),
    )


def encode_schema(schema: Schema) -> bytes:
    """Schema."""
    return status_pb2.Schema(
        schema_hash=schema.hash,
        tensors=[
            status_pb2.TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape, compression=spec.compression.name)
            for spec in schema.tensors
        ],
        part_size_bytes=schema.part_size_bytes,
        reply=schema.reply.value,
        topic=schema.topic,
        aggregation="" if schema.aggregation == MEAN else str(schema.aggregation),
    ).SerializeToString()


def decode_schema(raw: bytes) -> Schema:
    """Schema. Its hash must match the received one."""
    wire = parse(status_pb2.Schema(), raw)
    try:
        reply = ReplyForm(wire.reply)
    except ValueError:
        raise ProtocolViolationError(f"a schema with the unknown reply form {wire.reply!r}") from None
    try:
        aggregation = parse_aggregation(wire.aggregation) if wire.aggregation else MEAN
    except ConfigError:
        raise ProtocolViolationError(f"a schema with the unknown aggregation {wire.aggregation!r}") from None
    schema = Schema(
        tuple(map(_spec_from_wire, check_count(wire.tensors, MAX_TENSORS, "tensors"))),
        wire.part_size_bytes,
        reply,
        wire.topic,
        aggregation,
    )
    if wire.schema_hash != schema.hash:
        raise ProtocolViolationError("a schema that does not match its own hash; that peer runs other software")
    return schema


def _spec_from_wire(wire: status_pb2.TensorSpec) -> TensorSpec:
    if wire.dtype not in DTYPES:
        raise ProtocolViolationError(f"a schema in which tensor {wire.name!r} has the unknown dtype {wire.dtype!r}")
    try:
        compression = CompressionType[wire.compression]
    except KeyError:
        raise ProtocolViolationError(
            f"a schema in which tensor {wire.name!r} has the unknown compression {wire.compression!r}"
        ) from None
    return TensorSpec(wire.name, wire.dtype, tuple(check_count(wire.shape, MAX_DIMENSIONS, "dimensions")), compression)
