"""The staleness of a follower, by versions and by time."""

from __future__ import annotations

from datetime import timedelta

import pytest

from averaging.errors import ConfigError
from averaging.weights.follower import Staleness, StalenessWatch


def test_by_versions() -> None:
    watch = StalenessWatch(2)
    assert watch.look(0.0, None, None, connected=True) == (Staleness(), False)
    assert watch.look(1.0, 5, 7, connected=True) == (Staleness(2, 0.0, False), False)
    assert watch.look(2.0, 5, 8, connected=True) == (Staleness(3, 1.0, True), True)
    assert watch.look(3.0, 5, 9, connected=True) == (Staleness(4, 2.0, True), False), "it is told once"
    assert watch.look(4.0, 9, 9, connected=True) == (Staleness(), False)
    assert watch.look(5.0, 9, 20, connected=True)[1], "and once again"
    assert watch.look(6.0, None, 0, connected=True)[0].versions == 1


def test_by_time_since_a_newer_version_or_the_loss_of_the_publisher() -> None:
    watch = StalenessWatch(timedelta(seconds=10))
    assert watch.look(0.0, 5, 5, connected=True) == (Staleness(), False)
    assert watch.look(1.0, 5, 5, connected=False) == (Staleness(), False)
    assert watch.look(8.0, 5, 6, connected=True) == (Staleness(1, 7.0, False), False)
    assert watch.look(11.5, 5, 6, connected=True) == (Staleness(1, 10.5, True), True)
    assert watch.look(12.0, 6, 6, connected=True) == (Staleness(), False)


@pytest.mark.parametrize("limit", [-1, 1.5, "60", True, timedelta(0)])
def test_a_limit_is_a_count_or_a_time(limit: object) -> None:
    with pytest.raises(ConfigError, match="max_staleness"):
        StalenessWatch(limit)  # type: ignore[arg-type]
