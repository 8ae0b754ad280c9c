"""Members, shares, parts and group bits, written from the protocol page in the simplest way."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

NODE, CLIENT, AUXILIARY = 0, 1, 2


@dataclass(frozen=True)
class Member:
    """A member as it describes itself in its `gather`."""

    endpoint: str
    weight: float
    bandwidth: float | None
    mode: int


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` of a flattened tensor."""

    tensor: int
    start: int
    stop: int


def pack_gather(
    weight: float = 1.0, bandwidth: float | None = None, mode: int = NODE, user: Any = None, *, wrapped: bool = False
) -> bytes:
    """Packs the array of a JoinRequest. With `wrapped`, it is in extension type 0x40, as in versions of 2021."""
    array: bytes = msgpack.packb([weight, bandwidth, mode, msgpack.packb(user)])
    return bytes(msgpack.packb(msgpack.ExtType(0x40, array))) if wrapped else array


def unpack_gather(endpoint: str, gather: bytes) -> Member:
    """Unpacks either form of the array, and ignores `user`."""
    if not gather:
        return Member(endpoint, 1.0, None, CLIENT if endpoint.startswith("client::") else NODE)
    fields = msgpack.unpackb(gather)
    if isinstance(fields, msgpack.ExtType):
        fields = msgpack.unpackb(fields.data)
    weight, bandwidth, mode, _ = fields
    return Member(endpoint, weight, bandwidth, mode)


def shares(members: Sequence[Member]) -> list[float]:
    """Returns the share of each member."""
    known = [member.bandwidth for member in members if member.bandwidth is not None]
    if not known:
        return [0.0 if member.mode == CLIENT else 1.0 for member in members]
    median = statistics.median(known)
    bandwidths = [median if member.bandwidth is None else member.bandwidth for member in members]
    reducing = [b for b, member in zip(bandwidths, members, strict=True) if member.mode != CLIENT]
    g = len(members)
    if g <= 2:
        return [0.0 if m.mode == CLIENT else b for m, b in zip(members, bandwidths, strict=True)]
    # The sum of (T·b - 1)/(g - 2) over the members with a share is 1: remove the slowest until all shares are positive.
    reducing.sort()
    while True:
        time = (g - 2 + len(reducing)) / sum(reducing)
        if time * reducing[0] >= 1:
            break
        reducing.pop(0)
    return [
        0.0 if member.mode == CLIENT else max(0.0, (time * b - 1) / (g - 2))
        for b, member in zip(bandwidths, members, strict=True)
    ]


def parts(lengths: Sequence[int], per_part: int, shares: Sequence[float]) -> list[list[Part]]:
    """Returns the parts of each member, for tensors of `lengths` elements."""
    total = sum(lengths)
    ends = np.floor(np.cumsum(shares) / np.sum(shares) * total)
    ends[-1] = total
    starts = np.concatenate([[0], ends[:-1]])
    result: list[list[Part]] = [[] for _ in shares]
    offset = 0
    for tensor, length in enumerate(lengths):
        for start in range(0, length, per_part):
            stop = min(start + per_part, length)
            overlaps = np.minimum(ends, offset + stop) - np.maximum(starts, offset + start)
            result[int(np.argmax(overlaps))].append(Part(tensor, start, stop))
        offset += length
    return result


def next_bits(bits: str, group_id: bytes, group_size: int, place: int, target: int) -> str:
    """Returns the group bits of member number `place` after the round."""
    digits = math.ceil(math.log2(target))
    new = format(random.Random(group_id).sample(range(target), group_size)[place], f"0{digits}b")
    return (bits + new)[-len(bits) :] if bits else ""
