"""The staleness of a follower, by versions and by time."""

from __future__ import annotations

from averaging.weights import Staleness, StalenessWatch


def test_versions_and_time_since_a_newer_one_or_the_loss_of_the_publisher() -> None:
    watch = StalenessWatch()
    assert watch.look(0.0, None, None, connected=True) == Staleness()
    assert watch.look(1.0, 5, 7, connected=True) == Staleness(2, 0.0)
    assert watch.look(2.0, 5, 8, connected=True) == Staleness(3, 1.0)
    assert watch.look(4.0, 9, 9, connected=True) == Staleness()
    assert watch.look(5.0, 9, 9, connected=False) == Staleness()
    assert watch.look(8.0, 9, 10, connected=False) == Staleness(1, 3.0)
    assert watch.look(9.0, 10, 10, connected=True) == Staleness()
    assert watch.look(9.5, None, 0, connected=True).versions == 1
