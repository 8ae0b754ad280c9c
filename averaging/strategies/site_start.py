"""The start of training at the ranks of a site: like `RunStart`, but all ranks go the same way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from averaging.errors import StateError
from averaging.peer.peer import Peer
from averaging.strategies.base import Strategy
from averaging.strategies.run_start import RunStart, not_taken_over
from averaging.training.event_loop_thread import EventLoopThread, on_loop
from averaging.training.training import Training

logger = logging.getLogger("averaging.training")


class SiteStart:
    """The start of one site's training, in the training threads of its ranks.

    Args:
        peer: the peer of this rank, which is entered if the rank owns it.
        thread: in which it runs.
        start: used at the leader, which decides.
        copy: copies what the owner of a shard begins with to the ranks that hold the same shard.
    """

    def __init__(
        self,
        peer: Peer,
        thread: EventLoopThread,
        strategy: Strategy,
        training: Training,
        start: RunStart,
        copy: Callable[[], None],
    ) -> None:
        self._peer, self._thread = peer, thread
        self._strategy, self._training, self._start, self._copy = strategy, training, start, copy

    def begin(self) -> None:
        """Takes over the state of the run; without one, this site offers its own parameters as the origin of a run.

        Raises:
            StateError: there are peers with a state, but none could deliver it.
        """
        training, thread, start = self._training, self._thread, self._start
        joins = training.agreed(lambda: start.joins)
        if joins and self._take_over_from(training.agreed(lambda: thread.run(on_loop(start.donors)))):
            return
        self._copy()
        if training.donates:
            self._strategy.history = training.agreed(start.new_history)
            training.standing = replace(training.standing, made=True)
            if training.site.owns:
                thread.run(self._peer.commit(1))
        self._strategy.announce(training)
        if not joins:
            return

        def greater() -> list[str]:
            appears = thread.run(start.greater_history_appears())
            return thread.run(on_loop(lambda: start.donors(above=True))) if appears else []

        if not self._take_over_from(training.agreed(greater)) and training.site.leads:
            start.log_beginning()

    def _take_over_from(self, donors: list[str]) -> bool:
        if not donors:
            return False
        try:
            self._training.download(donors)
        except StateError as error:
            if error.gone >= set(donors):
                if self._training.site.leads:
                    logger.warning("%s; all of these peers are gone, so this site starts without their state", error)
                return False
            raise not_taken_over(error) from error
        return True
