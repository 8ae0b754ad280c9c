"""Which groups are too old for a batch, by the versions of the weights that made them. Pure.

An environment claims a version, and the trainer reports its newest one with each request for a batch. A claim never
changes what counts as the newest version. A version is published before an environment has it, and the trainer reports
the newest one that it has published. So a group that is ahead of a report which was begun after its arrival was made by
weights of another run, or of a history that ended in a crash.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

# After so many reports a group must not be ahead of the trainer. The first one may have been sent before its arrival.
REPORTS_UNTIL_KNOWN = 2
UNKNOWN = -1  # stands for the oldest version of a group if that is unknown, which its environment posts as null

Version = int | list[int] | None | msgspec.UnsetType


class Fit(StrEnum):
    """Whether a group may be part of a batch. The last three are the reasons for which it is dropped."""

    FITS = "fits"
    WAITS = "waits"  # it is ahead of the trainer's last report, so the next one decides
    OLD = "old"
    FOREIGN = "foreign"  # no version of this trainer: see above
    UNKNOWN = "unknown"  # its environment knows of versions, and not which ones made it


def oldest_version(version: Version) -> int | None:
    """Returns the version that counts for the age of a group: UNKNOWN if it is null, and None if none was posted."""
    if isinstance(version, list):
        return min(version, default=None)
    return UNKNOWN if version is None else version if isinstance(version, int) else None


class TrainerVersion(msgspec.Struct):
    """The newest version of the weights, as the trainer reports it."""

    newest: int | None = None  # None before the first report
    trainer: int = 0  # number of the registration that has reported it

    def report(self, version: int, trainer: int) -> None:
        # Another trainer may begin with an older version, because it resumes from a checkpoint. One never goes back.
        if self.newest is None or trainer != self.trainer or version > self.newest:
            self.newest, self.trainer = version, trainer

    def fit_of(self, version: int | None, reports: int, max_staleness: int | None) -> Fit:
        """Judges a group. That of an environment which knows of no versions always fits.

        Args:
            version: see `oldest_version`.
            reports: how many have come since the group arrived.
            max_staleness: how many versions it may be behind the newest one; 0 means only the newest. None: any.
        """
        if max_staleness is None or self.newest is None or version is None:
            return Fit.FITS
        if version == UNKNOWN:
            return Fit.UNKNOWN
        if version > self.newest:
            return Fit.WAITS if reports < REPORTS_UNTIL_KNOWN else Fit.FOREIGN
        return Fit.FITS if self.newest - version <= max_staleness else Fit.OLD
