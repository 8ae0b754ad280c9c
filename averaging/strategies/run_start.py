"""The start of training: a peer takes over the state of the run, or becomes the origin of a new one."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from averaging.common import EventLoopThread, on_loop
from averaging.errors import StateError
from averaging.peer import Peer
from averaging.state import State
from averaging.strategies.base import Strategy
from averaging.training import History, Origin, Rank, Training, rank_donors, read_progress

logger = logging.getLogger("averaging.training")

SETTLE_SECONDS = 1.0
"""Seconds for which a peer that begins a run looks for others that began one at the same time."""


class RunStart:
    """The start of one peer's training, in the peer's event loop.

    Args:
        peer: an entered peer.
        check: called with what a state holds besides its tensors, see `Training`.
        take_over: called with a downloaded state, see `Training`.
        now: seconds since the epoch.
        rng: source of the origin's id.
    """

    def __init__(
        self,
        peer: Peer,
        strategy: Strategy,
        training: Training,
        *,
        check: Callable[[Mapping[str, Any]], None],
        take_over: Callable[[State], None],
        now: float,
        rng: random.Random,
    ) -> None:
        self._peer, self._strategy, self._training = peer, strategy, training
        self._check, self._take_over = check, take_over
        self._now, self._rng = now, rng
        self._named: set[frozenset[str]] = set()  # the origins of which a warning said that there are several

    async def begin(self) -> None:
        """Takes over the state of the run; without one, this peer offers its own parameters as the origin of a run.

        Raises:
            StateError: there are peers with a state, but none could deliver it.
        """
        joins = self.joins
        if joins and await self._take_over_from(self.donors()):
            return
        if self._training.donates:
            self._strategy.history = self.new_history()
            self._training.standing = replace(self._training.standing, made=True)
            await self._peer.commit(1)
        self._peer.progress.announce(self._strategy.progress(self._training).pack())
        if not joins:
            return
        if await self.greater_history_appears() and await self._take_over_from(self.donors(above=True)):
            return
        self.log_beginning()

    @property
    def joins(self) -> bool:
        """Whether this peer was configured to join others."""
        return bool(set(self._peer.config.join) - {self._peer.endpoint})

    def new_history(self) -> History:
        """The history of a run that begins with this peer's parameters."""
        rank = Rank.FOUND_NOBODY if self.joins else Rank.APPOINTED
        return History(origin=Origin(rank, -self._now, self._rng.randbytes(8).hex()))

    def log_beginning(self) -> None:
        """Logs that this peer begins with its own parameters, although it has joined others."""
        logger.info(
            "no peer of run %r has the state of a greater origin, so this peer begins with its own parameters",
            self._peer.run_id,
        )

    def donors(self, *, above: bool = False) -> list[str]:
        """The peers that are asked for a state, the best first, see `rank_donors`. Says so if there are several runs.

        Args:
            above: only peers whose history this peer takes over instead of its own.
        """
        announcements = self._peer.progress.announcements
        offered = [donor for donor in self._peer.donors if donor[0] > 0]
        if above:
            ahead = self._strategy.others(self._training, announcements).ahead
            offered = [donor for donor in offered if donor[1] in ahead]
        peers, members = read_progress(announcements), self._peer.progress.members
        found, claims = rank_donors(offered, peers, members, self._peer.config.join)
        runs = frozenset(claim.history.origin.id for claim in claims)
        if len(runs) > 1 and runs not in self._named:
            self._named.add(runs)
            logger.warning(
                "the peers of run %r have different histories: %s. This peer takes the first if it can",
                *(self._peer.run_id, "; ".join(map(str, claims))),
            )
        return found

    async def greater_history_appears(self) -> bool:
        """Whether a peer with a greater history offers its state, now or within `SETTLE_SECONDS`."""
        try:
            async with asyncio.timeout(SETTLE_SECONDS), aclosing(self._peer.progress.watch()) as changes:
                async for _ in changes:
                    if self.donors(above=True):
                        return True
        except TimeoutError:
            pass
        return bool(self.donors(above=True))

    async def _take_over_from(self, donors: list[str]) -> bool:
        """Takes over the state of one of `donors`. Returns False if there are none, or all of them are gone.

        Raises:
            StateError: none could deliver a state, although not all are gone.
        """
        if not donors:
            return False
        try:
            fetched = await self._peer.fetch_state(donors, self._check)
            await self._peer.take_over(fetched, self._take_over)
        except StateError as error:
            if error.gone >= set(donors):
                logger.warning("%s; all of these peers are gone, so this peer starts without their state", error)
                return False
            raise not_taken_over(error) from error
        return True


def not_taken_over(error: StateError) -> StateError:
    """The error of a newcomer that gets no state, with what to do."""
    return StateError(
        f"{error}. A newcomer does not train without the run's state: check that it can reach those peers and has the "
        "same model and optimizer, then start it again"
    )


# The start of training at the ranks of a site: like `RunStart`, but all ranks go the same way.


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
