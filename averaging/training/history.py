"""Where a run began, which steps it has made together, and how far each peer is. Pure: no clock, no network."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import msgpack

from averaging.common.addresses import CLIENT_PREFIX
from averaging.common.safe_msgpack import is_number, unpack
from averaging.common.validation import is_count
from averaging.errors import StateError
from averaging.observe.step_rate import MAX_ITEMS, check_rate

MAX_LINEAGE = 64


class Stage(IntEnum):
    """How far a peer's training has come to its end; the numbers are in its record."""

    TRAINING = 0
    """It goes on training."""
    WAITING = 1
    """It trains no more, and waits until the others have come as far."""
    CONCLUDING = 2
    """It takes part in a last round with those who wait."""
    ENDED = 3
    """It announces the digest of its weights."""
    COMPARED = 4
    """It has the digests of all that end with it."""


class Rank(IntEnum):
    """Why a peer began with its own parameters; the greater rank counts."""

    UNSHARED = 0
    """Nobody can download its state, so it gives way to every other origin."""
    FOUND_NOBODY = 1
    """It was told whom to join, and found nobody with a state."""
    APPOINTED = 2
    """It was told to join nobody, so it is meant to begin the run."""


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """The beginning of a run: the peer whose parameters all others have taken over.

    Peers of two origins have different parameters, so they average neither gradients nor changes with each other. The
    greater origin counts: first by rank, then the earlier one, then any.

    Attributes:
        rank: why that peer began with its own parameters.
        earliness: minus the time at which it began, in seconds since the epoch.
        id: random, in hexadecimal; empty if nobody can download that state.
    """

    rank: Rank = Rank.UNSHARED
    earliness: float = 0.0
    id: str = ""

    def pack(self) -> list[int | float | str]:
        """For msgpack, a checkpoint or a record."""
        return [int(self.rank), self.earliness, self.id]

    @classmethod
    def unpack(cls, packed: object) -> Origin:
        """What `pack` returned.

        Raises:
            StateError: it is something else.
        """
        match packed:
            case [int(rank), float() | int() as earliness, str(id)] if (
                rank in list(Rank) and math.isfinite(earliness) and len(id) <= MAX_LINEAGE
            ):
                return cls(Rank(rank), float(earliness), id)
        raise StateError(f"{str(packed)[:100]!r} is not the origin of a run")


@dataclass(frozen=True, slots=True, order=True)
class History:
    """Where a run began and the steps it has made together. Peers with equal histories hold equal parameters.

    The greater of two histories counts: the one with more steps, then the one whose last step had more samples, then
    any; before the first step the greater origin. A peer with the lesser history takes over the state of one with the
    greater.

    Attributes:
        step: how many.
        samples: in the last of them, of the whole group.
        lineage: a hash over the origin and the groups that made them, in hexadecimal; empty before the first.
        origin: where the run began.
    """

    step: int = 0
    samples: float = 0.0
    lineage: str = ""
    origin: Origin = field(default_factory=Origin)

    def after(self, group_id: bytes, samples: float) -> History:
        """The history once one more step has been made, with that group."""
        chained = hashlib.sha256(f"{self.origin.id}{self.lineage}".encode() + group_id).hexdigest()
        return History(self.step + 1, samples, chained[:16], self.origin)

    @property
    def phase(self) -> str:
        """Under which peers with this history meet, and no others."""
        return f"{self.step}-{self.lineage or self.origin.id}"

    def pack(self) -> list[int | float | str | list[int | float | str]]:
        """For msgpack, a checkpoint or a record."""
        return [self.step, self.samples, self.lineage, self.origin.pack()]

    @classmethod
    def unpack(cls, packed: object) -> History:
        """What `pack` returned.

        Raises:
            StateError: it is something else.
        """
        match packed:
            case [step, float() | int() as samples, str(lineage), origin] if (
                is_count(step) and math.isfinite(samples) and len(lineage) <= MAX_LINEAGE
            ):
                return cls(step, float(samples), lineage, Origin.unpack(origin))
        raise StateError(f"{str(packed)[:100]!r} is not the history of a run")

    def yields_to(self, other: History, *, donates: bool) -> bool:
        """Whether a peer with this history takes over the state of one with the other.

        Args:
            other: of a peer whose state can be downloaded.
            donates: whether this peer's own state can be downloaded. If not, nobody can follow it, so it gives way to
                every other history that is as far.
        """
        return other > self or (not donates and other.step == self.step and other != self)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one peer is: what it has done with others, what it has gathered for the next step, and what it works on.

    Attributes:
        samples: gathered for the next step.
        coming: in the batch that it computes now; 0 while it waits.
        donates: whether its state can be downloaded.
        stage: of its training.
        digest: of its weights, once the training has ended.
        rate: local steps, or samples, per second, see `StepRate`; None if it is not known.
    """

    history: History
    samples: float = 0.0
    coming: float = 0.0
    donates: bool = True
    stage: Stage = Stage.TRAINING
    digest: str = ""
    rate: float | None = None

    def pack(self) -> bytes:
        """For a record in discovery; `step_rate.PLACE` is the place of the rate in it."""
        ends = [int(self.stage), self.digest, self.rate]
        packed: bytes = msgpack.packb([self.history.pack(), self.samples, self.coming, self.donates, *ends])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Progress | None:
        """What `pack` returned, with or without a rate that can be believed; None if it is something else."""
        try:
            history, samples, coming, donates, stage, digest, *more = unpack(packed, MAX_ITEMS)
            if not all(is_number(one) and one >= 0 for one in (samples, coming)):
                return None
            if not isinstance(donates, bool) or not isinstance(digest, str) or len(digest) > MAX_LINEAGE:
                return None
            rate = check_rate(more[0]) if more else None
            return cls(History.unpack(history), float(samples), float(coming), donates, Stage(stage), digest, rate)
        except (StateError, ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Others:
    """What the progress of the other peers comes to, as one peer sees it.

    Attributes:
        together: those with the same history, and partners who are about to announce that they have it.
        samples: that those with the same history have gathered for the next step, all in all.
        coming: in the batches that they compute now.
        ahead: those whose state can be downloaded and who claim a history that counts more, with that.
    """

    together: tuple[str, ...]
    samples: float
    coming: float
    ahead: Mapping[str, History]


def look_around(
    own: History,
    told: Mapping[str, bytes],
    partners: Collection[str] = (),
    *,
    doubted: Collection[str] = (),
    donates: bool = True,
    trains: bool = True,
) -> Others:
    """Reads the progress of the other peers.

    Args:
        own: history of the peer that looks.
        told: progress by endpoint; what is unreadable is left out.
        partners: with whom it has made its last step; their progress may be a few steps old.
        doubted: those whose claim to be ahead is passed over.
        donates: whether the own state can be downloaded, see `History.yields_to`.
        trains: whether this peer goes on training; one that does is together only with others that do.
    """
    progress = read_progress(told)
    ahead = {
        name: one.history
        for name, one in progress.items()
        if _can_donate(name, one) and name not in doubted and own.yields_to(one.history, donates=donates)
    }
    peers = {name: one for name, one in progress.items() if (one.stage is Stage.TRAINING) is trains}
    together = tuple(
        name for name, one in peers.items() if one.history == own or (name in partners and one.history < own)
    )
    return Others(
        together=together,
        samples=sum(one.samples for one in peers.values() if one.history == own),
        coming=sum(one.coming for one in peers.values() if one.history == own),
        ahead=ahead,
    )


def look_for_greater_origin(
    own: History, told: Mapping[str, bytes], *, doubted: Collection[str] = (), donates: bool = True
) -> Others:
    """The same for strategies whose peers need not be equal: only a peer of another origin can be ahead."""
    progress = read_progress(told)
    strangers = {name for name, one in progress.items() if one.history.origin.id != own.origin.id}
    others = look_around(own, {name: told[name] for name in strangers}, doubted=doubted, donates=donates)
    together = tuple(name for name in progress if name not in strangers)
    return Others(together, 0.0, 0.0, others.ahead)


def read_progress(told: Mapping[str, bytes]) -> dict[str, Progress]:
    """The progress of each peer by endpoint, in order; what is unreadable is left out."""
    read = {name: Progress.unpack(packed) for name, packed in sorted(told.items())}
    return {name: one for name, one in read.items() if one is not None}


def of_one_run(own: History, told: Mapping[str, bytes]) -> frozenset[str]:
    """Those whose run began where this one did, and those of whom that cannot be read."""
    others = {name for name, one in read_progress(told).items() if one.history.origin.id != own.origin.id}
    return frozenset(told.keys() - others)


def training_on(told: Mapping[str, bytes]) -> frozenset[str]:
    """Those who go on training, and those of whom that cannot be read."""
    return frozenset(told.keys() - ending(told))


def ending(told: Mapping[str, bytes], stage: Stage = Stage.WAITING) -> frozenset[str]:
    """Those who train no more and have come at least to that stage."""
    return frozenset(name for name, one in read_progress(told).items() if one.stage >= stage)


def _can_donate(name: str, progress: Progress) -> bool:
    return progress.donates and not name.startswith(CLIENT_PREFIX)
