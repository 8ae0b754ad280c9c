"""A group of peers that will average together, what each of them told about itself, and where it goes next.

Pure.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack

from averaging.common.addresses import CLIENT_PREFIX
from averaging.common.safe_msgpack import check_keys, is_number, unpack
from averaging.errors import UnprovenViolationError

MAX_GATHER_BYTES = 64 * 1024
"""What a peer may say about itself to its group, in bytes."""

MAX_GROUP_SIZE = 4096
"""The largest group that a follower believes in."""

GROUP_ID_BYTES, NONCE_BYTES = 20, 6

MAX_METADATA_BYTES = 1024
"""Metadata of a part that is longer is another software's."""

_WRAPPED_ARRAY = 0x40  # msgpack extension type in which other implementations pack the same array


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
    """One peer of a group.

    Attributes:
        endpoint: `host:port`, or `client::<uuid4>`.
        weight: of its tensors in the average; finite and at least 0.
        bandwidth: in bytes/s, or None if it did not tell.
        user: whatever the application gathered, unpacked; None if there is nothing or it is unreadable.
    """

    endpoint: str
    weight: float = 1.0
    bandwidth: float | None = None
    mode: Mode = Mode.NODE
    user: Any = None

    @property
    def sends(self) -> bool:
        """Whether it contributes tensors."""
        return self.mode is not Mode.AUXILIARY

    @property
    def reduces(self) -> bool:
        """Whether it can be given parts to reduce."""
        return self.mode is not Mode.CLIENT


@dataclass(frozen=True, slots=True)
class Group:
    """An assembled group.

    Attributes:
        group_id: as it is on the wire; a secret of the members while the group works.
        members: in the leader's order, the same at every member; [0] is not the leader.
        leader: the endpoint of the member that began it; empty if that is not known.
        digest: SHA-256 of the id, of the members in order, and of what they gathered, as the leader announced it here;
            empty if that is not known.
        committed: whether the id fits only this order and what was gathered, so that the leader cannot have announced
            another group under it. The ids of leaders of other software do not say so.
    """

    group_id: bytes
    members: tuple[Member, ...]
    leader: str = ""
    digest: bytes = b""
    committed: bool = False

    @property
    def public_id(self) -> bytes:
        """A hash of the id, 20 bytes: the same at all members, and no secret."""
        return hashlib.sha256(b"averaging.v1.GroupPublicId" + self.group_id).digest()[:20]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The members' names, in order."""
        return tuple(member.endpoint for member in self.members)

    @property
    def total_weight(self) -> float:
        """Sum of the weights of those that contribute."""
        return sum(member.weight for member in self.members if member.sends)

    def index(self, endpoint: str) -> int:
        """The place of a member."""
        return self.endpoints.index(endpoint)


def make_group_id(nonce: bytes, endpoints: Sequence[str], gathered: Sequence[bytes]) -> bytes:
    """An id of 20 bytes that is random, as `nonce` is, and fits only this order of members and what they gathered.

    Args:
        nonce: 6 random bytes.
        endpoints: of the members, in order.
        gathered: by them, in the same order.
    """
    commitment = hashlib.sha256(b"averaging.v1.GroupId" + nonce + _canonical(endpoints, gathered)).digest()
    return nonce + commitment[: GROUP_ID_BYTES - NONCE_BYTES]


def is_committed(group_id: bytes, endpoints: Sequence[str], gathered: Sequence[bytes]) -> bool:
    """Whether the id was made by `make_group_id` for these members."""
    return group_id == make_group_id(group_id[:NONCE_BYTES], endpoints, gathered)


def group_digest(group_id: bytes, endpoints: Sequence[str], gathered: Sequence[bytes]) -> bytes:
    """SHA-256 of all that a leader announces of a group: members to whom it announced the same have the same."""
    announced = struct.pack("<I", len(group_id)) + group_id + _canonical(endpoints, gathered)
    return hashlib.sha256(b"averaging.v1.Group" + announced).digest()


def _canonical(endpoints: Sequence[str], gathered: Sequence[bytes]) -> bytes:
    """Members and gathers, each with its length."""
    pieces = [endpoint.encode(errors="surrogatepass") for endpoint in endpoints] + list(gathered)
    lengths = struct.pack(f"<{1 + len(pieces)}I", len(endpoints), *map(len, pieces))
    return lengths + b"".join(pieces)


def pack_metadata(group: Group, heard: bytes = b"") -> bytes:
    """The metadata of a stream's first message, and of the last one of a member that leaves over a lying leader.

    Args:
        group: as it was announced to this peer.
        heard: the digest of another group under the same id that another member was announced.

    Returns:
        msgpack of {"group": digest}, with "heard" where there is such a digest.
    """
    told = {"group": group.digest} | ({"heard": heard} if heard else {})
    packed: bytes = msgpack.packb(told) if group.digest else b""
    return packed


def another_group(group: Group, metadata: bytes) -> bytes:
    """The digest of another group than `group` that was announced under its id, by a message's metadata; else empty.

    Metadata of other software, or none, says nothing.
    """
    if not group.digest or not metadata or len(metadata) > MAX_METADATA_BYTES:
        return b""
    told = _unpack(metadata)
    digests = [told.get("group"), told.get("heard")] if isinstance(told, dict) else []
    others = [digest for digest in digests if isinstance(digest, bytes) and digest != group.digest]
    return others[0][:32] if others else b""


def pack_gather(weight: float, bandwidth: float | None, mode: Mode, user: Any = None) -> bytes:
    """What a peer tells its group about itself: msgpack of [weight, bandwidth or nil, mode, user bytes].

    Raises:
        ValueError: `user` is not something msgpack can pack and others would read, or the whole is over 64 KiB.
    """
    try:
        said = msgpack.packb(user)
        packed: bytes = msgpack.packb([float(weight), bandwidth, int(mode), said])
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"gather must be what msgpack can pack (numbers, strings, bytes, lists, dicts): {error}"
        ) from None
    if len(packed) > MAX_GATHER_BYTES:
        raise ValueError(f"gather is {len(packed)} bytes packed, more than the {MAX_GATHER_BYTES} allowed")
    try:
        check_keys(user)
        unpack(said, MAX_GATHER_BYTES)
    except ValueError as error:
        raise ValueError(f"gather could not be read by others, who would take it for nothing: {error}") from None
    return packed


def unpack_gather(endpoint: str, gather: bytes) -> Member:
    """Reads what `endpoint` told about itself; an empty `gather` means weight 1 and nothing else.

    Raises:
        UnprovenViolationError: it is not such an array, or its values make no sense.
    """
    by_name = Mode.CLIENT if endpoint.startswith(CLIENT_PREFIX) else Mode.NODE
    if not gather:
        return Member(endpoint, mode=by_name)
    if len(gather) > MAX_GATHER_BYTES:
        raise UnprovenViolationError(
            f"{endpoint} gathers {len(gather)} bytes, more than the {MAX_GATHER_BYTES} allowed"
        )
    fields = _unpack(gather)
    if isinstance(fields, msgpack.ExtType) and fields.code == _WRAPPED_ARRAY:
        fields = _unpack(fields.data)
    if not isinstance(fields, list | tuple) or len(fields) != 4:
        raise UnprovenViolationError(f"{endpoint} gathers something other than [weight, bandwidth, mode, user]")
    weight, bandwidth, mode, user = fields
    if not is_number(weight) or weight < 0:
        raise UnprovenViolationError(f"{endpoint} has weight {weight!r}; it must be finite and at least 0")
    if bandwidth is not None and (not is_number(bandwidth) or bandwidth < 0):
        raise UnprovenViolationError(
            f"{endpoint} has bandwidth {bandwidth!r}; it must be finite and at least 0, or nil"
        )
    if isinstance(mode, bool) or mode not in list(Mode):
        raise UnprovenViolationError(f"{endpoint} has mode {mode!r}; it must be 0, 1 or 2")
    return Member(
        endpoint,
        weight=float(weight),
        bandwidth=None if bandwidth is None else float(bandwidth),
        mode=Mode.CLIENT if by_name is Mode.CLIENT else Mode(mode),
        user=_unpack(user) if isinstance(user, bytes) else None,
    )


def group_key(run_id: str, bits: str, topic: str = "") -> str:
    """The discovery key under which peers with these group bits look for each other to average `topic`."""
    return f"{run_id}/{topic}.0b{bits}" if topic else f"{run_id}.0b{bits}"


def progress_key(run_id: str) -> str:
    """The discovery key under which peers that train tell how far they are."""
    return f"{run_id}.progress"


def donors_key(run_id: str) -> str:
    """The discovery key under which peers declare that their state can be downloaded."""
    return f"{run_id}.all_averagers"


def next_group_bits(bits: str, group: Group, index: int, target_group_size: int) -> str:
    """The group bits of member `index` after the round, so that those who met are spread over different groups.

    Moshpit averaging (Ryabinin et al., 2021, arXiv:2103.03239): the place in this group becomes the newest digit of
    the key and the oldest digit falls out, so d^k peers in groups of d reach the exact mean in k rounds.
    """
    digits = digits_per_round(target_group_size)
    places = random.Random(group.group_id).sample(range(target_group_size), len(group.members))
    new = format(places[index], f"0{digits}b")
    return (bits + new)[-len(bits) :] if bits else ""


def digits_per_round(target_group_size: int) -> int:
    """How many bits one round replaces: ceil(log2 of the group size)."""
    return (target_group_size - 1).bit_length()


def _unpack(packed: bytes) -> Any:
    """What msgpack reads there; None if that is nothing sensible. It never raises."""
    try:
        return unpack(packed, MAX_GATHER_BYTES)
    except ValueError:
        return None
