"""What strategies share whose peers must hold equal parameters: a history, and global steps that count for all."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

import torch

from averaging.common.safe_msgpack import is_number
from averaging.errors import StateError
from averaging.observe.receipts import Receipt
from averaging.peer.round_options import Awaited
from averaging.strategies.base import Strategy
from averaging.training.history import History, Others, Stage, look_around
from averaging.training.training import Training

logger = logging.getLogger(__name__)

MAX_SAMPLES = 2.0**53
"""The most samples of one member in one step; a history with infinitely many could be announced to nobody."""


class LockstepStrategy(Strategy):
    """A strategy in which peers make global steps together.

    A step counts for those who have the whole result. A peer that has missed one, or made another than the rest, takes
    over the state of one that is ahead; nobody makes the same step twice.
    """

    _crowded = False  # there have been more peers than a group takes
    _missing: Mapping[str, bytes] = {}  # those who were lost in the last round or did not come, and their progress then

    @property
    def global_step(self) -> int:
        """Steps that this run has made together, those of the downloaded state included."""
        return self.history.step

    def announced(self, training: Training) -> History:
        """The history itself: peers that announce equal ones hold equal parameters."""
        return self.history

    def others(self, training: Training, told: Mapping[str, bytes]) -> Others:
        """Reads the progress of the other peers, by endpoint."""
        # A peer that was missed once is not waited for again until it shows a sign of life.
        told = {name: progress for name, progress in told.items() if self._missing.get(name) != progress}
        return look_around(
            self.history,
            told,
            self._partners,
            doubted=self._catching_up.doubted(training),
            donates=training.donates,
            trains=self.stage is Stage.TRAINING,
        )

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        """Takes over what another peer has; the averager sets the history.

        Raises:
            StateError: there is no history in it.
        """
        if "history" not in user:
            raise StateError("the state has no history of global steps")

    def _level(self, training: Training, together: tuple[str, ...]) -> Awaited:
        """Whom the next round waits for: those of `together` that have neither left nor gone on.

        Warns once if its group has no room for all of them.
        """
        if not self._crowded and len(together) >= training.group_size:
            self._crowded = True
            logger.warning(
                "%d peers make global steps together, and group_size is %d: whoever is in another group has no part in "
                "a step. Set group_size to at least %d at all peers",
                len(together) + 1,
                training.group_size,
                len(together) + 1,
            )
        own, partners, trains = self.history, self._partners, self.stage is Stage.TRAINING
        return lambda told: look_around(own, told, partners, trains=trains).together

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


def gathered_samples(user: Any) -> float:
    """The samples that a member has announced to its group; 0 if it announced something else."""
    samples = user.get("samples") if isinstance(user, dict) else None
    return float(samples) if is_number(samples) and 0 < samples <= MAX_SAMPLES else 0.0
