"""Which steps a run has made together, and how far each peer is. Pure: no clock, no network."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgpack

from averaging.errors import StateError

MAX_LINEAGE = 64


@dataclass(frozen=True, slots=True, order=True)
class History:
    """The steps a peer has made together with others. Peers with equal histories hold equal parameters.

    The greater of two histories counts: that with more steps, then that whose last step had more samples, then any. A
    peer whose own is less takes over the state of one whose own is greater.

    Attributes:
        step: how many.
        samples: in the last of them, of the whole group.
        lineage: a hash over the groups that made them, in hexadecimal; empty before the first.
    """

    step: int = 0
    samples: float = 0.0
    lineage: str = ""

    def after(self, group_id: bytes, samples: float) -> History:
        """The history once one more step has been made, with that group."""
        chained = hashlib.sha256(self.lineage.encode() + group_id).hexdigest()
        return History(self.step + 1, samples, chained[:16])

    @property
    def phase(self) -> str:
        """Under which peers with this history meet, and no others."""
        return f"{self.step}-{self.lineage}"

    def pack(self) -> list[int | float | str]:
        """For msgpack, a checkpoint or a record."""
        return [self.step, self.samples, self.lineage]

    @classmethod
    def unpack(cls, packed: object) -> History:
        """What `pack` returned.

        Raises:
            StateError: it is something else.
        """
        match packed:
            case [int(step), float() | int() as samples, str(lineage)] if (
                not isinstance(step, bool) and step >= 0 and math.isfinite(samples) and len(lineage) <= MAX_LINEAGE
            ):
                return cls(step, float(samples), lineage)
        raise StateError(f"{str(packed)[:100]} is not the history of a run")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one peer is: what it has done with others, and how many samples it has gathered for the next step."""

    history: History
    samples: float = 0.0

    def pack(self) -> bytes:
        """For a record in discovery."""
        packed: bytes = msgpack.packb([*self.history.pack(), self.samples])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Progress | None:
        """What `pack` returned; None if it is something else."""
        try:
            *history, samples = msgpack.unpackb(packed)
            if isinstance(samples, bool) or not (math.isfinite(samples) and samples >= 0):
                return None
            return cls(History.unpack(history), float(samples))
        except (StateError, ValueError, TypeError, RecursionError, msgpack.UnpackException):
            return None


@dataclass(frozen=True, slots=True)
class Others:
    """What the progress of the other peers comes to, seen by a peer with `own` history.

    Attributes:
        together: those with the same history.
        samples: that they have gathered for the next step, all in all.
        ahead: those with the greatest history, if it is greater than the own; that peer must catch up.
        best: that history, else the own.
    """

    together: tuple[str, ...]
    samples: float
    ahead: tuple[str, ...]
    best: History


def look_around(own: History, told: Mapping[str, bytes]) -> Others:
    """Reads what the other peers tell, by endpoint; what is unreadable is left out."""
    read = {name: Progress.unpack(packed) for name, packed in told.items()}
    progress = {name: one for name, one in sorted(read.items()) if one is not None}
    best = max([own, *(one.history for one in progress.values())])
    return Others(
        together=tuple(name for name, one in progress.items() if one.history == own),
        samples=sum(one.samples for one in progress.values() if one.history == own),
        ahead=tuple(name for name, one in progress.items() if one.history == best) if best > own else (),
        best=best,
    )
