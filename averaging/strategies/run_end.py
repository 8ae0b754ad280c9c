"""The end of training: the peers average a last time and compare their final weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from averaging.common import listed
from averaging.receipts import Finish
from averaging.strategies.base import Strategy
from averaging.training import Others, Stage, Training, done_training, read_progress, still_training

START_TIMEOUT = 2.0
"""Seconds within which a peer that is ahead must start to send its state."""

logger = logging.getLogger("averaging.training")


class RunEnd:
    """The end of one peer's training, in the training thread.

    The other peers read in this peer's progress that its training has ended, and no longer wait for it in their rounds.
    It waits until their training has ended, too, or its time is up.

    Args:
        timeout: seconds until `finish` returns at the latest.
    """

    def __init__(self, training: Training, strategy: Strategy, timeout: float) -> None:
        self._training, self._strategy = training, strategy
        self._end = training.monotonic() + timeout
        self._digests: dict[str, str] = {}  # kept, since a peer that has finished may leave
        self._parts: dict[str, Mapping[str, str]] = {}  # likewise

    def finish(self) -> Finish:
        """Ends the round in progress, makes the weights of all peers equal, and compares them."""
        training, strategy = self._training, self._strategy
        training.modes.train()  # a round in progress belongs to the training weights
        strategy.finish(training)
        self._announce(Stage.WAITING)
        # If the training of some peer does not end, the first peer whose time is up ends the wait of the others.
        seen = self._wait(
            lambda seen: not still_training(seen) or bool(done_training(seen, Stage.CONCLUDING)), self._remaining / 2
        )
        self._announce(Stage.CONCLUDING)
        late, partners = still_training(seen), done_training(seen)
        if late:
            logger.log(
                logging.WARNING if training.site.leads else logging.DEBUG,
                "%d peers are still training; this one ends without them: %s",
                len(late),
                listed(sorted(late)),
            )
        self._catch_up(partners, self._remaining / 2)
        receipt = strategy.conclude(training, partners, self._remaining)
        training.modes.eval()
        self._catch_up(partners, self._remaining)
        own = strategy.digest = training.digest()
        training.measure_parts()
        self._announce(Stage.ENDED)
        self._wait(lambda seen: all(self._digest_of(name, seen) for name in partners & seen.keys()), self._remaining)
        digests = {name: self._digests.get(name, "") for name in sorted(partners)}
        # A peer that leaves withdraws its record, so it stays until the others have read it.
        self._announce(Stage.COMPARED)
        self._wait(lambda seen: partners & seen.keys() <= done_training(seen, Stage.COMPARED), self._remaining)
        differing = {name: _differing(training.parts, self._parts.get(name, {})) for name in digests}
        return Finish(
            own,
            digests,
            tuple(sorted(late)),
            receipt,
            differing={name: parts for name, parts in differing.items() if parts},
            unchecked=not training.knows_model,
        )

    def _announce(self, stage: Stage) -> None:
        self._strategy.stage = stage
        self._strategy.announce(self._training)

    def _catch_up(self, partners: frozenset[str], seconds: float) -> None:
        """Takes over the state of peers that are ahead, until all remaining partners have the same history."""
        training, strategy = self._training, self._strategy
        end = training.monotonic() + seconds

        def is_level(seen: Mapping[str, bytes]) -> bool:
            return partners & seen.keys() <= set(strategy.others(training, seen).together)

        def is_level_now(seen: Mapping[str, bytes]) -> bool:
            return training.agreed(lambda: is_level(seen))

        def others(seen: Mapping[str, bytes]) -> Others:
            return training.agreed(lambda: strategy.others(training, seen))

        while (left := training.agreed(lambda: end - training.monotonic())) > 0:
            seen = self._wait(lambda seen: is_level(seen) or bool(strategy.others(training, seen).ahead), left)
            if is_level_now(seen):
                return
            strategy.catch_up(training, others(seen), min(left, START_TIMEOUT))

    @property
    def _remaining(self) -> float:
        return max(0.0, self._end - self._training.monotonic())

    def _wait(self, condition: Callable[[Mapping[str, bytes]], bool], seconds: float) -> Mapping[str, bytes]:
        """Waits until the other peers' announcements fulfil the condition, or for `seconds`; returns them."""
        seen = self._training.wait_for_announcements(condition, seconds)
        self._training.refresh()
        for name in seen:
            self._digest_of(name, seen)
        return seen

    def _digest_of(self, name: str, seen: Mapping[str, bytes]) -> str:
        """The digest of the weights of a peer that has finished; empty if it has not."""
        progress = read_progress({name: seen[name]}).get(name)
        if progress is not None and progress.digest:
            self._digests[name], self._parts[name] = progress.digest, progress.parts
        return self._digests.get(name, "")


def _differing(own: Mapping[str, str], others: Mapping[str, str]) -> tuple[str, ...]:
    """The parts of the model that differ, of those that both peers know."""
    return tuple(part for part, digest in own.items() if others.get(part, digest) != digest)
