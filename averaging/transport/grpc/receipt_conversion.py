"""Converts receipts to and from the messages of `averaging.v1.Status`. `gathered` is not sent."""

from __future__ import annotations

from math import isfinite

from averaging.errors import ProtocolViolationError
from averaging.observe.drift import Drift, DriftKind
from averaging.observe.receipt_book import Watched
from averaging.observe.receipts import Account, DropCode, Dropped, LateArrival, Outcome, Receipt, Role, Straggler
from averaging.transport.grpc.conversion import parse
from averaging.wire import status_pb2


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
