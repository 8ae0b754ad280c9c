"""What a member tells its group of its own state, so that peers that should be equal can be compared. Pure.

It travels in the member's `gather`. Peers of other software send none, and are not compared.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import xxhash

from averaging.common import is_count, is_number, pack

KEY = "averaging/state"
"""Key in a member's `gather` under which its packed fingerprint travels."""

MAX_ENTRIES, MAX_SKETCHES = 1024, 64
"""Limits on the digests and on the sketches of one fingerprint; several tensors share one if there are more."""

ENTRY_BYTES, SKETCH_BYTES = 2, 8

MAX_VALUES_BYTES = 1024
"""Hyperparameters that differ between parameter groups travel as a digest if all of them would take more than this."""

MAX_NAMES, MAX_NAME, MAX_ITEMS = 64, 64, 16
"""Limits on the hyperparameters, on the length of a name or text, and on the items of a tuple such as `betas`."""

Value: TypeAlias = "bool | int | float | str | tuple[bool | int | float | str | None, ...] | None"

Hyperparameters: TypeAlias = "Mapping[str, tuple[Value, ...]]"
"""The values by name: a single one if it is the same in all parameter groups, else one for each group."""

Packed: TypeAlias = "Mapping[str, tuple[Value, ...] | bytes]"
"""Hyperparameters as they travel: a digest in the place of long ones."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The state of one member, in short."""

    # the moment of the digests, such as the phase of a round. Only fingerprints of the same moment are compared. Empty
    # if there are no digests.
    moment: str = ""
    digest: str = ""  # digest of all tensors, or of a part of each if they are large; 16 hexadecimal digits
    # `ENTRY_BYTES` of the digest of each tensor, in order; of runs of tensors if there are more than `MAX_ENTRIES`
    entries: bytes = b""
    # a float64 of each run of tensors, `MAX_SKETCHES` at most. Two of them differ by about the relative difference of
    # the tensors.
    sketches: bytes = b""
    # 0 if the peer began with its own parameters; else 1 + its local step when it last took over a state
    since: int = 0
    step: int = 0  # the step at which `hyperparameters` were used
    hyperparameters: Packed = field(default_factory=dict)  # those of the optimizer, by name; empty if unknown

    def pack(self) -> list[Any]:
        """Packs it for msgpack."""
        values = {
            name: column if isinstance(column, bytes) else list(column) for name, column in self.hyperparameters.items()
        }
        return [self.moment, self.digest, self.entries, self.sketches, self.since, self.step, values]

    @classmethod
    def unpack(cls, packed: object) -> Fingerprint | None:
        """Unpacks what `pack` returned, and perhaps more of later releases. None if it is malformed."""
        match packed:
            case [
                str(moment),
                str(digest),
                bytes(entries),
                bytes(sketches),
                since,
                step,
                dict(values),
                *_,
            ] if (
                max(len(moment), len(digest)) <= MAX_NAME
                and len(entries) <= MAX_ENTRIES * ENTRY_BYTES
                and len(sketches) <= MAX_SKETCHES * SKETCH_BYTES
                and len(sketches) % SKETCH_BYTES == 0
                and is_count(since)
                and is_count(step)
            ):
                read = _read(values)
                return None if read is None else cls(moment, digest, entries, sketches, since, step, read)
        return None

    def sketch(self, index: int) -> float | None:
        """The sketch of run `index`; None if there is none."""
        piece = self.sketches[index * SKETCH_BYTES : (index + 1) * SKETCH_BYTES]
        value: float | None = struct.unpack("<d", piece)[0] if len(piece) == SKETCH_BYTES else None
        return value if is_number(value) else None


def _read(values: Mapping[Any, Any]) -> dict[str, tuple[Value, ...] | bytes] | None:
    """Hyperparameters of a stranger; None if they are malformed."""
    if len(values) > MAX_NAMES or not all(isinstance(name, str) and len(name) <= MAX_NAME for name in values):
        return None
    read: dict[str, tuple[Value, ...] | bytes] = {}
    for name, column in values.items():
        if isinstance(column, bytes):
            read[name] = column[:8]
        elif isinstance(column, list):
            read[name] = tuple(tuple(value) if isinstance(value, list) else value for value in column)
            if not all(map(_is_value, read[name])):
                return None
        else:
            return None
    return read


def _is_value(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) <= MAX_ITEMS and all(_is_value(item) and not isinstance(item, tuple) for item in value)
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= MAX_NAME)


def attach(gather: Any, fingerprint: Fingerprint) -> Any:
    """A `gather` together with a fingerprint; one that is neither None nor a dict with content stays as it is."""
    if gather is None or (isinstance(gather, dict) and gather):
        return {**(gather or {}), KEY: fingerprint.pack()}
    return gather


def detach(user: Any) -> tuple[Any, Fingerprint | None]:
    """A member's `gather` without its fingerprint, and the fingerprint; None if it sent none, or a malformed one."""
    if not isinstance(user, dict) or KEY not in user:
        return user, None
    rest = {key: value for key, value in user.items() if key != KEY}
    return rest or None, Fingerprint.unpack(user[KEY])


def shorten(hyperparameters: Hyperparameters) -> Packed:
    """The hyperparameters as they travel, see `MAX_VALUES_BYTES`."""
    kept = dict(list(hyperparameters.items())[:MAX_NAMES])
    packed = pack({name: list(column) for name, column in kept.items()})
    if len(packed) <= MAX_VALUES_BYTES:
        return kept
    return {name: column if len(column) == 1 else digest_of(column) for name, column in kept.items()}


def digest_of(column: Sequence[Value]) -> bytes:
    """Digest of the values of all groups, with six digits of each number, since machines round differently."""
    text = ",".join(f"{value:.6g}" if isinstance(value, float) else repr(value) for value in column)
    return xxhash.xxh3_64_digest(text.encode())


def runs(count: int, limit: int) -> list[range]:
    """Cuts the numbers from 0 to `count` into at most `limit` runs of about equal length."""
    pieces = min(count, limit)
    return [range(piece * count // pieces, (piece + 1) * count // pieces) for piece in range(pieces)]
