"""Which steps a run has made together, and how far each peer is. Pure: no clock, no network."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgpack

from averaging.errors import StateError
from averaging.group import CLIENT_PREFIX
from averaging.unpacking import is_number
from averaging.values import is_count

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
            case [step, float() | int() as samples, str(lineage)] if (
                is_count(step) and math.isfinite(samples) and len(lineage) <= MAX_LINEAGE
            ):
                return cls(step, float(samples), lineage)
        raise StateError(f"{str(packed)[:100]} is not the history of a run")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one peer is: what it has done with others, what it has gathered for the next step, and what it works on.

    Attributes:
        samples: gathered for the next step.
        coming: in the batch that it computes now; 0 while it waits.
    """

    history: History
    samples: float = 0.0
    coming: float = 0.0

    def pack(self) -> bytes:
        """For a record in discovery."""
        packed: bytes = msgpack.packb([*self.history.pack(), self.samples, self.coming])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Progress | None:
        """What `pack` returned; None if it is something else."""
        try:
            *history, samples, coming = msgpack.unpackb(packed)
            if not all(is_number(one) and one >= 0 for one in (samples, coming)):
                return None
            return cls(History.unpack(history), float(samples), float(coming))
        except (StateError, ValueError, TypeError, RecursionError, msgpack.UnpackException):
            return None


@dataclass(frozen=True, slots=True)
class Others:
    """What the progress of the other peers comes to, as one peer sees it.

    Attributes:
        together: those with the same history, and partners who are about to tell that they have it.
        samples: that those with the same history have gathered for the next step, all in all.
        coming: in the batches that they compute now.
        ahead: those whose history counts more; if there are any, that peer must catch up with one of them.
        best: their history, else the own.
    """

    together: tuple[str, ...]
    samples: float
    coming: float
    ahead: tuple[str, ...]
    best: History


def look_around(
    own: History, told: Mapping[str, bytes], partners: Collection[str] = (), *, is_client: bool = False
) -> Others:
    """Reads what the other peers tell.

    Nobody can take over a client's state, so a client is never ahead; where it has gone another way than the rest, it
    gives way as soon as they are as far.

    Args:
        own: of the peer that looks.
        told: by endpoint; what is unreadable is left out.
        partners: with whom it has made its last step; what they tell may be a few steps old.
        is_client: whether that peer is one.
    """
    read = {name: Progress.unpack(packed) for name, packed in told.items()}
    progress = {name: one for name, one in sorted(read.items()) if one is not None}
    donors = {name: one.history for name, one in progress.items() if not name.startswith(CLIENT_PREFIX)}
    best = max(donors.values(), default=own)
    gives_way = best > own or (is_client and best.step == own.step and best != own)
    together = tuple(
        name for name, one in progress.items() if one.history == own or (name in partners and one.history < own)
    )
    return Others(
        together=together,
        samples=sum(one.samples for one in progress.values() if one.history == own),
        coming=sum(one.coming for one in progress.values() if one.history == own),
        ahead=tuple(name for name, history in donors.items() if history == best) if gives_way else (),
        best=best if gives_way else own,
    )
