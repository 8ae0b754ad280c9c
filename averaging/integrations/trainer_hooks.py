"""The tasks that are common to all trainers with an averager."""

from __future__ import annotations

import logging
import math

import torch

from averaging.averager import DecentralizedAverager
from averaging.errors import AveragingError, ConfigError, TensorError
from averaging.integrations.loggers import status_scalars
from averaging.strategies import GradientAveraging

logger = logging.getLogger("averaging.integrations")


def weighs_steps(averager: DecentralizedAverager) -> bool:
    return isinstance(averager.strategy, GradientAveraging) or averager.weight == "samples"


class TrainerHooks:
    """The tasks of one trainer for one averager.

    Args:
        averager: the trainer's optimizer.
        wait_for: number of peers, including this one, for which the training waits at its start.
        timeout: seconds to wait for them, and at the end for the other peers to finish.
        global_steps: global steps after which the run ends; None if it ends after the trainer's number of local steps.

    Attributes:
        finished: whether the training of this peer has ended.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self, averager: DecentralizedAverager, *, wait_for: int, timeout: float, global_steps: int | None
    ) -> None:
        if not isinstance(averager, DecentralizedAverager):
            raise ConfigError(f"the averager must be a DecentralizedAverager, not {type(averager).__name__}")
        if type(wait_for) is not int or wait_for < 1:
            raise ConfigError(f"wait_for must be a whole number of peers, at least 1, not {wait_for!r}")
        if type(timeout) not in (int, float) or not 0 <= timeout < math.inf:
            raise ConfigError(f"timeout must be a finite number of seconds, not {timeout!r}")
        if global_steps is not None:
            if type(global_steps) is not int or global_steps < 1:
                raise ConfigError(f"global_steps must be a whole number, at least 1, not {global_steps!r}")
            if averager.global_step is None:
                raise ConfigError(
                    f"{averager.strategy!r} has no global steps; omit global_steps, so that the training ends "
                    "after the trainer's max_steps"
                )
        self._averager = averager
        self._wait_for, self._timeout, self._global_steps = wait_for, timeout, global_steps
        self._is_newcomer = averager.local_step > 0
        self.finished = False

    def check(self, model: torch.nn.Module, remedy: str) -> None:
        """Checks that the averager has the parameters that the trainer trains.

        Args:
            model: the trainer's model.
            remedy: what to do otherwise, for the error message.

        Raises:
            ConfigError: the model was moved or converted after the averager was created, the averager has parameters of
                another model, or its training has ended.
        """
        if self.finished:
            raise ConfigError(
                "this averager has finished its training; create a new strategy, averager and callback to train again"
            )
        trained = {id(parameter) for parameter in model.parameters()}
        if not all(id(parameter) in trained for group in self._averager.param_groups for parameter in group["params"]):
            raise ConfigError(f"the averager has parameters that are not in the trainer's model: {remedy}")
        try:
            self._averager.check_tensors()
        except TensorError as error:
            raise ConfigError(f"{error}. Here: {remedy}") from error

    def check_resumed(self) -> None:
        """Checks that the trainer may resume from a checkpoint.

        Raises:
            ConfigError: the peer has joined a run in progress, and has its state.
        """
        if self._is_newcomer:
            raise ConfigError(
                "the trainer resumes from a checkpoint, but this peer has joined a run in progress and has its state; "
                "train without the checkpoint. Resume only if the averager's local_step is 0, that is if all peers "
                "restart"
            )

    def begin(self) -> None:
        """Waits for the other peers, unless this one has joined a run in progress."""
        if self._is_newcomer or self._wait_for == 1:
            return
        if not self._averager.wait_for_peers(self._wait_for, self._timeout):
            logger.warning(
                "fewer than %d peers after %g s; the training begins without the others", self._wait_for, self._timeout
            )

    def is_over(self, max_steps: float) -> bool:
        """Whether the run has made `global_steps`, or else `max_steps` local steps; 0 or less means no limit."""
        if self._global_steps is not None:
            return (self._averager.global_step or 0) >= self._global_steps
        return 0 < max_steps <= self._averager.local_step

    def finish(self) -> None:
        """Ends the training of this peer together with the others. Further calls do nothing."""
        if self.finished:
            return
        self.finished = True
        finish = self._averager.finish(self._timeout)
        logger.log(logging.INFO if finish.alike else logging.WARNING, "the training has ended: %s", finish)

    def scalars(self) -> dict[str, float]:
        """Returns the averager's status for the trainer's logs; empty after the averager was closed."""
        try:
            return status_scalars(self._averager)
        except AveragingError:
            return {}
