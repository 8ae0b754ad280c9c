"""What strategies share whose peers must hold equal parameters: a history, and catching up with those who are ahead."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from functools import cached_property
from time import monotonic
from typing import Any

from averaging.errors import RoundError, StateError
from averaging.observe.receipts import Receipt
from averaging.peer.round_options import Enough, all_of
from averaging.strategies.base import Strategy
from averaging.strategies.history import History, Others, Progress, look_around
from averaging.strategies.retries import Retries
from averaging.training.training import Training
from averaging.unpacking import is_number

logger = logging.getLogger(__name__)

MAX_SAMPLES = 2.0**53
"""The most samples of one member in one step; a history with infinitely many could be told to nobody."""


class Together(Strategy):
    """A strategy in which peers make global steps together.

    A step counts for those who have the whole result. Who has missed one, or made another than the rest, takes over the
    state of somebody who is ahead; nobody makes the same step twice.

    Attributes:
        history: the steps made so far.
    """

    history = History()
    _partners: frozenset[str] = frozenset()
    _crowded = False  # there have been more peers than a group takes
    _missing: Mapping[str, bytes] = {}  # who did not come to the last round, or was lost in it, and what it told then

    @cached_property
    def _retries(self) -> Retries:
        return Retries()

    @property
    def global_step(self) -> int:
        """Steps that this run has made together, those of the downloaded state included."""
        return self.history.step

    def joined(self, training: Training) -> None:
        """Tells the others how far this peer is."""
        self._tell(training)

    def _tell(self, training: Training, coming: float = 0.0) -> None:
        training.tell(Progress(self.history, self.samples, coming).pack())

    def _look_around(self, training: Training, *, wait: bool = True) -> Others:
        return self._read(training, training.told(wait=wait))

    def _read(self, training: Training, told: Mapping[str, bytes]) -> Others:
        # Who was missed once is not waited for again until it shows a sign of life.
        told = {name: word for name, word in told.items() if self._missing.get(name) != word}
        return look_around(self.history, told, self._partners, is_client=training.is_client)

    def _all_of(self, training: Training, together: tuple[str, ...]) -> Enough:
        """With how many the next round may begin; warns once if its group has no room for all of them."""
        if not self._crowded and len(together) >= training.group_size:
            self._crowded = True
            logger.warning(
                "%d peers make global steps together, and group_size is %d: whoever is in another group has no part in "
                "a step. Set group_size to at least %d at all peers",
                len(together) + 1,
                training.group_size,
                len(together) + 1,
            )
        return all_of(together)

    def _overtaken(self, training: Training) -> Callable[[Mapping[str, bytes]], bool]:
        """Whether the others have gone on or left, so that nobody will come any more to where this peer waits."""
        own, partners, is_client = self.history, self._partners, training.is_client
        return lambda told: not told or bool(look_around(own, told, partners, is_client=is_client).ahead)

    def _advance(self, training: Training, receipt: Receipt | None, samples: float) -> None:
        """Notes a global step.

        Args:
            training: whose step it is.
            receipt: of its round; None if this peer has made it alone.
            samples: in it, of this peer; those of the others are in the receipt.
        """
        training.say_alone(receipt is None)
        if receipt is not None:
            came = set(receipt.members) - {dropped.endpoint for dropped in receipt.dropped}
            self._partners = frozenset(came)
            self._missing = {name: word for name, word in training.told(wait=False).items() if name not in came}
        if receipt is None:
            self.history = self.history.after(secrets.token_bytes(20), samples)
        else:
            told = [gathered_samples(receipt.gathered[member]) for member in receipt.members]
            self.history = self.history.after(receipt.group_id, sum(told))

    def _may_catch_up(self, others: Others) -> bool:
        """Whether it is not too soon after a failure."""
        return self._retries.is_due(others.ahead, monotonic())

    def _catch_up(self, training: Training, others: Others) -> bool:
        """Takes over the state of somebody who is ahead; whether that was possible, and was tried at all."""
        if not self._may_catch_up(others):
            return False
        own = self.history
        try:
            training.take_over(others.ahead, lambda user: _check_history(user, others.best))
        except (StateError, RoundError) as error:
            behind = f"{len(others.ahead)} peers are at global step {others.best.step}, this one at {own.step}"
            training.warn(behind, error)
            self._retries.failed(others.ahead, monotonic())
            return False
        self._retries.succeeded()
        logger.info("caught up from global step %d to %d", own.step, self.history.step)
        self._tell(training)
        return True


def _check_history(user: Mapping[str, Any], wanted: History) -> None:
    """Refuses a state that is not what its donor told it to be, or more.

    Raises:
        StateError: it is another.
    """
    if History.unpack(user.get("history")) < wanted:
        raise StateError(f"its state is not yet at global step {wanted.step}")


def gathered_samples(user: Any) -> float:
    """The samples that a member has told its group; 0 if it told something else."""
    samples = user.get("samples") if isinstance(user, dict) else None
    return float(samples) if is_number(samples) and 0 < samples <= MAX_SAMPLES else 0.0
