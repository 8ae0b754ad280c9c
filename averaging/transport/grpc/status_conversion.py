"""Converts a peer's status and schema to and from the messages of `averaging.status.v1.Status`."""

from __future__ import annotations

from math import isfinite

from averaging.errors import ConfigError, ProtocolViolationError
from averaging.protocol import MEAN, CompressionType, parse_aggregation
from averaging.receipts import (
    Account,
    Drift,
    DriftKind,
    DropCode,
    Dropped,
    LateArrival,
    Outcome,
    PeerStatus,
    Receipt,
    Role,
    Straggler,
    Watched,
)
from averaging.tensors import AVERAGED_DTYPES, ReplyForm, Schema, TensorSpec
from averaging.timing import Learned, Phase
from averaging.transport.grpc.channel_options import MAX_DIMENSIONS, MAX_TENSORS, check_count
from averaging.transport.grpc.conversion import parse
from averaging.wire import status_pb2

# Converts receipts to and from the messages of `averaging.status.v1.Status`. `gathered` is not sent.


def encode_watch_request(last: int) -> bytes:
    """WatchRoundsRequest."""
    return status_pb2.WatchRoundsRequest(last=last).SerializeToString()


def decode_watch_request(raw: bytes) -> int:
    """WatchRoundsRequest."""
    return parse(status_pb2.WatchRoundsRequest(), raw).last


def encode_watched(watched: Watched) -> bytes:
    """WatchedRound."""
    return status_pb2.WatchedRound(
        receipt=receipt_to_wire(watched.receipt), skipped=watched.skipped
    ).SerializeToString()


def decode_watched(raw: bytes) -> Watched:
    """WatchedRound."""
    wire = parse(status_pb2.WatchedRound(), raw)
    return Watched(receipt_from_wire(wire.receipt), wire.skipped)


def receipt_to_wire(receipt: Receipt) -> status_pb2.Receipt:
    """Receipt."""
    straggler, late = receipt.straggler, receipt.last_to_arrive
    return status_pb2.Receipt(
        round=receipt.round,
        outcome=receipt.outcome.value,
        reason=receipt.reason,
        members=receipt.members,
        dropped=map(_dropped_to_wire, receipt.dropped),
        seconds=receipt.seconds,
        allreduce_seconds=receipt.allreduce_seconds,
        bytes_sent=receipt.bytes_sent,
        bytes_received=receipt.bytes_received,
        run_id=receipt.run_id,
        endpoint=receipt.endpoint,
        topic=receipt.topic,
        started=receipt.started,
        group_id=receipt.group_id,
        role=receipt.role.value if receipt.role else "",
        accounts=map(_account_to_wire, receipt.accounts),
        phases=[status_pb2.Phase(name=name, seconds=seconds) for name, seconds in receipt.phases.items()],
        straggler=status_pb2.Straggler(endpoint=straggler.endpoint, seconds=straggler.seconds, what=straggler.what)
        if straggler
        else None,
        digest=receipt.digest,
        kept_local=receipt.kept_local,
        state_version=receipt.state_version,
        state=receipt.state,
        last_to_arrive=status_pb2.LateArrival(endpoint=late.endpoint, seconds=late.seconds) if late else None,
        drift=map(_drift_to_wire, receipt.drift),
    )


def _drift_to_wire(drift: Drift) -> status_pb2.Drift:
    return status_pb2.Drift(
        endpoint=drift.endpoint,
        kind=drift.kind.value,
        name=drift.name,
        value=drift.value,
        expected=drift.expected,
        size=drift.size,
    )


def _dropped_to_wire(dropped: Dropped) -> status_pb2.DroppedMember:
    return status_pb2.DroppedMember(
        endpoint=dropped.endpoint,
        reason=dropped.reason,
        code=dropped.code.value,
        waited=dropped.waited,
        deadline=dropped.deadline,
        basis=dropped.basis,
    )


def _account_to_wire(account: Account) -> status_pb2.MemberAccount:
    return status_pb2.MemberAccount(
        endpoint=account.endpoint,
        role=account.role.value,
        mode=account.mode,
        weight=account.weight,
        share=account.share,
        bytes_sent=account.bytes_sent,
        bytes_received=account.bytes_received,
        digest=account.digest,
        waited=account.waited,
        step_rate=account.step_rate,
        lane=account.lane,
        lane_reason=account.lane_reason,
    )


def receipt_from_wire(wire: status_pb2.Receipt) -> Receipt:
    """Receipt. Peers of other releases may omit fields."""
    try:
        outcome = Outcome(wire.outcome)
    except ValueError:
        raise ProtocolViolationError(f"a receipt with the unknown outcome {wire.outcome!r}") from None
    straggler, late = wire.straggler, wire.last_to_arrive
    return Receipt(
        round=wire.round,
        outcome=outcome,
        reason=wire.reason,
        group_id=wire.group_id,
        members=tuple(wire.members),
        dropped=tuple(map(_dropped, wire.dropped)),
        seconds=wire.seconds,
        allreduce_seconds=wire.allreduce_seconds,
        bytes_sent=wire.bytes_sent,
        bytes_received=wire.bytes_received,
        kept_local=wire.kept_local,
        state_version=wire.state_version,
        run_id=wire.run_id,
        endpoint=wire.endpoint,
        topic=wire.topic,
        started=wire.started,
        role=_role(wire.role) if wire.role else None,
        accounts=tuple(map(_account, wire.accounts)),
        phases={phase.name: phase.seconds for phase in wire.phases},
        straggler=Straggler(straggler.endpoint, straggler.seconds, straggler.what)
        if wire.HasField("straggler")
        else None,
        digest=wire.digest,
        state=wire.state,
        last_to_arrive=LateArrival(late.endpoint, late.seconds)
        if wire.HasField("last_to_arrive") and isfinite(late.seconds)
        else None,
        drift=tuple(map(_drift, wire.drift)),
    )


def _drift(wire: status_pb2.Drift) -> Drift:
    size = wire.size if wire.HasField("size") and isfinite(wire.size) else None
    return Drift(wire.endpoint, DriftKind(wire.kind), wire.name, wire.value, wire.expected, size)


def _dropped(wire: status_pb2.DroppedMember) -> Dropped:
    return Dropped(
        wire.endpoint,
        wire.reason,
        DropCode(wire.code),
        wire.waited if wire.HasField("waited") else None,
        wire.deadline if wire.HasField("deadline") else None,
        wire.basis,
    )


def _account(wire: status_pb2.MemberAccount) -> Account:
    return Account(
        endpoint=wire.endpoint,
        role=_role(wire.role),
        mode=wire.mode,
        weight=wire.weight,
        share=wire.share,
        bytes_sent=wire.bytes_sent,
        bytes_received=wire.bytes_received,
        digest=wire.digest,
        waited=wire.waited if wire.HasField("waited") and isfinite(wire.waited) else None,
        step_rate=wire.step_rate if wire.HasField("step_rate") and isfinite(wire.step_rate) else None,
        lane=wire.lane,
        lane_reason=wire.lane_reason,
    )


def _role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        raise ProtocolViolationError(f"a receipt with the unknown role {name!r}") from None


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
    if wire.dtype not in AVERAGED_DTYPES:
        raise ProtocolViolationError(f"a schema in which tensor {wire.name!r} has the unknown dtype {wire.dtype!r}")
    try:
        compression = CompressionType[wire.compression]
    except KeyError:
        raise ProtocolViolationError(
            f"a schema in which tensor {wire.name!r} has the unknown compression {wire.compression!r}"
        ) from None
    return TensorSpec(wire.name, wire.dtype, tuple(check_count(wire.shape, MAX_DIMENSIONS, "dimensions")), compression)
