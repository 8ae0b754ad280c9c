"""Finds the members of a group that should be equal and are not, from the fingerprints of all members. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import itemgetter
from typing import NamedTuple

from averaging.errors import printable
from averaging.protocol import (
    ENTRY_BYTES,
    MAX_ENTRIES,
    MAX_SKETCHES,
    Fingerprint,
    Hyperparameters,
    Packed,
    Value,
    digest_of,
    runs,
)

REMEMBERED = 1024
"""Least number of changes of this peer's hyperparameters that are remembered, to compare with slower peers."""

MAX_EARLY = 256
"""Peers that are ahead of this one whose hyperparameters are kept until this peer has made as many steps."""

RELATIVE, ABSOLUTE = 1e-6, 1e-12
"""Hyperparameters that differ by less are equal: schedulers of other machines round differently."""

MAX_TEXT = 60
"""Longest text of a value."""


class DriftKind(StrEnum):
    """What differs at a drifted peer, for programs. Unknown kinds of later releases are read as `TENSOR`."""

    HYPERPARAMETER = "hyperparameter"
    """A hyperparameter of the optimizer."""
    TENSOR = "tensor"
    """A tensor."""
    ROUNDING = "rounding"
    """A tensor, by no more than unequal machines round differently."""

    @classmethod
    def _missing_(cls, value: object) -> DriftKind | None:
        return cls.TENSOR if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class Drift:
    """A member of a group that differs from most others although it should not, and the first thing that differs.

    Attributes:
        endpoint: the member.
        kind: what differs.
        name: the hyperparameter, with its parameter group, or the tensor; the first and the last of several tensors if
            the model has more than 1,024.
        value: a hyperparameter's value at the member.
        expected: its value at the other members.
        size: about the relative difference of the tensor; None if unknown.
    """

    endpoint: str
    kind: DriftKind
    name: str
    value: str = ""
    expected: str = ""
    size: float | None = None

    def __str__(self) -> str:
        if self.kind is DriftKind.HYPERPARAMETER:
            what = f"has {self.name} = {self.value}, the others {self.expected}"
        else:
            about = "" if self.size is None else f" by about {self.size:.2g} of its size"
            rounding = ", as machines round differently" if self.kind is DriftKind.ROUNDING else ""
            what = f"differs in {self.name}{about}{rounding}"
        return printable(f"{self.endpoint} {what}")


class HyperparameterLog:
    """The hyperparameters of this peer by step, as peers with more and with fewer steps are compared with them.

    Peers of unequal speed use a schedule at different moments, so two peers are compared at the same step: the one that
    is behind, with what the other one remembers or has told before. One thread records while another one reads.
    """

    def __init__(self) -> None:
        # Changes in the order of steps. It is appended to or replaced, so that the other thread always reads it whole.
        self._changes: list[tuple[int, Hyperparameters]] = []
        self._early: dict[str, tuple[int, Packed]] = {}  # of peers that were ahead, by endpoint
        self.step = 0

    def record(self, step: int, values: Hyperparameters) -> None:
        """Records what is used at `step`. After a gap, as when a state was taken over, it begins anew."""
        changes = self._changes if step in (self.step, self.step + 1) else []
        if len(changes) >= 2 * REMEMBERED:
            changes = changes[-REMEMBERED:]
        if changes and changes[-1][0] == step:
            changes[-1] = (step, values)
        elif not changes or changes[-1][1] != values:
            changes.append((step, values))
        self._changes, self.step = changes, step

    def latest(self) -> tuple[int, Hyperparameters]:
        """The last recorded step, and its hyperparameters; none before the first."""
        return self.step, self._changes[-1][1] if self._changes else {}

    def at(self, step: int) -> Hyperparameters | None:
        """The hyperparameters at a step; None if it is in the future, or too long ago."""
        changes = self._changes
        place = bisect_right(changes, step, key=itemgetter(0))
        return changes[place - 1][1] if place and step <= self.step else None

    def comparable(self, endpoint: str, step: int, values: Packed) -> tuple[Hyperparameters, Packed] | None:
        """This peer's hyperparameters and those of another peer at the same step; None if there is no such step yet."""
        ours = self.at(step)
        if ours is not None:
            self._early.pop(endpoint, None)
            return ours, values
        early_step, early = self._early.get(endpoint, (step, values))
        ours = self.at(early_step)
        if ours is None and early_step > self.step:
            if len(self._early) < MAX_EARLY:
                self._early.setdefault(endpoint, (step, values))
            return None
        self._early.pop(endpoint, None)
        return None if ours is None else (ours, early)


@dataclass
class DriftCheck:
    """Compares one member of a group with the others.

    The largest class of equal members is right; of equally large ones, that with the member that has
    trained longest. All members decide alike, and the others are named.

    Args:
        own: fingerprint of this member.
        names: the names of its tensors.
        log: its hyperparameters so far.
        tolerance: relative difference of tensors that rounding may cause.
    """

    own: Fingerprint
    names: Sequence[str] = ()
    log: HyperparameterLog = field(default_factory=HyperparameterLog)
    tolerance: float = 0.0

    def compare(self, endpoint: str, others: Mapping[str, Fingerprint]) -> tuple[Drift, ...]:
        """The drifted members: first those with other hyperparameters, which may be the cause of other tensors.

        Args:
            endpoint: this member.
            others: the fingerprints of the other members.
        """
        return (*self._hyperparameters(endpoint, others), *self._tensors(endpoint, others))

    def _tensors(self, endpoint: str, others: Mapping[str, Fingerprint]) -> list[Drift]:
        if not self.own.moment:
            return []
        members = {n: other for n, other in others.items() if other.moment == self.own.moment} | {endpoint: self.own}
        classes: dict[str, list[str]] = defaultdict(list)
        for name, member in members.items():
            classes[member.digest].append(name)
        digest = max(classes, key=lambda digest: (self._weight(classes[digest], members), digest))
        right = sorted(classes[digest])
        return [
            self._difference(name, members[name], members[right[0]]) for name in sorted(members) if name not in right
        ]

    def _difference(self, name: str, wrong: Fingerprint, right: Fingerprint) -> Drift:
        """The first tensors in which a member differs from a right one."""
        pieces = runs(len(self.names), MAX_ENTRIES)
        entries = [range(place, place + ENTRY_BYTES) for place in range(0, len(pieces) * ENTRY_BYTES, ENTRY_BYTES)]
        unequal = [
            piece
            for piece, entry in zip(pieces, entries, strict=True)
            if wrong.entries[entry.start : entry.stop] != right.entries[entry.start : entry.stop]
        ]
        if not unequal:
            return Drift(name, DriftKind.TENSOR, "some tensor")
        sizes: dict[range, float | None] = {}
        for number, covered in enumerate(runs(len(self.names), MAX_SKETCHES)):
            if any(piece.start < covered.stop and covered.start < piece.stop for piece in unequal):
                there, here = wrong.sketch(number), right.sketch(number)
                sizes[covered] = None if there is None or here is None or there == here else abs(there - here)
        # Rounding changes elements everywhere, also among those of the sketches. Another cause may change a single one.
        known = [size for size in sizes.values() if size is not None]
        rounding = max(known, default=math.inf) <= self.tolerance
        kind = DriftKind.ROUNDING if rounding else DriftKind.TENSOR
        first, last = self.names[unequal[0].start], self.names[unequal[0].stop - 1]
        text = repr(first) if first == last else f"a tensor from {first!r} to {last!r}"
        size = next((size for covered, size in sizes.items() if unequal[0].start in covered), None)
        return Drift(name, kind, text, size=size)

    def _hyperparameters(self, endpoint: str, others: Mapping[str, Fingerprint]) -> list[Drift]:
        differences: dict[str, _Difference | None] = {endpoint: None}
        for name, other in others.items():
            pair = self.log.comparable(name, other.step, other.hyperparameters) if other.hyperparameters else None
            if pair is not None:
                differences[name] = first_difference(*pair)
        # By the name alone: members at other steps of one schedule have other values, and are still alike.
        classes: dict[str, list[str]] = defaultdict(list)
        for name, difference in differences.items():
            classes["" if difference is None else difference.name].append(name)
        members = {**others, endpoint: self.own}
        right = max(classes, key=lambda what: (self._weight(classes[what], members), what == ""))
        if (different := differences[min(classes[right])]) is None:
            return [
                Drift(name, DriftKind.HYPERPARAMETER, difference.name, difference.there, difference.here)
                for name, difference in sorted(differences.items())
                if difference is not None
            ]
        return [
            Drift(name, DriftKind.HYPERPARAMETER, different.name, different.here, different.there)
            for name in sorted(classes[""])
        ]

    def _weight(self, names: Sequence[str], members: Mapping[str, Fingerprint]) -> tuple[int, int]:
        """How much members that are equal count: their number, then who has trained longest."""
        return len(names), -min(members[name].since for name in names)


class _Difference(NamedTuple):
    """The first hyperparameter that differs at a peer, as text."""

    name: str
    here: str
    there: str


def first_difference(ours: Packed, theirs: Packed) -> _Difference | None:
    """The first hyperparameter that both have and that differs; None if there is none.

    A name that only one of them has is of another release of the optimizer, and is not compared.
    """
    for name, column in ours.items():
        other = theirs.get(name)
        if other is None or not (group := _differing_group(column, other)):
            continue
        number, here, there = group
        where = "" if number is None else f" of group {number}"
        return _Difference(f"{name}{where}", _text(here), _text(there))
    return None


def _differing_group(
    ours: tuple[Value, ...] | bytes, theirs: tuple[Value, ...] | bytes
) -> tuple[int | None, object, object] | None:
    """The first parameter group in which two columns differ, and both values; None if they are equal."""
    if isinstance(ours, bytes) or isinstance(theirs, bytes):
        digests = [column if isinstance(column, bytes) else digest_of(column) for column in (ours, theirs)]
        return None if digests[0] == digests[1] else (None, "another value", "another value in some group")
    if len(ours) != len(theirs) and 1 not in (len(ours), len(theirs)):
        return None, f"{len(ours)} groups", f"{len(theirs)} groups"
    count = max(len(ours), len(theirs))
    for number in range(count):
        here, there = (column[min(number, len(column) - 1)] if column else None for column in (ours, theirs))
        if not _same(here, there):
            return (None if count == 1 else number), here, there
    return None


def _same(value: Value, other: Value) -> bool:
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, int | float) and isinstance(other, int | float):
        return math.isclose(value, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE) or (value != value and other != other)
    return value == other


def _text(value: object) -> str:
    return printable(value if isinstance(value, str) else repr(value))[:MAX_TEXT]
