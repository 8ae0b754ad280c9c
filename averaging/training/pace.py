"""How fast this peer trains, as its status and its record say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from averaging.common import is_count
from averaging.receipts import StepRate, TrainingPace


class Pace:
    """Counts the steps of a peer: `own_work` without its waits for others, `steps` with them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock  # monotonic, in seconds
        self.own_work, self.steps = StepRate(), TrainingPace(clock())
        self._samples: int | None = None  # of all ranks in the present step, if the strategy has added them up

    def count(self, samples: int | None = None) -> None:
        """Counts a local step; its rate is that of samples if they are given."""
        self.own_work.count(1 if samples is None else samples)
        self._samples = samples

    def note_step(self, batch_size: int | None) -> None:
        """Counts a step of the averager, with the samples of this rank as given to `step`."""
        samples, self._samples = self._samples or batch_size, None
        self.steps.count(samples if is_count(samples) else 0, self._clock())

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Wraps a call that may wait for other peers; the time between two such calls is this peer's own work."""
        self.own_work.begin(self._clock())
        try:
            yield
        finally:
            self.own_work.end(self._clock())

    @contextmanager
    def working(self) -> Iterator[None]:
        """Wraps what counts as this peer's own work inside of `measuring`."""
        began = self._clock()
        try:
            yield
        finally:
            self.own_work.worked(self._clock() - began)
