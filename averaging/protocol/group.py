"""A group of peers that average together: its rule, what each announced about itself, the group bits of its next round.

Pure.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from msgspec.msgpack import Ext

from averaging.common import CLIENT_PREFIX, is_number, pack, pack_user, unpack
from averaging.errors import ConfigError, ProtocolViolationError, ViolationKind

MAX_TRIM = 4096


class AggregationKind(StrEnum):
    """The aggregation rules, see docs/operate/robust.md."""

    MEAN = "mean"
    """The weighted mean."""
    MEDIAN = "median"
    """The median of each coordinate."""
    TRIMMED = "trimmed"
    """The weighted mean of each coordinate without its F smallest and F largest values."""
    CLIP = "clip"
    """CenteredClip: a mean in which each contribution's distance from the result is clipped to tau."""


class ReplyForm(StrEnum):
    """What a reducer returns for a part."""

    AVERAGE = "average"
    """The average, which all members adopt byte for byte."""
    DELTA = "delta"
    """The average minus the sender's part. The sender adds it to its tensor."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """A rule and its parameter; part of what a group agrees on."""

    kind: AggregationKind = AggregationKind.MEAN  # the rule
    parameter: float = 0.0  # f of `trimmed`, tau of `clip` (a distance, in the tensors' own unit); 0 for the others

    def __str__(self) -> str:
        if self.kind in _PARAMETERS:
            return f"{self.kind.value}:{self.parameter!r}".removesuffix(".0")
        return self.kind.value


MEAN = Aggregation()

_PARAMETERS = {AggregationKind.TRIMMED: "F", AggregationKind.CLIP: "TAU"}


def parse_aggregation(text: str) -> Aggregation:
    """Parses `mean`, `median`, `trimmed:F` or `clip:TAU`."""
    name, colon, number = text.partition(":")
    try:
        kind = AggregationKind(name)
        parameter = float(number) if colon else 0.0
    except ValueError:
        raise ConfigError(f"aggregation {text!r} must be mean, median, trimmed:F or clip:TAU") from None
    if bool(colon) != (kind in _PARAMETERS):
        problem = f"needs a number: {name}:{_PARAMETERS[kind]}" if kind in _PARAMETERS else "takes no number"
        raise ConfigError(f"aggregation {text!r}: {name} {problem}")
    if kind is AggregationKind.TRIMMED and not (parameter.is_integer() and 1 <= parameter <= MAX_TRIM):
        raise ConfigError(
            f"aggregation {text!r}: F, the number of values to drop on each side, must be 1 to {MAX_TRIM}"
        )
    if kind is AggregationKind.CLIP and not (math.isfinite(parameter) and parameter > 0):
        raise ConfigError(f"aggregation {text!r}: TAU, the clipping distance, must be finite and above 0")
    return Aggregation(kind, parameter)


MAX_GATHER_BYTES = 64 * 1024  # maximum size of what a peer announces to its group (its `gather`)
MAX_GROUP_SIZE = 4096  # the largest group that a follower accepts
GROUP_ID_BYTES, NONCE_BYTES = 20, 6

_WRAPPED_ARRAY = 0x40  # msgpack extension type in which other implementations pack the gather array


class Mode(IntEnum):
    """What a peer does in a round; the numbers are on the wire."""

    NODE = 0
    """Contributes tensors and reduces."""
    CLIENT = 1
    """Contributes tensors; accepts no connection, so it reduces nothing."""
    AUXILIARY = 2
    """Reduces; contributes no tensors and takes no result."""


@dataclass(frozen=True, slots=True)
class Member:
    """One peer of a group."""

    endpoint: str  # `host:port`, or `client::<uuid4>`
    weight: float = 1.0  # weight of its tensors in the average; finite and at least 0
    bandwidth: float | None = None  # bandwidth in bytes/s; None if it announced none
    mode: Mode = Mode.NODE
    user: Any = None  # the value that its application passed as `gather`; None if there is none or it is unreadable

    @property
    def sends(self) -> bool:
        return self.mode is not Mode.AUXILIARY

    @property
    def reduces(self) -> bool:
        return self.mode is not Mode.CLIENT


@dataclass(frozen=True, slots=True)
class Group:
    """An assembled group."""

    group_id: bytes  # the id on the wire; a secret of the members during the round
    # the members in the leader's order, the same at every member. The first is not necessarily the leader.
    members: tuple[Member, ...]
    leader: str = ""  # endpoint of the leader; empty if unknown
    # whether several small slices of tensors are one part, since all members can send them so. The id says it, see
    # `make_group_id`.
    joins_parts: bool = False
    # whether parts are larger than the schema's, since all members want that. The id says it as well.
    large_parts: bool = False

    @property
    def public_id(self) -> bytes:
        return hashlib.sha256(b"averaging.v1.GroupPublicId" + self.group_id).digest()[:20]

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    @property
    def total_weight(self) -> float:
        return sum(member.weight for member in self.members if member.sends)

    def index(self, endpoint: str) -> int:
        return self.endpoints.index(endpoint)


def make_group_id(
    nonce: bytes,
    endpoints: Sequence[str],
    gathered: Sequence[bytes],
    *,
    joins_parts: bool = False,
    large_parts: bool = False,
) -> bytes:
    """A random id of 20 bytes that is bound to these members, their order and their gathers.

    Args:
        nonce: 6 random bytes.
        endpoints: endpoints of the members, in order.
        gathered: their gathers, in the same order.
        joins_parts: whether all members join parts. It changes the id, which is how a leader tells them so that all
            come to the same parts, and other software sees 20 random bytes.
        large_parts: whether all members want large parts as well, which are also joined.
    """
    label = b"averaging.v1.GroupId"
    if large_parts:
        label += b".LargeParts"
    elif joins_parts:
        label += b".JoinedParts"
    commitment = hashlib.sha256(label + nonce + _canonical(endpoints, gathered)).digest()
    return nonce + commitment[: GROUP_ID_BYTES - NONCE_BYTES]


def id_says(
    group_id: bytes,
    endpoints: Sequence[str],
    gathered: Sequence[bytes],
    *,
    joins_parts: bool = False,
    large_parts: bool = False,
) -> bool:
    """Whether `make_group_id` made this id for these arguments."""
    nonce = group_id[:NONCE_BYTES]
    return group_id == make_group_id(nonce, endpoints, gathered, joins_parts=joins_parts, large_parts=large_parts)


def _canonical(endpoints: Sequence[str], gathered: Sequence[bytes]) -> bytes:
    pieces = [endpoint.encode(errors="surrogatepass") for endpoint in endpoints] + list(gathered)
    lengths = struct.pack(f"<{1 + len(pieces)}I", len(endpoints), *map(len, pieces))
    return lengths + b"".join(pieces)


def pack_gather(weight: float, bandwidth: float | None, mode: Mode, user: Any = None) -> bytes:
    """Packs what a peer announces to its group: msgpack of [weight, bandwidth or nil, mode, user bytes].

    Raises a ValueError if msgpack cannot pack `user`, other peers would refuse it, or the result is over 64 KiB.
    """
    try:
        packed = pack([float(weight), bandwidth, int(mode), pack_user(user)])
    except (TypeError, OverflowError) as error:
        raise ValueError(f"gather must consist of numbers, strings, bytes, lists and dicts: {error}") from None
    except ValueError as error:
        raise ValueError(f"gather would be refused by other peers: {error}") from None
    if len(packed) > MAX_GATHER_BYTES:
        raise ValueError(f"gather is {len(packed)} bytes packed, more than the {MAX_GATHER_BYTES} allowed")
    return packed


def unpack_gather(endpoint: str, gather: bytes) -> Member:
    """Unpacks what `endpoint` announced, or raises a ProtocolViolationError; nothing means weight 1, no bandwidth."""
    by_name = Mode.CLIENT if endpoint.startswith(CLIENT_PREFIX) else Mode.NODE
    if not gather:
        return Member(endpoint, mode=by_name)
    if len(gather) > MAX_GATHER_BYTES:
        raise ProtocolViolationError(
            f"has a gather of {len(gather)} bytes, more than {MAX_GATHER_BYTES}", endpoint, kind=ViolationKind.UNPROVEN
        )
    fields = _unpack(gather)
    if isinstance(fields, Ext) and fields.code == _WRAPPED_ARRAY:
        fields = _unpack(bytes(fields.data))
    if not isinstance(fields, list | tuple) or len(fields) != 4:
        raise ProtocolViolationError(
            "has a gather that is not [weight, bandwidth, mode, user]", endpoint, kind=ViolationKind.UNPROVEN
        )
    weight, bandwidth, mode, user = fields
    if not is_number(weight) or weight < 0:
        raise ProtocolViolationError(
            f"has weight {weight!r}; it must be finite and at least 0", endpoint, kind=ViolationKind.UNPROVEN
        )
    if bandwidth is not None and (not is_number(bandwidth) or bandwidth < 0):
        raise ProtocolViolationError(
            f"has bandwidth {bandwidth!r}; it must be nil or finite, at least 0", endpoint, kind=ViolationKind.UNPROVEN
        )
    if isinstance(mode, bool) or mode not in list(Mode):
        raise ProtocolViolationError(f"has mode {mode!r}; it must be 0, 1 or 2", endpoint, kind=ViolationKind.UNPROVEN)
    return Member(
        endpoint,
        weight=float(weight),
        bandwidth=None if bandwidth is None else float(bandwidth),
        mode=Mode.CLIENT if by_name is Mode.CLIENT else Mode(mode),
        user=_unpack(user) if isinstance(user, bytes) else None,
    )


def group_key(run_id: str, bits: str, topic: str = "") -> str:
    return f"{run_id}/{topic}.0b{bits}" if topic else f"{run_id}.0b{bits}"


def progress_key(run_id: str) -> str:
    return f"{run_id}.progress"


def data_key(run_id: str) -> str:
    return f"{run_id}.data"


def donors_key(run_id: str) -> str:
    return f"{run_id}.all_averagers"


def next_group_bits(bits: str, group: Group, index: int, target_group_size: int) -> str:
    """The group bits of member `index` after the round, which spread the members over different groups.

    Moshpit averaging (Ryabinin et al., 2021, arXiv:2103.03239): the position in this group becomes the newest digit of
    the key, and the oldest digit is removed. So d^k peers in groups of d reach the exact mean in k rounds.
    """
    digits = digits_per_round(target_group_size)
    places = random.Random(group.group_id).sample(range(target_group_size), len(group.members))
    new = format(places[index], f"0{digits}b")
    return (bits + new)[-len(bits) :] if bits else ""


def digits_per_round(target_group_size: int) -> int:
    return (target_group_size - 1).bit_length()


def _unpack(packed: bytes) -> Any:
    try:
        return unpack(packed)
    except ValueError:
        return None
