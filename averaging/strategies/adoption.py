"""What a peer with `on_drift="adopt"` does that differs from most members of its group although it should not."""

from __future__ import annotations

import logging

from averaging.strategies.base import Strategy
from averaging.training.training import Training

logger = logging.getLogger("averaging.training")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 600.0
"""Seconds between two downloads; each pause is twice as long as the last one. A cause that remains, such as a loop that
writes parameters, would otherwise cost a download in each round."""


class Adoption:
    """Takes over the hyperparameters and the state of most members."""

    def __init__(self, training: Training, strategy: Strategy) -> None:
        self._training, self._strategy = training, strategy
        self._next, self._pause = 0.0, FIRST_PAUSE

    def adopt(self) -> None:
        """Called after the step whose round has found that this peer differs."""
        training = self._training
        changed, donors = training.adopt_hyperparameters()
        if changed and training.site.leads:
            logger.warning("drift: this peer has taken over %s from most peers of its group", ", ".join(changed))
        now = training.agreed(training.monotonic)
        if not donors or now < self._next:
            return
        self._next, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        if self._strategy.adopt(training, donors) and training.site.leads:
            logger.warning("drift: this peer has taken over the state of most peers of its group")
