"""How training ends: the peers come together once more, and compare the weights that they are left with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from averaging.common.sanitize import listed
from averaging.observe.training_status import Finish
from averaging.strategies.base import Strategy
from averaging.training.history import Stage, ending, read_progress, training_on
from averaging.training.training import Training

PATIENCE = 2.0
"""Seconds that a peer that is ahead may take to begin to send its state."""

logger = logging.getLogger("averaging.training")


class RunEnd:
    """The end of one peer's training, in the training thread.

    The other peers see in this peer's progress that it trains no more, and do not wait for it in their rounds. It waits
    until all of them have come as far, or its time is over.

    Args:
        timeout: seconds until the result is there at the latest.
    """

    def __init__(self, training: Training, strategy: Strategy, timeout: float) -> None:
        self._training, self._strategy = training, strategy
        self._end = training.monotonic() + timeout
        self._digests: dict[str, str] = {}  # of those who have finished; they may leave meanwhile

    def finish(self) -> Finish:
        """Ends what is in progress, brings the peers together, and compares."""
        training, strategy = self._training, self._strategy
        strategy.finish(training)
        self._announce(Stage.WAITING)
        # Of those who wait for somebody in vain, the first whose time is over takes the others along.
        told = self._wait(lambda told: not training_on(told) or bool(ending(told, Stage.CONCLUDING)), self._left / 2)
        self._announce(Stage.CONCLUDING)
        late, partners = training_on(told), ending(told)
        if late:
            logger.warning("%d peers go on training; this one ends without them: %s", len(late), listed(sorted(late)))
        self._come_level(partners, self._left / 2)
        receipt = strategy.conclude(training, partners, self._left)
        self._come_level(partners, self._left)
        own = strategy.digest = training.digest()
        self._announce(Stage.ENDED)
        self._wait(lambda told: all(self._digest_of(name, told) for name in partners & told.keys()), self._left)
        digests = {name: self._digests.get(name, "") for name in sorted(partners)}
        # Nobody leaves, and takes its record along, before the others have read it.
        self._announce(Stage.COMPARED)
        self._wait(lambda told: partners & told.keys() <= ending(told, Stage.COMPARED), self._left)
        return Finish(own, digests, tuple(sorted(late)), receipt)

    def _announce(self, stage: Stage) -> None:
        self._strategy.stage = stage
        self._strategy.announce(self._training)

    def _come_level(self, partners: frozenset[str], seconds: float) -> None:
        """Takes over the state of those who are ahead, until all partners that are still there are level."""
        training, strategy = self._training, self._strategy
        end = training.monotonic() + seconds

        def is_level(told: Mapping[str, bytes]) -> bool:
            return partners & told.keys() <= set(strategy.others(training, told).together)

        while (left := end - training.monotonic()) > 0:
            told = self._wait(lambda told: is_level(told) or bool(strategy.others(training, told).ahead), left)
            if is_level(told):
                return
            strategy.keep_up(training, strategy.others(training, told), min(left, PATIENCE))

    @property
    def _left(self) -> float:
        return max(0.0, self._end - self._training.monotonic())

    def _wait(self, condition: Callable[[Mapping[str, bytes]], bool], seconds: float) -> Mapping[str, bytes]:
        """Waits until the others' progress fulfils the condition, at most so long; returns their progress."""
        told = self._training.told_until(condition, seconds)
        self._training.forget()  # what was heard before
        for name in told:
            self._digest_of(name, told)
        return told

    def _digest_of(self, name: str, told: Mapping[str, bytes]) -> str:
        """The digest of the weights of a peer that has finished; empty if it has not."""
        progress = read_progress({name: told[name]}).get(name)
        if progress is not None and progress.digest:
            self._digests[name] = progress.digest
        return self._digests.get(name, "")
