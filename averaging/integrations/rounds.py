"""The base of what writes the averager's rounds into somebody else's log."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from averaging import AveragingError, DecentralizedAverager, Receipt
from averaging.integrations.scalars import round_scalars, status_scalars

logger = logging.getLogger("averaging.integrations")


class RoundLogger(ABC):
    """Called as `on_round` with each receipt; subclasses write the numbers.

    What cannot be written, for example to a full disk, is one warning, and the training goes on.

    Args:
        on_round: called with each receipt afterwards, for example another logger.
    """

    def __init__(self, on_round: Callable[[Receipt], object] | None = None) -> None:
        self._on_round = on_round
        self._averager: DecentralizedAverager | None = None
        self._has_failed = False

    def follow(self, averager: DecentralizedAverager) -> None:
        """From now on each round is written together with the averager's status: its steps, samples and peers."""
        self._averager = averager

    def __call__(self, receipt: Receipt) -> None:
        """Writes one round."""
        scalars = round_scalars(receipt)
        if self._averager is not None:
            try:
                scalars |= status_scalars(self._averager)
            except AveragingError:  # it leaves on SIGTERM during the round
                self._averager = None
        try:
            self.write(receipt, scalars)
        except Exception as error:  # whatever another library raises: a log is no reason to end the training
            if not self._has_failed:
                self._has_failed = True
                logger.warning("%s cannot write round %d: %s. Training goes on", self, receipt.round, error)
        if self._on_round is not None:
            self._on_round(receipt)

    @abstractmethod
    def write(self, receipt: Receipt, scalars: dict[str, float]) -> None:
        """Writes the numbers of one round."""
