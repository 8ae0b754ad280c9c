"""Which groups are too old for a batch, by the versions of the weights that made them. Pure.

An environment claims a version, and the trainer reports its newest one with each request for a batch. A claim never
changes what counts as the newest version. A version is published before an environment has it, and the trainer reports
the newest one that it has published. So a group that is ahead of a report which was begun after its arrival was made by
weights of another run, or of a history that ended in a crash.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto

import msgspec

REPORTS_UNTIL_KNOWN = 2
"""Reports after which a group must not be ahead of the trainer. The first one may have been sent before its arrival."""

Version = int | list[int] | None | msgspec.UnsetType


class Fit(Enum):
    """Whether a group may be part of a batch."""

    FITS = auto()
    WAITS = auto()
    """It is ahead of the trainer's last report, so the next one decides."""
    OLD = auto()
    FOREIGN = auto()
    """No version of this trainer: see above."""
    UNKNOWN = auto()
    """Its environment knows of versions, and not which ones made it."""


class StaleMode(StrEnum):
    """What happens to groups that are too old, or of other weights."""

    DROP = "drop"
    KEEP = "keep"
    """They are kept in the store, and come back if the trainer resumes from so old a version that they fit again."""


UNKNOWN = -1
"""Stands for the oldest version of a group if that is unknown, which its environment posts as null."""


def oldest_version(version: Version) -> int | None:
    """Returns the version that counts for the age of a group: UNKNOWN if it is null, and None if none was posted."""
    if isinstance(version, list):
        return min(version, default=None)
    return UNKNOWN if version is None else version if isinstance(version, int) else None


@dataclass(slots=True)
class TrainerVersion:
    """The newest version of the weights, as the trainer reports it.

    Attributes:
        newest: None before the first report.
        trainer: number of the registration that has reported it. Another trainer may begin with an older version,
            because it resumes from a checkpoint. The same trainer never goes back.
        reports: number of reports since the server has started.
    """

    newest: int | None = None
    trainer: int = 0
    reports: int = 0

    def report(self, version: int, trainer: int) -> bool:
        """Takes a report. Returns whether the newest version is another one now."""
        self.reports += 1
        before = self.newest
        if before is None or trainer != self.trainer or version > before:
            self.newest, self.trainer = version, trainer
        return self.newest != before

    def fit_of(self, version: int | None, arrived: int, max_staleness: int | None) -> Fit:
        """Judges a group. That of an environment which knows of no versions always fits.

        Args:
            version: see `oldest_version`.
            arrived: `reports` when the group arrived.
            max_staleness: how many versions it may be behind the newest one; 0 means only the newest. None: any.
        """
        if max_staleness is None or self.newest is None or version is None:
            return Fit.FITS
        if version == UNKNOWN:
            return Fit.UNKNOWN
        if version > self.newest:
            return Fit.WAITS if self.reports - arrived < REPORTS_UNTIL_KNOWN else Fit.FOREIGN
        return Fit.FITS if self.newest - version <= max_staleness else Fit.OLD
