"""How a peer that trains begins: with the state of the run, or else as the origin of a run of its own."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from averaging.errors import StateError
from averaging.peer.peer import Peer
from averaging.state.packing import State
from averaging.strategies.base import Strategy
from averaging.training.history import History, Origin, Rank, read_progress
from averaging.training.training import Training

logger = logging.getLogger("averaging.training")

PATIENCE = 1.0
"""Seconds for which a peer that begins a run looks for others that began one at the same moment."""


class RunStart:
    """The first moments of one peer that trains, in the peer's event loop.

    Args:
        peer: entered.
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

    async def begin(self) -> None:
        """Takes over the state of the run; if nobody has one, this peer's parameters become one that others can take.

        Raises:
            StateError: there are peers with a state, and none could deliver it.
        """
        joins = set(self._peer.config.join) - {self._peer.endpoint}
        if joins and await self._take_over_from(self._donors()):
            return
        if self._training.donates:
            rank = Rank.FOUND_NOBODY if joins else Rank.APPOINTED
            origin = Origin(rank, -self._now, self._rng.randbytes(8).hex())
            self._strategy.history = History(origin=origin)
            await self._peer.commit(1)
        self._peer.progress.tell(self._strategy.progress(self._training).pack())
        if not joins:
            return
        if await self._somebody_counts_more() and await self._take_over_from(self._donors(above=True)):
            return
        logger.info(
            "no peer of run %r has a state that counts more, so this peer begins with its own parameters",
            self._peer.run_id,
        )

    def _donors(self, *, above: bool = False) -> list[str]:
        """Who offers a state: those of the greatest origin first, of these the one that has averaged most.

        Args:
            above: only those with a history to which this peer yields.
        """
        progress = read_progress(self._peer.progress.told)
        own, donates = self._strategy.announced(self._training), self._training.donates
        offered = [(priority, name) for priority, name in self._peer.donors if priority > 0]
        if above:
            offered = [
                (priority, name)
                for priority, name in offered
                if name in progress and own.yields_to(progress[name].history, donates=donates)
            ]
        histories = [progress[name].history for _, name in offered if name in progress]
        best = max(histories).origin if histories else Origin()
        return [
            name
            for _, name in sorted(
                offered,
                key=lambda donor: (
                    donor[1] not in progress or progress[donor[1]].history.origin != best,
                    -donor[0],
                    donor[1],
                ),
            )
        ]

    async def _somebody_counts_more(self) -> bool:
        """Whether a peer with a greater history offers its state, now or soon."""
        try:
            async with asyncio.timeout(PATIENCE), aclosing(self._peer.progress.watch()) as changes:
                async for _ in changes:
                    if self._donors(above=True):
                        return True
        except TimeoutError:
            pass
        return bool(self._donors(above=True))

    async def _take_over_from(self, donors: list[str]) -> bool:
        """Whether the state of one of them was taken over; not if there are none, or all of them are gone.

        Raises:
            StateError: none could deliver a state, although somebody is there.
        """
        if not donors:
            return False
        try:
            fetched = await self._peer.fetch_state(donors, self._check)
            await self._peer.take_over(fetched, self._take_over)
        except StateError as error:
            if error.gone >= set(donors):
                logger.warning("%s; nobody is there any more, so this peer does without", error)
                return False
            raise StateError(
                f"{error}. A newcomer does not train without the run's state: check that it reaches those peers "
                "and has the same model and optimizer, then start it again"
            ) from error
        return True
