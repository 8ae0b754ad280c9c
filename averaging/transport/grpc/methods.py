"""Every method of a peer, for both sides: its path, its messages, and the checks of their content."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from types import NoneType
from typing import Any

from averaging.errors import ConfigError, ProtocolViolationError
from averaging.protocol import (
    MEAN,
    Aggregation,
    CompressionType,
    Digest,
    ExchangeReply,
    JoinRequest,
    MessageFromLeader,
    Record,
    Refusal,
    Rumour,
    TopK,
    parse_aggregation,
)
from averaging.receipts import (
    MAX_READERS,
    Account,
    Drift,
    LateArrival,
    PeerStatus,
    Receipt,
    Totals,
    TrainingProgress,
    Watched,
)
from averaging.tensors import DTYPES, Schema, TensorSpec
from averaging.timing import Phase
from averaging.transport import RpcMethod
from averaging.transport.grpc import channel_options as limits
from averaging.transport.grpc.conversion import AVERAGING_DATA, DOWNLOAD_DATA, MessageCopier, Rule
from averaging.wire import averaging_pb2, gossip_pb2, status_pb2

_AVERAGING = "/DecentralizedAveraging"
_GOSSIP = "/averaging.gossip.v1.Gossip"
STATUS = "/averaging.status.v1.Status"

# Averaging

JOIN_GROUP = RpcMethod(
    f"{_AVERAGING}/rpc_join_group",
    MessageCopier(JoinRequest, averaging_pb2.JoinRequest),
    MessageCopier(
        MessageFromLeader,
        averaging_pb2.MessageFromLeader,
        ordered_group_endpoints=Rule(limits.MAX_MEMBERS, "members"),
        gathered=Rule(limits.MAX_MEMBERS, "members"),
    ),
    replies_stream=True,
    max_request_bytes=limits.JOIN_BYTES,
    sender=lambda request: request.endpoint,
)
AGGREGATE_PART = RpcMethod(
    f"{_AVERAGING}/rpc_aggregate_part",
    AVERAGING_DATA,
    AVERAGING_DATA,
    requests_stream=True,
    replies_stream=True,
    max_request_bytes=None,
    sender=lambda message: message.endpoint,
)
DOWNLOAD_STATE = RpcMethod(
    f"{_AVERAGING}/rpc_download_state",
    MessageCopier(NoneType, averaging_pb2.DownloadRequest),
    DOWNLOAD_DATA,
    replies_stream=True,
)

# Discovery. Records carry signatures, so `Push` names no sender.

RECORD = MessageCopier(Record, gossip_pb2.Record)  # one record, also as it stands in etcd
_MAX_RECORDS = Rule(limits.MAX_RECORDS, "records")
_RECORDS = MessageCopier(tuple[Record, ...], gossip_pb2.Records, records=_MAX_RECORDS)
_DIGEST = MessageCopier(Digest, gossip_pb2.Digest, entries=Rule(limits.MAX_RECORDS, "entries"))

EXCHANGE = RpcMethod(
    f"{_GOSSIP}/Exchange",
    _DIGEST,
    MessageCopier(
        ExchangeReply,
        gossip_pb2.ExchangeReply,
        records=_MAX_RECORDS,
        wanted=Rule(limits.MAX_RECORDS, "ids"),
    ),
    replies_stream=True,
    max_request_bytes=limits.DIGEST_BYTES,
    max_reply_bytes=limits.RECORDS_BYTES,
    sender=lambda digest: digest.endpoint,
)
PUSH = RpcMethod(
    f"{_GOSSIP}/Push",
    MessageCopier(tuple[str, tuple[Rumour, ...]], gossip_pb2.Rumours, rumours=Rule(limits.MAX_RUMOURS, "rumours")),
    MessageCopier(tuple[Refusal, ...], gossip_pb2.PushReply, refused=Rule(limits.MAX_RUMOURS, "refusals")),
    max_request_bytes=limits.RECORDS_BYTES,
    max_reply_bytes=limits.REFUSALS_BYTES,
)
SUBSCRIBE = RpcMethod(
    f"{_GOSSIP}/Subscribe",
    _DIGEST,
    _RECORDS,
    replies_stream=True,
    max_request_bytes=limits.DIGEST_BYTES,
    max_reply_bytes=limits.RECORDS_BYTES,
    sender=lambda digest: digest.endpoint,
)
LIST_RECORDS = RpcMethod(f"{_GOSSIP}/ListRecords", MessageCopier(str, gossip_pb2.ListRecordsRequest), _RECORDS)

# Status. Peers of other releases may omit fields of receipts; `gathered` is not sent.


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _number(value: float) -> float:
    return value if isfinite(value) else 0.0


def _numbers(values: Mapping[str, float]) -> Mapping[str, float]:
    return {name: value for name, value in values.items() if isfinite(value)}


def _late(late: LateArrival) -> LateArrival | None:
    return late if isfinite(late.seconds) else None


_COUNTS = Rule(limits.MAX_COUNTS, "counts")
_FINITE, _NUMBER = Rule(read=_finite), Rule(read=_number)

_RECEIPT = MessageCopier(
    Receipt,
    status_pb2.Receipt,
    accounts=Rule(
        copier=MessageCopier(Account, status_pb2.MemberAccount, waited=_FINITE, step_rate=_FINITE, discount=_FINITE)
    ),
    drift=Rule(copier=MessageCopier(Drift, status_pb2.Drift, size=_FINITE)),
    last_to_arrive=Rule(read=_late),
)


class _StatusCopier(MessageCopier[PeerStatus]):
    """The group of a status is a message of its own, absent outside a round."""

    def write(self, content: PeerStatus) -> Any:
        message: Any = super().write(content)
        if content.group_id:
            message.current_group.group_id = content.group_id
            message.current_group.members.extend(content.members)
        return message

    def read(self, message: Any) -> PeerStatus:
        group = message.current_group
        known = {"group_id": group.group_id, "members": tuple(group.members)}
        status: PeerStatus = self._make(known | self._values(message))
        return status


_TRAINING = MessageCopier(
    TrainingProgress,
    status_pb2.TrainingProgress,
    gathered=_NUMBER,
    samples=_NUMBER,
    steps_per_second=_FINITE,
    samples_per_second=_FINITE,
    grace=_FINITE,
    max_grace=_FINITE,
)

_TOTALS = MessageCopier(
    Totals,
    status_pb2.Totals,
    rounds=_COUNTS,
    seconds=_NUMBER,
    phase_seconds=Rule(limits.MAX_COUNTS, "phases", read=_numbers),
    bytes_sent=_COUNTS,
    bytes_received=_COUNTS,
    waiting_seconds=_NUMBER,
    dropped=_COUNTS,
)

_PHASES = frozenset(Phase)

GET_STATUS = RpcMethod(
    f"{STATUS}/GetStatus",
    MessageCopier(tuple[int, int, bool], status_pb2.GetStatusRequest),
    _StatusCopier(
        PeerStatus,
        status_pb2.PeerStatus,
        last_round=Rule(copier=_RECEIPT),
        receipts=Rule(limits.MAX_RECEIPTS, "receipts", copier=_RECEIPT),
        peers=Rule(limits.MAX_RECORDS, "peers"),
        training=Rule(copier=_TRAINING),
        totals=Rule(copier=_TOTALS),
        readers=Rule(MAX_READERS, "readers"),
        # Later releases may add phases.
        deadlines=Rule(select=lambda deadlines: [learned for learned in deadlines if learned.phase in _PHASES]),
    ),
)
WATCH_ROUNDS = RpcMethod(
    f"{STATUS}/WatchRounds",
    MessageCopier(int, status_pb2.WatchRoundsRequest),
    MessageCopier(Watched, status_pb2.WatchedRound, receipt=Rule(copier=_RECEIPT)),
    replies_stream=True,
)


class _SchemaCopier(MessageCopier[Schema]):
    def write(self, content: Schema) -> Any:
        message: Any = super().write(content)
        message.schema_hash = content.hash
        return message

    def read(self, message: Any) -> Schema:
        schema = super().read(message)
        if message.schema_hash != schema.hash:
            raise ProtocolViolationError("a schema that does not match its own hash; that peer runs other software")
        return schema


class _SpecCopier(MessageCopier[TensorSpec]):
    def read(self, message: Any) -> TensorSpec:
        for field, known in (("dtype", DTYPES), ("compression", CompressionType.__members__)):
            if (value := getattr(message, field)) not in known:
                raise ProtocolViolationError(
                    f"a schema in which tensor {message.name!r} has the unknown {field} {value!r}"
                )
        return super().read(message)


def _aggregation(text: str) -> Aggregation:
    try:
        return parse_aggregation(text) if text else MEAN
    except ConfigError:
        raise ProtocolViolationError(f"a schema with the unknown aggregation {text!r}") from None


class _TopKCopier(MessageCopier[TopK]):
    def read(self, message: Any) -> TopK:
        try:
            return super().read(message)
        except ConfigError as error:
            raise ProtocolViolationError(f"a schema with an invalid option of top_k: {error}") from None


_SPEC = _SpecCopier(
    TensorSpec,
    status_pb2.TensorSpec,
    shape=Rule(limits.MAX_DIMENSIONS, "dimensions"),
    compression=Rule(read=CompressionType.__getitem__, write=lambda compression: compression.name),
)

GET_SCHEMA = RpcMethod(
    f"{STATUS}/GetSchema",
    MessageCopier(NoneType, status_pb2.GetSchemaRequest),
    _SchemaCopier(
        Schema,
        status_pb2.Schema,
        tensors=Rule(limits.MAX_TENSORS, "tensors", copier=_SPEC),
        aggregation=Rule(read=_aggregation, write=lambda rule: "" if rule == MEAN else str(rule)),
        sparse=Rule(copier=_TopKCopier(TopK, status_pb2.TopK)),
    ),
)
