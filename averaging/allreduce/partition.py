"""Divides the tensors into parts and assigns each part to the member that reduces it.

Every member of a group computes the same assignment from the same inputs.

Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from averaging.allreduce.part_forms import AnyForm, Part, Slice, forms_of
from averaging.errors import RoundError
from averaging.protocol import Member
from averaging.tensors import Schema


def shares(members: Sequence[Member]) -> list[float]:
    """The share of each member, not normalised; 0 for a member that cannot reduce.

    The shares minimise the time of the slowest member, max (1 + (g-2)·s_i) / b_i with g members. Each member sends the
    shards of the others, 1 - s_i of the total, and receives its own share from each of the g-1 others. A member without
    an announced bandwidth counts with the median of the announced ones, clients included. If no bandwidth is announced,
    or all reducing members announced 0, the shares are equal.

    Raises:
        RoundError: no member can reduce.
    """
    reducers = [index for index, member in enumerate(members) if member.reduces]
    if not reducers:
        raise RoundError("no member of the group can reduce: all are clients; add a peer that accepts connections")
    bandwidths = _bandwidths(members)
    others = len(members) - 2
    if not any(bandwidths):
        proportions = [1.0] * len(reducers)
    elif others <= 0:
        proportions = bandwidths
    else:
        time = _balanced_time(bandwidths, others)
        proportions = [max(0.0, (time * bandwidth - 1) / others) for bandwidth in bandwidths]
    result = [0.0] * len(members)
    for index, proportion in zip(reducers, proportions, strict=True):
        result[index] = proportion
    return result


def busiest_link(shares: Sequence[float], nbytes: int) -> float:
    return nbytes * (1 + max(0, len(shares) - 2) * max(shares) / sum(shares))


LARGE_PART_BYTES = 4 << 20
"""Size of the largest parts of a group that wants large ones, unless those of the schema are larger still."""

PARTS_OF_ALL = 32
"""Large parts are so small that the tensors have this many for each other reducer. A member has about three in flight
to each, and as many from each sender."""


def large_part_bytes(schema: Schema, reducers: int) -> int:
    nbytes = sum(form.packed_size(schema.part_size_bytes, 1) for form in forms_of(schema))
    size = schema.part_size_bytes
    return size * max(1, min(LARGE_PART_BYTES, nbytes // (PARTS_OF_ALL * max(1, reducers - 1))) // size)


def partition(schema: Schema, shares: Sequence[float], *, joins: bool = False, large: bool = False) -> list[list[Part]]:
    """The shard of each member: its parts, in order.

    Each tensor is cut into slices of `part_size_bytes` on the wire, a sparse one into whole blocks. The concatenated
    elements of all tensors are divided between the members in proportion to `shares`. A slice belongs to the first
    member with the most of its elements. A member with share 0 gets none. A slice is a part, unless it `joins`: then
    consecutive slices of a shard that fit into `part_size_bytes` together are one part, if their forms allow it. If
    `large`, those of one tensor are also one part up to `large_part_bytes`.

    Raises:
        RoundError: a share is negative or not finite, or all are 0.
        ConfigError: an element is larger than a part.
    """
    return [list(shard) for shard in _divide(schema, tuple(shares), joins, large)]


@lru_cache(maxsize=8)  # groups of a run often divide the same tensors in the same way
def _divide(schema: Schema, shares: tuple[float, ...], joins: bool, large: bool) -> list[list[Part]]:
    total = sum(spec.numel for spec in schema.tensors)
    reducers = [index for index, share in enumerate(shares) if share > 0]
    ends = _ends(shares, total)[reducers].tolist()
    last = len(reducers) - 1

    forms = forms_of(schema)
    slices: list[list[Slice]] = [[] for _ in shares]
    first = offset = 0
    for number, form in enumerate(forms):
        stop = 0
        for start, stop in form.cuts(schema.part_size_bytes):
            begin, end = offset + start, offset + stop
            while first < last and ends[first] <= begin:
                first += 1
            owner, most = first, min(end, ends[first]) - begin
            candidate = first
            while candidate < last and ends[candidate] < end:
                overlap = min(end, ends[candidate + 1]) - ends[candidate]
                candidate += 1
                if overlap > most:
                    owner, most = candidate, overlap
            slices[reducers[owner]].append(Slice(number, start, stop))
        offset += stop
    most = large_part_bytes(schema, len(reducers)) if large else schema.part_size_bytes
    return [list(_parts(shard, schema.part_size_bytes, forms, joins, most)) for shard in slices]


def _parts(
    shard: Sequence[Slice], part_size_bytes: int, forms: Sequence[AnyForm], joins: bool, most: int
) -> Iterator[Part]:
    joined: list[Slice] = []
    nbytes = 0
    for piece in shard:
        form = forms[piece.tensor]
        size = form.encoded_size(piece) if joins else 0
        if joins and joined and form.continues and nbytes + size <= most:
            first = joined[0]
            if len(joined) == 1 and (first.tensor, first.stop) == (piece.tensor, piece.start):
                joined[0] = Slice(first.tensor, first.start, piece.stop)
                nbytes += size
                continue
        fits = joins and joined and nbytes + size <= part_size_bytes
        if fits and forms[joined[0].tensor].joins(form):
            joined.append(piece)
            nbytes += size
            continue
        if joined:
            yield Part(tuple(joined))
        joined, nbytes = [piece], size
    if joined:
        yield Part(tuple(joined))


def packed_sizes(forms: Sequence[AnyForm], parts: Sequence[Part]) -> list[int]:
    return [forms[part.tensor].nbytes(part) for part in parts]


def packed_size(forms: Sequence[AnyForm], part_size_bytes: int, members: int) -> int:
    return sum(form.packed_size(part_size_bytes, members) for form in forms)


def _bandwidths(members: Sequence[Member]) -> list[float]:
    """The bandwidths of the reducing members, unknown ones filled in, scaled to below 1; all 0 if none is announced.

    Scaling by a power of two prevents overflow of the sums and leaves the digits of the shares unchanged.
    """
    announced = [member.bandwidth for member in members if member.bandwidth is not None]
    median = 2 * statistics.median(bandwidth / 2 for bandwidth in announced) if announced else 0.0
    filled = [median if member.bandwidth is None else member.bandwidth for member in members if member.reduces]
    _, exponent = math.frexp(max(filled))
    return [math.ldexp(bandwidth, -exponent) for bandwidth in filled]


def _balanced_time(bandwidths: Sequence[float], others: int) -> float:
    """The time T at which the shares max(0, (T·b - 1) / others) sum to 1; at least one bandwidth is above 0.

    If the k fastest members have a share, T = (others + k) / (sum of their b). The next one has no share if T·b ≤ 1.
    This is water-filling (Boyd and Vandenberghe, Convex Optimization, 2004, 5.5.3).
    """
    time = math.inf
    total = 0.0
    for count, bandwidth in enumerate(sorted(bandwidths, reverse=True), start=1):
        if time * bandwidth <= 1:
            break
        total += bandwidth
        time = (others + count) / total
    return time


def _ends(shares: Sequence[float], total: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    proportions = np.asarray(shares, dtype=np.float64)
    whole = np.sum(proportions)
    if not (np.all(proportions >= 0) and 0 < whole < math.inf):
        raise RoundError(f"shares must be finite, at least 0, and not all 0, not {list(shares)}")
    ends = (np.cumsum(proportions) / whole * total).astype(np.int64)
    ends[-1] = total
    return ends
