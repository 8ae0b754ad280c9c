"""What peers say to each other, as plain dataclasses; field by field the messages of `protos/averaging/wire`.

The rest of the library works with these, so that only the gRPC transport knows the generated classes.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from averaging.common.validation import named


class MessageCode(IntEnum):
    """The verdicts and kinds of message, see docs/protocol.md."""

    NO_CODE = 0
    REQUEST_JOIN = 1
    ACCEPTED = 2
    BEGIN_ALLREDUCE = 3
    PART_FOR_AVERAGING = 4
    AVERAGED_PART = 5
    NOT_DECLARED = 6
    NOT_A_LEADER = 7
    BAD_EXPIRATION_TIME = 8
    BAD_SCHEMA_HASH = 9
    BAD_GROUP_ID = 10
    DUPLICATE_ENDPOINT = 11
    GROUP_IS_FULL = 12
    NOT_LOOKING_FOR_GROUP = 13
    PROTOCOL_VIOLATION = 14
    INTERNAL_ERROR = 15
    CANCELLED = 16
    GROUP_DISBANDED = 17


class CompressionType(IntEnum):
    """How the numbers of a tensor are packed on the wire; 5 to 15 are not ours to use."""

    NONE = 0
    MEANSTD_16BIT = 1
    FLOAT16 = 2
    QUANTILE_8BIT = 3
    UNIFORM_8BIT = 4
    BFLOAT16 = 16
    BLOCKWISE_INT8 = 17


COMPRESSIONS = {code.name.lower(): code for code in CompressionType} | {
    "fp16": CompressionType.FLOAT16,
    "bf16": CompressionType.BFLOAT16,
    "int8": CompressionType.BLOCKWISE_INT8,
}
"""What compressions are called."""

Buffer: TypeAlias = "bytes | memoryview"
"""Bytes that nobody writes to."""


def parse_compression(value: CompressionType | str) -> CompressionType:
    """The code that is meant, by itself or by its name, in capitals or not, see `COMPRESSIONS`.

    Raises:
        ConfigError: there is no such code; the message lists them.
    """
    return named(COMPRESSIONS, CompressionType, value, "compression")


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor, or a chunk of one, as it travels.

    Attributes:
        buffer: little-endian bytes; their layout depends on `compression`. Nobody writes to them.
        size: shape; empty in every chunk but the first.
        dtype: numpy's name, or the code's own; empty in every chunk but the first.
        compression: a `CompressionType`, or the number of one that this peer does not know.
        chunks: how many messages the tensor is cut into; 0 = this one holds all of it.
    """

    buffer: Buffer = b""
    size: tuple[int, ...] = ()
    dtype: str = ""
    compression: int = CompressionType.NONE
    chunks: int = 0
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A follower asks the callee to lead it.

    Attributes:
        expiration: until when it waits for a group, in seconds since the epoch.
        min_group_size: it takes part in no smaller group. This travels in a header of the call, not in the message.
    """

    endpoint: str
    schema_hash: bytes
    expiration: float
    gather: bytes = b""
    client_mode: bool = False
    min_group_size: int = 2


@dataclass(frozen=True, slots=True)
class MessageFromLeader:
    """A verdict on a request to join, or what became of the group."""

    code: MessageCode
    group_id: bytes = b""
    suggested_leader: str = ""
    ordered_group_endpoints: tuple[str, ...] = ()
    gathered: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class AveragingData:
    """A part on its way to its reducer, its average on the way back, or the code of an error.

    Attributes:
        metadata: in the first message of a stream, see `group.pack_metadata`; empty in messages of other software.
        encoded: the message as bytes, left here by a transport, since the same average goes to every sender.
    """

    code: MessageCode = MessageCode.NO_CODE
    group_id: bytes = b""
    endpoint: str = ""
    tensor_part: WireTensor | None = None
    metadata: bytes = b""
    encoded: list[bytes] = field(default_factory=list, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class DownloadData:
    """A chunk of a state; the first message carries the metadata."""

    metadata: bytes = b""
    tensor_part: WireTensor | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """What a reader of a state has of it already.

    Attributes:
        offset: bytes of the tensors, in their order, that need not come.
        fingerprint: of the tensors to which they belong, see `averaging.state.manifest`.
    """

    offset: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A record of discovery, signed by its owner.

    Attributes:
        version: of an owner's records with the same key and subkey the highest counts.
        expiration: seconds since the epoch.
        owner: Ed25519 public key, 32 bytes.
        signature: by the owner, over everything else and the run id.
        claimed: the version with which the owner took (key, subkey); of several owners' the lowest holds it.
    """

    key: str
    subkey: str
    value: bytes
    version: int
    expiration: float
    withdrawn: bool = False
    owner: bytes = b""
    signature: bytes = b""
    claimed: int = 0


@dataclass(frozen=True, slots=True)
class Digest:
    """What a peer holds: record ids and versions, or only the hash over all of them.

    Attributes:
        endpoint: the caller's; empty for a client.
        entries: (id, version) of every record, if `complete`.
        sent: when it was made, by the caller's clock, in seconds since the epoch; 0 if that is not told.
    """

    run_id: str
    endpoint: str
    state_hash: int
    entries: tuple[tuple[int, int], ...] = ()
    complete: bool = False
    sent: float = 0.0


@dataclass(frozen=True, slots=True)
class ExchangeReply:
    """Records the caller lacks, ids of those the callee lacks, or only that something differs.

    Attributes:
        sent: when it was made, by the callee's clock, in seconds since the epoch; 0 if that is not told.
    """

    records: tuple[Record, ...] = ()
    wanted: tuple[int, ...] = ()
    differs: bool = False
    sent: float = 0.0


@dataclass(frozen=True, slots=True)
class Rumour:
    """A fresh record, and the range of peer hashes that the callee is to tell; (0, 0): none.

    Both ends are included; a range whose end is below its start goes on from 0 after the largest hash.
    """

    record: Record
    range_start: int = 0
    range_end: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A record that was not taken, and why."""

    key: str
    subkey: str
    reason: str
