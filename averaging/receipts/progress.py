"""The progress of a training, as the status of its peer shows it. Pure: the caller passes the time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from averaging.common import counted, duration


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The training of a peer, as of its last local step."""

    strategy: str  # name of the strategy's class
    stage: str  # stage of the training: training, waiting, concluding, ended or compared
    local_step: int  # number of local steps, including those before a downloaded or loaded state
    global_step: int | None  # number of global steps of the run; None if the strategy makes none
    gathered: float = 0.0  # samples, or local steps, for the next global step
    ranks: int = 1  # number of processes that train this copy of the model together
    steps: int = 0  # local steps since the start of the process
    samples: float = 0.0  # samples since then, as far as `step` was given `batch_size`
    steps_per_second: float | None = None  # lately, including the time that the training waits; None while unknown
    samples_per_second: float | None = None  # the same for samples; None if they are not counted
    # time or steps between two rounds, such as `120s` or `200 steps`; empty if rounds follow from something else
    sync_every: str = ""
    # number of peers with which a round begins, or their share, such as `2` or `0.5`; empty if it waits for all
    quorum: str = ""
    # seconds for which a round then waits for further peers; None without a quorum
    grace: float | None = None
    max_grace: float | None = None  # upper bound of `grace`, as the user has set it
    weight_unit: str = ""  # `samples` if weights count them; else empty
    missed: int = 0  # rounds of the others that this peer has missed and not yet made up for; it joins a later one

    @property
    def steps_made(self) -> tuple[int, ...]:
        """The global step, if there is one, and the local step."""
        return (self.local_step,) if self.global_step is None else (self.global_step, self.local_step)

    @property
    def terms(self) -> str:
        """`a round every 120s, quorum 2 (grace at most 10.0 s), weights in samples`; empty if unknown."""
        grace = "" if self.max_grace is None else f" (grace at most {duration(self.max_grace)})"
        parts = (
            f"a round every {self.sync_every}" if self.sync_every else "",
            f"quorum {self.quorum}{grace}" if self.quorum else "",
            f"weights in {self.weight_unit}" if self.weight_unit else "",
        )
        return ", ".join(filter(None, parts))

    @property
    def lateness(self) -> str:
        """`late by 3 rounds`; empty if it has missed none."""
        return f"late by {counted(self.missed, 'round')}" if self.missed else ""


MARKS, SPACING = 64, 0.5
"""Moments to which a pace looks back, and the seconds between two of them: at least the last 32 s."""


class _Mark(NamedTuple):
    time: float
    steps: int
    samples: float


class TrainingPace:
    """Counts the local steps and samples of a training, and measures how fast they come.

    One thread counts, any thread may read. All calls have seconds of the same clock.
    """

    def __init__(self, now: float) -> None:
        self._last = _Mark(now, 0, 0.0)
        self._marks = deque([self._last], maxlen=MARKS)

    @property
    def steps(self) -> int:
        return self._last.steps

    @property
    def samples(self) -> float:
        return self._last.samples

    def count(self, samples: float, now: float) -> None:
        self._last = _Mark(now, self._last.steps + 1, self._last.samples + samples)
        if now - self._marks[-1].time >= SPACING:
            self._marks.append(self._last)

    def per_second(self, now: float) -> tuple[float | None, float | None]:
        """Steps and samples per second, as far as the marks look back; None while unknown.

        The present time counts only once the next step takes twice as long as the others: then it has stopped.
        """
        last, first = self._last, self._marks[0]
        steps, seconds = last.steps - first.steps, last.time - first.time
        if steps <= 0 or seconds <= 0:
            return None, None
        if now - last.time > 2 * seconds / steps:
            seconds = now - first.time
        samples = last.samples - first.samples
        return steps / seconds, samples / seconds if samples else None
