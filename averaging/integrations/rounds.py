"""The base class of loggers for the averager's rounds."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from averaging import AveragingError, DecentralizedAverager, Receipt
from averaging.integrations.scalars import round_scalars, status_scalars

logger = logging.getLogger("averaging.integrations")


class RoundLogger(ABC):
    """A callable for `on_round`, which gets each receipt. Subclasses write the numbers.

    If they cannot be written, for example to a full disk, there is one warning and the training continues.

    Args:
        on_round: called with each receipt afterwards, for example another logger.
    """

    def __init__(self, on_round: Callable[[Receipt], object] | None = None) -> None:
        self._on_round = on_round
        self._averager: DecentralizedAverager | None = None
        self._has_failed = False

    def follow(self, averager: DecentralizedAverager) -> None:
        """Also writes the averager's status with each round: its steps, samples and peers."""
        self._averager = averager

    def __call__(self, receipt: Receipt) -> None:
        """Writes one round."""
        scalars = round_scalars(receipt)
        if self._averager is not None:
            try:
                scalars |= status_scalars(self._averager)
            except AveragingError:  # it left on SIGTERM during the round
                self._averager = None
        try:
            self.write(receipt, scalars)
        except Exception as error:  # of any library: a failed log must not end the training
            if not self._has_failed:
                self._has_failed = True
                logger.warning("%s cannot write round %d: %s. Training continues", self, receipt.round, error)
        if self._on_round is not None:
            self._on_round(receipt)

    @abstractmethod
    def write(self, receipt: Receipt, scalars: dict[str, float]) -> None:
        """Writes the numbers of one round."""
