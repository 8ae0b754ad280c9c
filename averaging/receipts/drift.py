"""Finds the members of a group that should be equal and are not, from the fingerprints of all members. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from averaging.errors import printable
from averaging.protocol import ENTRY_BYTES, Fingerprint, runs


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
        size: about the relative difference of the tensors, on average; None if unknown.
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
            about = "" if self.size is None else f", all tensors by about {self.size:.2g} of their size"
            rounding = ", as machines round differently" if self.kind is DriftKind.ROUNDING else ""
            what = f"differs in {self.name}{about}{rounding}"
        return printable(f"{self.endpoint} {what}")


@dataclass(frozen=True, slots=True)
class DriftCheck:
    """Compares one member of a group with the others.

    The largest class of equal members is right; of equally large ones, that with the member that has
    trained longest. All members decide alike, and the others are named.
    """

    own: Fingerprint  # of this member
    names: Sequence[str] = ()  # of its tensors
    tolerance: float = 0.0  # relative difference of tensors that rounding may cause
    step: int | None = None  # at which the hyperparameters are used; None for the local step

    def compare(self, endpoint: str, others: Mapping[str, Fingerprint]) -> tuple[Drift, ...]:
        """The drifted members: first those with other hyperparameters, which may be the cause of other tensors.

        Args:
            endpoint: this member.
            others: the fingerprints of the other members.
        """
        members = {**others, endpoint: self.own}
        return (*self._hyperparameters(members), *self._tensors(members))

    def _tensors(self, members: Mapping[str, Fingerprint]) -> list[Drift]:
        members = {name: member for name, member in members.items() if member.moment == self.own.moment}
        if not self.own.moment:
            return []
        digest, classes = _largest({name: member.digest for name, member in members.items()}, members)
        right = sorted(classes[digest])
        return [
            self._difference(name, members[name], members[right[0]]) for name in sorted(members) if name not in right
        ]

    def _difference(self, name: str, wrong: Fingerprint, right: Fingerprint) -> Drift:
        """The first tensor in which a member differs from a right one, or the run of tensors that has it."""
        entries = range(0, len(wrong.entries), ENTRY_BYTES)
        pieces = zip(runs(len(self.names)), entries, strict=False)
        unequal = (
            piece
            for piece, at in pieces
            if wrong.entries[at : at + ENTRY_BYTES] != right.entries[at : at + ENTRY_BYTES]
        )
        text = "some tensor"
        if (piece := next(unequal, None)) is not None:
            first, last = self.names[piece.start], self.names[piece.stop - 1]
            text = repr(first) if first == last else f"a tensor from {first!r} to {last!r}"
        # Rounding changes elements everywhere, also among those of the sketch. Another cause may change a single one.
        size = abs(wrong.sketch - right.sketch) or None
        kind = DriftKind.ROUNDING if size is not None and size <= self.tolerance else DriftKind.TENSOR
        return Drift(name, kind, text, size=size)

    def _hyperparameters(self, members: Mapping[str, Fingerprint]) -> list[Drift]:
        own = self.own
        differing = {name: _first_difference(own, member) for name, member in members.items()}
        # By the name alone: members at other steps of one schedule have other values, and are still alike.
        right, classes = _largest(differing, members)
        if right:  # most members differ from this one, and all of these in the same
            expected = members[min(classes[right])].hyperparameters[right]
            value = own.hyperparameters[right]
            return [Drift(name, DriftKind.HYPERPARAMETER, right, value, expected) for name in sorted(classes[""])]
        return [
            Drift(name, DriftKind.HYPERPARAMETER, what, members[name].hyperparameters[what], own.hyperparameters[what])
            for name, what in sorted(differing.items())
            if what
        ]


def _largest(values: Mapping[str, str], members: Mapping[str, Fingerprint]) -> tuple[str, Mapping[str, Sequence[str]]]:
    """The value that most members have, of equally many that of who has trained longest; and the members of each."""
    classes: dict[str, list[str]] = defaultdict(list)
    for name, value in values.items():
        classes[value].append(name)

    def weight(value: str) -> tuple[int, int, bool, str]:
        alike = classes[value]
        return len(alike), -min(members[name].since for name in alike), value == "", value

    return max(classes, key=weight), classes


def _first_difference(own: Fingerprint, other: Fingerprint) -> str:
    """The first hyperparameter that both have and that differs; empty if there is none.

    A name that only one of them has is of another release of the optimizer. Peers of unequal speed use a schedule at
    different moments: a value that has changed at the one with more steps is compared at the same step only.
    """
    changed = () if own.step == other.step else max(own, other, key=lambda member: member.step).scheduled
    for name, value in own.hyperparameters.items():
        if other.hyperparameters.get(name, value) != value and name not in changed:
            return name
    return ""
