"""A group of peers that average together: its rule, what each announced about itself, the group bits of its next round.

A member states its contribution and its own state to its group, as one typed record each, which travel in `gather`.
Peers of other software send neither: their contributions are ordinary ones, and their state is not compared. Pure.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum, StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
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


T = TypeVar("T")

KEY = "averaging/state"  # key in a member's `gather` under which its fingerprint travels

MAX_SAMPLES = 2.0**53
"""Upper limit of one member's samples in a step: discovery would not accept a history with infinitely many."""

MAX_STATED_GRACE = 600.0  # longest grace period in seconds that a member may state
MAX_ENTRIES = 1024  # limit on the digests of one fingerprint; several tensors share one if there are more
ENTRY_BYTES = 2

MAX_NAMES, MAX_TEXT = 64, 64  # limits on the number of hyperparameters, and on the length of their names and values
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a member's strategy says of its contribution to a round, besides its tensors and their weight."""

    samples: Annotated[float, Meta(ge=0, le=MAX_SAMPLES)] | None = None  # behind it, or what counts as such
    unit: Text = ""  # of the weight; empty if it is a plain number
    steps: Count | None = None  # local steps in the contribution
    age: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None  # global steps that it is late; None without a quorum
    discount: Annotated[float, Meta(gt=0, le=1)] | None = None  # factor of its weight because of that
    holds: bool = True  # whether the member holds the state that the round changes, so that it can keep the result
    # members without which no group begins, seconds that it waits for further ones, and that only one has the key
    quorum: tuple[Count, Annotated[float, Meta(ge=0, le=MAX_STATED_GRACE)], bool] | None = None
    lacking: bytes = b""  # of its tensors those without a gradient, one bit each
    base: str = ""  # digest of what an adapter changes
    rounds: Count | None = None  # earlier rounds of the parameters; None if the statistics do not depend on it

    def pack(self) -> dict[str, Any]:
        """The `gather` that states it, without what is as usual."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    @classmethod
    def read(cls, gathered: object) -> Statement:
        """Reads it from a member's `gather`, also from that of a shard of a site; an ordinary one if it says none."""
        if isinstance(gathered, dict) and "site" in gathered:
            gathered = gathered.get("user")
        return _read(cls, gathered) or cls()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The state of one member, in short."""

    # the moment of the digests, such as the phase of a round. Only fingerprints of the same moment are compared. Empty
    # if there are no digests.
    moment: Text = ""
    digest: Text = ""  # digest of all tensors, or of a part of each if they are large; 16 hexadecimal digits
    # `ENTRY_BYTES` of the digest of each tensor, in order; of runs of tensors if there are more than `MAX_ENTRIES`
    entries: Annotated[bytes, Meta(max_length=MAX_ENTRIES * ENTRY_BYTES)] = b""
    # two of them differ by about the relative difference of the tensors, on average; finite
    sketch: Annotated[float, Meta(ge=-MAX_SAMPLES, le=MAX_SAMPLES)] = 0.0
    # 0 if the peer began with its own parameters; else 1 + its local step when it last took over a state
    since: Count = 0
    step: Count = 0  # the step at which `hyperparameters` were used
    # those of the optimizer, as text; empty if unknown
    hyperparameters: Annotated[Mapping[Text, Text], Meta(max_length=MAX_NAMES)] = field(default_factory=dict)
    scheduled: Annotated[tuple[Text, ...], Meta(max_length=MAX_NAMES)] = ()  # those that have changed so far


def _read(kind: type[T], packed: object) -> T | None:
    """A record that a stranger has sent, and perhaps more of later releases; None if it is malformed."""
    try:
        return msgspec.convert(packed, kind)
    except (msgspec.ValidationError, RecursionError):
        return None


def attach(gather: Any, fingerprint: Fingerprint) -> Any:
    """A `gather` together with a fingerprint; one that is neither None nor a dict with content stays as it is."""
    if gather is None or (isinstance(gather, dict) and gather):
        return {**(gather or {}), KEY: asdict(fingerprint)}
    return gather


def detach(user: Any) -> tuple[Any, Fingerprint | None]:
    """A member's `gather` without its fingerprint, and the fingerprint; None if it sent none, or a malformed one."""
    if not isinstance(user, dict) or KEY not in user:
        return user, None
    rest = {key: value for key, value in user.items() if key != KEY}
    return rest or None, _read(Fingerprint, user[KEY])


def runs(count: int) -> list[range]:
    """Cuts the numbers of `count` tensors into at most `MAX_ENTRIES` runs of about equal length."""
    pieces = min(count, MAX_ENTRIES)
    return [range(piece * count // pieces, (piece + 1) * count // pieces) for piece in range(pieces)]
