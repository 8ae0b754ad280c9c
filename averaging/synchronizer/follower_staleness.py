"""How old the weights of a follower are, and when that is too much. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from averaging.common.validation import is_count
from averaging.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Staleness:
    """How old the weights in the model are.

    Attributes:
        versions: The newest known version minus the version in the model; 0 if the model has the newest one, or if
            no version is known.
        seconds: Time since a newer version became known or the publisher was lost, whichever was first; 0 if neither.
        exceeded: Whether that is more than `max_staleness`.
    """

    versions: int = 0
    seconds: float = 0.0
    exceeded: bool = False


class StalenessWatch:
    """Follows the staleness of one model.

    Args:
        limit: versions, or a time; None for no limit.

    Raises:
        ConfigError: the limit is neither.
    """

    def __init__(self, limit: int | timedelta | None) -> None:
        if not (limit is None or is_count(limit) or (isinstance(limit, timedelta) and limit > timedelta())):
            raise ConfigError(
                f"max_staleness must be a number of versions or a datetime.timedelta above 0, not {limit!r}"
            )
        self._limit = limit
        self._since: float | None = None
        self._exceeded = False

    def look(self, now: float, applied: int | None, newest: int | None, *, connected: bool) -> tuple[Staleness, bool]:
        """Returns the staleness, and whether it has just begun to be too much.

        Args:
            now: seconds of a monotonic clock.
            applied: version in the model; None before the first.
            newest: newest known version; None if there is none.
            connected: whether a publisher is connected.
        """
        behind = newest is not None and (applied is None or newest > applied)
        if connected and not behind:
            self._since = None
        elif self._since is None:
            self._since = now
        versions = newest - (-1 if applied is None else applied) if behind and newest is not None else 0
        seconds = 0.0 if self._since is None else now - self._since
        if isinstance(self._limit, timedelta):
            exceeded = seconds > self._limit.total_seconds()
        else:
            exceeded = self._limit is not None and versions > self._limit
        began, self._exceeded = exceeded and not self._exceeded, exceeded
        return Staleness(versions, seconds, exceeded), began
