"""A group of peers that will average together, what each of them told about itself, and where it goes next."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack

from averaging.errors import UnprovenViolationError
from averaging.unpacking import check_keys, is_number, unpack

CLIENT_PREFIX = "client::"
"""The name of a peer in client mode starts so; it is never dialled."""

MAX_GATHER_BYTES = 64 * 1024
"""What a peer may say about itself to its group, in bytes."""

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
        members: in the leader's order, the same at every member; [0] is not the leader.
        leader: the endpoint of the member that began it; empty if that is not known.
    """

    group_id: bytes
    members: tuple[Member, ...]
    leader: str = ""

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
