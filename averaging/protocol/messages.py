"""The messages between peers as plain dataclasses, with the fields of `protos/averaging/wire`.

The rest of the library uses these, so that only the gRPC transport depends on the generated classes.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import TypeAlias, cast

from averaging.common import choice, is_number, one_of
from averaging.errors import ConfigError


class MessageCode(IntEnum):
    """Answers and kinds of messages, see docs/reference/protocol.md."""

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
    """How a tensor is encoded on the wire. The numbers 5 to 15 are reserved for other software."""

    NONE = 0
    MEANSTD_16BIT = 1
    FLOAT16 = 2
    QUANTILE_8BIT = 3
    UNIFORM_8BIT = 4
    BFLOAT16 = 16
    BLOCKWISE_INT8 = 17
    TOP_K = 18
    """The largest elements of each block; a contribution. See `averaging.tensors.SparseTensor`."""
    TOP_K_UNION = 19
    """The average of contributions in TOP_K or VISIBLE; a reply."""
    VISIBLE = 20
    """The elements that change the weights in bfloat16; a contribution. See `averaging.tensors.VisibleTensor`."""

    @property
    def is_sparse(self) -> bool:
        """Whether it sends only some of the elements. The others encode each tensor as a whole."""
        return self >= CompressionType.TOP_K


COMPRESSIONS = {code.name.lower(): code for code in CompressionType if not code.is_sparse} | {
    "fp16": CompressionType.FLOAT16,
    "bf16": CompressionType.BFLOAT16,
    "int8": CompressionType.BLOCKWISE_INT8,
}
"""Compressions of any tensor, by the names that options accept."""

CHANGE_COMPRESSIONS = COMPRESSIONS | {"top_k": CompressionType.TOP_K, "visible": CompressionType.VISIBLE}
"""Compressions of changes, by the names that options accept."""

Buffer: TypeAlias = "bytes | memoryview"  # read-only bytes


def parse_compression(value: CompressionType | str) -> CompressionType:
    """Returns the compression that `value` is or names, see `CHANGE_COMPRESSIONS`; case does not matter."""
    return cast(CompressionType, choice(CHANGE_COMPRESSIONS).check("compression", value))


def _of_any_tensor(value: CompressionType | str) -> CompressionType:
    code = cast(CompressionType, choice(CHANGE_COMPRESSIONS).convert(value))
    if code.is_sparse:
        raise ConfigError(
            f"{code.name.lower()} sends some changes only; give it to a strategy that averages changes, as in "
            f'DiLoCo(compression="{code.name.lower()}")'
        )
    return code


TENSOR_COMPRESSION = replace(choice(COMPRESSIONS), accepts=choice(CHANGE_COMPRESSIONS).accepts, convert=_of_any_tensor)
"""The option for the compression of any tensor. It refuses those of changes with a reason."""


class MeanOver(StrEnum):
    """Over which members the mean of an element is taken if only some of them sent it."""

    SENDERS = "senders"
    """Over those that sent it."""
    ALL = "all"
    """Over all members of the round; the others count as 0."""


KEPT_BITS = (2, 4, 8)  # bits of a value that TOP_K keeps


@dataclass(frozen=True)
class TopK:
    """What the members of a round must have alike to average in TOP_K.

    Attributes:
        density: share of the elements of each block that is sent, above 0 and at most 1.
        bits: bits of a kept value: 2, 4 or 8.
        mean_over: a `MeanOver`, or its name.

    Raises:
        ConfigError: an attribute is invalid; the message names the option.
    """

    density: float = 1 / 64
    bits: int = 2
    mean_over: MeanOver = MeanOver.SENDERS

    def __post_init__(self) -> None:
        if not (is_number(self.density) and 0 < self.density <= 1):
            raise ConfigError(
                f"density, the share of the elements that is sent, must be above 0 and at most 1, not {self.density!r}",
                "density",
            )
        if self.bits not in KEPT_BITS:
            raise ConfigError(f"bits, of each value that is sent, must be 2, 4 or 8, not {self.bits!r}", "bits")
        object.__setattr__(self, "density", float(self.density))
        object.__setattr__(self, "bits", int(self.bits))
        object.__setattr__(self, "mean_over", one_of(MeanOver, self.mean_over, "mean_over"))

    def kept(self, size: int) -> int:
        return max(1, round(size * self.density))


@dataclass(frozen=True, slots=True)
class WireTensor:
    """An encoded tensor, or a chunk of one."""

    buffer: Buffer = b""  # little-endian bytes, read-only; the layout depends on `compression`
    size: tuple[int, ...] = ()  # shape; empty in every chunk but the first
    dtype: str = ""  # numpy's name, or the name that the codec defines; empty in every chunk but the first
    compression: int = CompressionType.NONE  # a `CompressionType`, or an unknown number
    chunks: int = 0  # number of messages that the tensor is split into; 0 if this one holds all of it
    requires_grad: bool = False

    def with_buffer(self, buffer: Buffer) -> WireTensor:
        return WireTensor(buffer, self.size, self.dtype, self.compression, self.chunks, self.requires_grad)


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A request to join the group of the called peer.

    Attributes:
        expiration: end of the follower's wait for a group, in seconds since the epoch.
        min_group_size: the smallest group that the follower accepts; sent in a header of the call.
        names: digest of the names of its tensors, see `Schema.names`; sent in a header as well.
        joins_parts: whether it can send several small slices of tensors as one part; sent in a header as well.
        large_parts: whether it wants larger parts than the schema's, since its network is fast; sent in a header as
            well.
    """

    endpoint: str
    schema_hash: bytes
    expiration: float
    gather: bytes = b""
    client_mode: bool = False
    min_group_size: int = 2
    names: str = ""
    joins_parts: bool = False
    large_parts: bool = False


@dataclass(frozen=True, slots=True)
class MessageFromLeader:
    """The answer to a join request, or the fate of the group later."""

    code: MessageCode
    group_id: bytes = b""
    suggested_leader: str = ""
    ordered_group_endpoints: tuple[str, ...] = ()
    gathered: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class AveragingData:
    """A part for its reducer, an average for its sender, or the code of an error."""

    code: MessageCode = MessageCode.NO_CODE
    group_id: bytes = b""
    endpoint: str = ""
    tensor_part: WireTensor | None = None
    # the encoded message, kept by the transport, since one average goes to every sender
    encoded: list[bytes] = field(default_factory=list, compare=False, repr=False)

    def with_tensor(self, tensor: WireTensor | None) -> AveragingData:
        return AveragingData(self.code, self.group_id, self.endpoint, tensor)


@dataclass(frozen=True, slots=True)
class DownloadData:
    """A chunk of a state; the first message carries the metadata."""

    metadata: bytes = b""
    tensor_part: WireTensor | None = None

    def with_tensor(self, tensor: WireTensor | None) -> DownloadData:
        return DownloadData(self.metadata, tensor)


@dataclass(frozen=True, slots=True)
class Resume:
    """What a newcomer already has of a state, and in which form it takes the rest."""

    offset: int = 0  # number of bytes of the tensors, in order, that it has
    fingerprint: bytes = b""  # fingerprint of the tensors to which they belong, see `averaging.state.manifest`
    joins: bool = False  # whether a message may have several small tensors


@dataclass(frozen=True, slots=True)
class Record:
    """A record of discovery, signed by its owner.

    Attributes:
        version: the record with the highest version of its owner, key and subkey is valid.
        expiration: seconds since the epoch.
        owner: Ed25519 public key, 32 bytes.
        signature: signature of the owner over all other fields and the run id.
        claimed: the version with which the owner claimed (key, subkey). The owner with the lowest one holds it.
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
    """The records that a peer holds: their ids and versions, or only a hash over all of them.

    Attributes:
        endpoint: the caller's; empty for a client.
        entries: (id, version) of every record, if `complete`.
        sent: time of its creation by the caller's clock, in seconds since the epoch; 0 if unknown.
    """

    run_id: str
    endpoint: str
    state_hash: int
    entries: tuple[tuple[int, int], ...] = ()
    complete: bool = False
    sent: float = 0.0


@dataclass(frozen=True, slots=True)
class ExchangeReply:
    """Records that the caller lacks, ids of those that the callee lacks, or only that something differs."""

    records: tuple[Record, ...] = ()
    wanted: tuple[int, ...] = ()
    differs: bool = False
    sent: float = 0.0  # time of its creation by the callee's clock, in seconds since the epoch; 0 if unknown


@dataclass(frozen=True, slots=True)
class Rumour:
    """A new record, and the range of peer hashes to which the callee forwards it; (0, 0): none.

    Both ends are included. A range whose end is below its start wraps around after the largest hash.
    """

    record: Record
    range_start: int = 0
    range_end: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A record that was not accepted, and why."""

    key: str
    subkey: str
    reason: str
