"""When a round is due by the clock of the run. All times are passed in."""

from itertools import pairwise

import pytest

from averaging import DiLoCo, LocalSGD
from averaging.errors import ConfigError
from averaging.strategies.schedule import ClockSchedule


class Trainer:
    """A peer that makes steps of so many seconds, and comes to moments with a schedule."""

    def __init__(self, seconds: float, now: float = 0.0, interval: float = 60.0) -> None:
        self.schedule, self.seconds, self.now = ClockSchedule(interval), seconds, now
        self.rounds: list[float] = []  # when they began
        self.steps: list[int] = []  # made for each

    def train(self, until: float, declared_until: float | None = None) -> None:
        while self.now < until:
            self.step(self.seconds, declared_until)

    def step(self, seconds: float, declared_until: float | None = None) -> None:
        self.now += seconds
        self.schedule.count(self.now)
        if self.schedule.is_due(self.now, declared_until):
            self.now = max(self.now, self.schedule.moment)
            self.rounds.append(self.now)
            self.steps.append(self.schedule.steps)
            self.schedule.restart()
        self.schedule.resume(self.now)


@pytest.mark.parametrize("compiling", [30.0, 200.0])
def test_a_long_first_step_ends_in_no_round_of_its_own(compiling: float) -> None:
    trainer = Trainer(1.0, now=0.5)
    trainer.step(compiling)
    assert trainer.rounds == []
    trainer.train(290.0)
    assert all(moment % 60 == 0 for moment in trainer.rounds)
    assert trainer.rounds[0] == 60.0 * -(-trainer.rounds[0] // 60)


def test_a_late_peer_comes_if_somebody_looks_and_else_to_the_next_moment() -> None:
    for declared_until, expected in ((200.0, [60.0, 135.0]), (None, [60.0])):
        trainer = Trainer(1.0)
        trainer.train(100.0)
        trainer.step(35.0, declared_until)
        assert trainer.rounds == expected


@pytest.mark.parametrize("ahead", [20.0, -20.0])
def test_peers_whose_clocks_differ_meet_when_the_first_of_them_looks_and_each_moment_once(ahead: float) -> None:
    """The clock of the second one is stepped at 100 s."""
    first, second = Trainer(1.0), Trainer(1.0)
    met = []
    offset = 0.0
    for time in range(1, 400):
        offset = ahead if time > 100 else 0.0
        for trainer, clock in ((first, float(time)), (second, time + offset)):
            trainer.now = clock
            trainer.schedule.count(clock)
        due = [
            trainer.schedule.is_due(trainer.now, None) and trainer.schedule.moment <= trainer.now
            for trainer in (first, second)
        ]
        if any(due):
            joins = [
                is_due or trainer.schedule.is_due(trainer.now, trainer.now + 5.0)
                for trainer, is_due in zip((first, second), due, strict=True)
            ]
            assert all(joins), (time, due, joins, first.schedule.moment, second.schedule.moment)
            met.append(time)
            for trainer in (first, second):
                trainer.schedule.restart()
        for trainer in (first, second):
            trainer.schedule.resume(trainer.now)
    assert len(met) in (6, 7)
    assert all(later - earlier >= 35 for earlier, later in pairwise(met))


def test_a_clock_that_is_set_back_far_does_not_stop_the_rounds() -> None:
    trainer = Trainer(1.0, now=100_000.0)
    trainer.train(100_100.0)
    trainer.now = 50_000.0
    trainer.schedule.resume(trainer.now)
    trainer.train(50_100.0)
    assert trainer.rounds[-2:] == [50_040.0, 50_100.0]


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("wrong", ["0s", "abc", "-5s", "120", "1e3s", True, 0, 1.5, None, "9" * 400 + "s"])
def test_what_is_no_interval_is_refused(kind: type, wrong: object) -> None:
    with pytest.raises(ConfigError, match="^sync_every"):
        kind(sync_every=wrong)


@pytest.mark.parametrize(
    ("text", "seconds"), [("120s", 120.0), ("2min", 120.0), ("2m", 120.0), ("1.5h", 5400.0), ("500ms", 0.5)]
)
def test_an_interval_has_a_unit(text: str, seconds: float) -> None:
    assert LocalSGD(text)._schedule.interval == seconds
    assert DiLoCo(text, fragments=4)._schedule.interval == seconds / 4
