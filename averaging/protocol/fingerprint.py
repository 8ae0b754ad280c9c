"""What a member tells its group of its own state, so that peers that should be equal can be compared. Pure.

It travels in the member's `gather`. Peers of other software send none, and are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from averaging.common import is_count, is_number

KEY = "averaging/state"
"""Key in a member's `gather` under which its packed fingerprint travels."""

MAX_ENTRIES = 1024
"""Limit on the digests of one fingerprint; several tensors share one if there are more."""

ENTRY_BYTES = 2

MAX_NAMES, MAX_TEXT = 64, 64
"""Limits on the number of hyperparameters, and on the length of their names and values."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The state of one member, in short."""

    # the moment of the digests, such as the phase of a round. Only fingerprints of the same moment are compared. Empty
    # if there are no digests.
    moment: str = ""
    digest: str = ""  # digest of all tensors, or of a part of each if they are large; 16 hexadecimal digits
    # `ENTRY_BYTES` of the digest of each tensor, in order; of runs of tensors if there are more than `MAX_ENTRIES`
    entries: bytes = b""
    sketch: float = 0.0  # two of them differ by about the relative difference of the tensors, on average
    # 0 if the peer began with its own parameters; else 1 + its local step when it last took over a state
    since: int = 0
    step: int = 0  # the step at which `hyperparameters` were used
    hyperparameters: Mapping[str, str] = field(
        default_factory=dict
    )  # those of the optimizer, as text; empty if unknown
    scheduled: tuple[str, ...] = ()  # the hyperparameters that have changed so far

    def pack(self) -> list[Any]:
        """Packs it for msgpack."""
        values, scheduled = dict(self.hyperparameters), list(self.scheduled)
        return [self.moment, self.digest, self.entries, self.sketch, self.since, self.step, values, scheduled]

    @classmethod
    def unpack(cls, packed: object) -> Fingerprint | None:
        """Unpacks what `pack` returned, and perhaps more of later releases. None if it is malformed."""
        match packed:
            case [
                str(moment),
                str(digest),
                bytes(entries),
                float(sketch),
                since,
                step,
                dict(values),
                list(scheduled),
                *_,
            ] if (
                is_number(sketch)
                and len(entries) <= MAX_ENTRIES * ENTRY_BYTES
                and is_count(since)
                and is_count(step)
                and max(len(values), len(scheduled)) <= MAX_NAMES
                and all(map(_is_text, (moment, digest, *values, *values.values(), *scheduled)))
            ):
                return cls(moment, digest, entries, sketch, since, step, values, tuple(scheduled))
        return None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


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


def runs(count: int) -> list[range]:
    """Cuts the numbers of `count` tensors into at most `MAX_ENTRIES` runs of about equal length."""
    pieces = min(count, MAX_ENTRIES)
    return [range(piece * count // pieces, (piece + 1) * count // pieces) for piece in range(pieces)]
