"""What a peer counts of its training: the samples by which rounds may weigh it, and how fast it trains."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from averaging.common import check_weight, is_count
from averaging.errors import ConfigError
from averaging.peer import RoundOptions, Topic
from averaging.protocol import Statement
from averaging.receipts import TrainingPace, check_rate
from averaging.training.site import Site

SAMPLES = "samples"
"""The weight of a peer that is the number of its samples."""

LEAST_SAMPLES = 1e-6
"""Weight of a peer that has made no sample: it does not pull the average, and the weights of a group never sum to 0."""

REMEMBERED = 16  # steps of which the median is used, so that an evaluation between two steps does not change the rate


class RoundWeight:
    """The weight, and the samples of this rank by which each topic may be weighed."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.number = 1.0  # finite and at least 0; not used if samples are counted
        self.counts_samples = False
        self.made = 0  # samples of this rank so far
        self.averaged: dict[str, int] = {}  # `made` when the last average of a topic was begun, by the topic's name

    def set(self, weight: float | str) -> None:
        """Sets a number that is finite and at least 0, or "samples"; raises ConfigError if it is neither."""
        if isinstance(weight, str) and weight != SAMPLES:
            raise ConfigError(f"weight must be a number or {SAMPLES!r}, not {weight!r}")
        self.counts_samples = weight == SAMPLES
        self.number = 1.0 if isinstance(weight, str) else check_weight(weight)

    def count(self, batch_size: int | None) -> None:
        """Counts the samples of this rank in a step that begins; raises ConfigError if they are missing."""
        if is_count(batch_size) and batch_size:
            self.made += batch_size
        elif self.counts_samples:
            raise ConfigError(
                f"weight={SAMPLES!r} counts samples: call opt.step(batch_size=n), not {batch_size!r}; in a trainer "
                "that calls step() itself, use its class from averaging.integrations"
            )

    @property
    def unit(self) -> str:
        return SAMPLES if self.counts_samples else ""

    def of(self, topic: Topic) -> float:
        """Weight of this peer in the next round of a topic; all ranks of a site call it."""
        if not self.counts_samples:
            return self.number
        waiting = self._site.all_gather(lambda: self.made - self.averaged.get(topic.schema.topic, 0))
        return max(LEAST_SAMPLES, float(sum(waiting)))

    def add_to(self, options: RoundOptions, topic: Topic) -> None:
        if "weight" not in options:
            options["weight"] = self.of(topic)
            if self.counts_samples:
                options.setdefault("gather", Statement(unit=self.unit).pack())

    def forget(self) -> None:
        self.made, self.averaged = 0, {}


class Pace:
    """Counts the steps of a peer, and how fast it makes them without its waits for others.

    A step lasts from the end of one call that is `measured` to that of the next. Time inside of such a call counts only
    as far as it is `working`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock  # monotonic, in seconds
        self.steps = TrainingPace(clock())
        self._samples: int | None = None  # of all ranks in the present step, if the strategy has added them up
        self._returned: float | None = None  # end of the last measured call, when work on the next step began
        self._seconds: float | None = None  # of work on this step; None if its beginning is unknown
        self._units = 0
        self._seconds_per_unit: deque[float] = deque(maxlen=REMEMBERED)

    def count(self, samples: int | None = None) -> None:
        self._units += 1 if samples is None else samples
        self._samples = samples

    def note_step(self, batch_size: int | None) -> None:
        """Counts a step of the averager, with the samples of this rank as given to `step`."""
        samples, self._samples = self._samples or batch_size, None
        self.steps.count(samples if is_count(samples) else 0, self._clock())

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Wraps a call that may wait for other peers; the time between two such calls is this peer's own work."""
        self._seconds = None if self._returned is None else self._clock() - self._returned
        self._units = 0
        try:
            yield
        finally:
            if self._seconds is not None and self._units > 0:
                self._seconds_per_unit.append(max(0.0, self._seconds) / self._units)
            self._seconds, self._returned = None, self._clock()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Wraps what counts as this peer's own work inside of a measured call."""
        began = self._clock()
        try:
            yield
        finally:
            if self._seconds is not None:
                self._seconds += self._clock() - began

    @property
    def per_second(self) -> float | None:
        """Steps, or samples, per second of own work; None while unknown."""
        if not self._seconds_per_unit:
            return None
        seconds = statistics.median(self._seconds_per_unit)
        # Rounded to three digits, because an unchanged record need not be published again.
        return check_rate(float(f"{1 / seconds:.3g}")) if seconds else None
