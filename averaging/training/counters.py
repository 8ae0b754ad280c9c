"""Integer buffers, such as the count of batches in BatchNorm: the members of a round take the largest value of each."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash

from averaging.common import listed, pack, unpack

logger = logging.getLogger(__name__)

KEY = "counters"
"""Key of the packed values in a member's `gather`. The rest of the map is what the strategy sends."""

MAX_EACH, MAX_ALL = 1024, 2048
"""Elements of one counter, and of all: `gather` has room for 64 KiB. Larger buffers are tables rather than counts."""

MAX_VALUE = 2**53
"""Larger values of others are ignored, so that no member can make a counter overflow."""

KINDS = (torch.int64, torch.int32, torch.int16)


class Counters:
    """The counters among the buffers that are not averaged, paired by their names.

    Args:
        buffers: all of these, by name, in any order.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self._named: dict[str, torch.Tensor] = {}
        left = MAX_ALL
        for name, buffer in sorted(buffers.items()):
            if buffer.dtype in KINDS and buffer.numel() <= min(MAX_EACH, left):
                self._named[name] = buffer
                left -= buffer.numel()
        names = "".join(f"{name}\0{buffer.numel()}\0" for name, buffer in self._named.items())
        self._digest = xxhash.xxh3_64_intdigest(names.encode(errors="surrogatepass")) & (MAX_VALUE - 1)
        self._warned = False

    def __bool__(self) -> bool:
        return bool(self._named)

    def added_to(self, gather: Any) -> Any:
        """What a member sends to its group: its strategy's `gather`, a map or nothing, and the present values."""
        if not self or not (gather is None or isinstance(gather, dict)):
            return gather  # the application chose another form
        values = [value for counter in self._named.values() for value in counter.reshape(-1).tolist()]
        return {**(gather or {}), KEY: pack([self._digest, *values])}

    @torch.no_grad()
    def take_largest(self, gathered: Iterable[Any]) -> None:
        """Raises each counter to the largest value that a member has sent.

        Malformed values are ignored, and those of counters with other names, with one warning.
        """
        sizes = [counter.numel() for counter in self._named.values()]
        found = [values for one in gathered if (values := _values_in(one))]
        sent = [values for digest, *values in found if digest == self._digest and len(values) == sum(sizes)]
        if any(digest != self._digest for digest, *_ in found) and not self._warned:
            self._warned = True
            logger.warning(
                "a member of the group has other integer buffers than this peer (%s), so their largest values are not "
                "taken; use the same model at all peers",
                listed([name.removeprefix("buffer/") for name in self._named]),
            )
        if not sent:
            return
        largest = torch.split(torch.tensor(sent, dtype=torch.int64).amax(0), sizes)
        for counter, new in zip(self._named.values(), largest, strict=True):
            fitting = new.clamp(max=torch.iinfo(counter.dtype).max).reshape(counter.shape)
            counter.copy_(torch.maximum(counter, fitting.to(counter.device, counter.dtype)))


def without_counters(gathered: Any) -> Any:
    """What the strategy or the application of a member has sent."""
    if not isinstance(gathered, dict) or not isinstance(gathered.get(KEY), bytes):
        return gathered
    return {key: value for key, value in gathered.items() if key != KEY} or None


def _values_in(gathered: Any) -> list[int]:
    """The digest of the names and the values that a member has sent; empty if they are malformed or too large."""
    packed = gathered.get(KEY) if isinstance(gathered, dict) else None
    try:
        values = unpack(packed, MAX_ALL + 2) if isinstance(packed, bytes) else []
    except ValueError:
        return []
    sound = isinstance(values, list) and all(type(value) is int and abs(value) <= MAX_VALUE for value in values)
    return values if sound else []
