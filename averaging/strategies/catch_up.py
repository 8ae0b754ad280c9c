"""Taking over the state of a peer that is ahead, once it has proved that it has one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from averaging.errors import AveragingError, RoundError, StateError
from averaging.strategies.progress_claims import ProgressClaims
from averaging.training.history import History, Others
from averaging.training.training import Fetch, Training

logger = logging.getLogger(__name__)

ANOTHER_SECONDS = 1.0
"""After so long without an answer another peer that is ahead is asked, too."""

MOST_ASKED = 8
"""So many are asked at a time at most; then the one that was asked first is given up for another."""

PATIENCE = 10.0
"""Seconds that a peer with nobody to go on with waits for a state to begin; then it goes on alone."""


class CatchUp:
    """The downloads of one strategy from peers that claim to be ahead.

    A record in discovery is a claim. It holds training up only once its peer begins to send a state that is as far as
    claimed. After a failed attempt it is ignored for a while, see `ProgressClaims`. Peers with which this one has
    averaged before are asked first, then those that claim most.
    """

    def __init__(self) -> None:
        self._claims = ProgressClaims()
        self._fetches: list[Fetch] = []  # in progress, the first begun first
        self._warned = False  # of a failure since the last success

    @property
    def busy(self) -> bool:
        """Whether a download is in progress."""
        return bool(self._fetches)

    def doubted(self, training: Training) -> Collection[str]:
        """Whose claims are passed over now."""
        return self._claims.doubted(training.monotonic())

    def follow(
        self,
        training: Training,
        own: History,
        others: Others,
        partners: Collection[str] = (),
        patience: float = 0.0,
    ) -> Fetch | None:
        """Downloads the state of somebody who is ahead.

        Args:
            training: whose state is to be replaced.
            own: its history.
            others: who is ahead.
            partners: peers with which this one has averaged.
            patience: seconds to wait for a state to begin. One that has begun is waited for in any case; and a peer
                that has nobody to go on with waits a while, too.

        Returns:
            The download, if it has brought a state that counts more than `own`.
        """
        began = training.monotonic()
        if not others.together and self._claims.may_wait(began):
            patience = max(patience, PATIENCE)
        while others.ahead or self._fetches:
            self._ask(training, others, partners)
            found = self._take(training, own)
            if found is not None:
                self.stop(training)
                return found
            if not self._fetches:
                return None
            now = training.monotonic()
            left = began + patience - now
            if delivering := [fetch for fetch in self._fetches if fetch.delivering]:
                self._keep(training, delivering[0])
                training.wait_for_fetches(delivering[:1], None)
            elif left > 0:
                training.wait_for_fetches(self._fetches, min(left, ANOTHER_SECONDS))
            else:
                if patience:
                    self._claims.failed([name for fetch in self._fetches for name in fetch.donors], now, now - began)
                return None
        return None

    def taken_over(self, before: History, now: History) -> None:
        """The state of a download that `follow` returned has been taken over."""
        self._claims.succeeded()
        self._warned = False
        if before.origin.id != now.origin.id:
            logger.info("took over the run that another peer began: global step %d", now.step)
        else:
            logger.info("caught up from global step %d to %d", before.step, now.step)

    def failed(self, training: Training, own: History, fetch: Fetch, error: AveragingError) -> None:
        """A download has failed, or its state cannot be taken over: the claims behind it are doubted."""
        now = training.monotonic()
        self._claims.failed(fetch.donors, now, now - fetch.began)
        logger.log(
            logging.INFO if self._warned else logging.WARNING,
            "others announce a state further than global step %d, which cannot be had: %s; training goes on",
            *(own.step, error),
        )
        self._warned = True

    def stop(self, training: Training) -> None:
        """Gives up all downloads in progress."""
        self._keep(training, None)

    def _keep(self, training: Training, only: Fetch | None) -> None:
        """Gives up all downloads but one."""
        for fetch in self._fetches:
            if fetch is not only:
                training.give_up(fetch)
        self._fetches = [fetch for fetch in self._fetches if fetch is only]

    def _ask(self, training: Training, others: Others, partners: Collection[str]) -> None:
        """Begins a download, if nobody was asked for a while and nobody delivers."""
        now = training.monotonic()
        if any(fetch.delivering or now - fetch.began < ANOTHER_SECONDS for fetch in self._fetches):
            return
        asked = {name for fetch in self._fetches for name in fetch.donors}
        doubted = self._claims.doubted(now)
        claims = {name: one for name, one in others.ahead.items() if name not in asked and name not in doubted}
        if not claims:
            return
        known = claims.keys() & set(partners) or claims.keys()
        best = max(claims[name] for name in known)
        names = sorted(name for name in known if claims[name] == best)
        if len(self._fetches) >= MOST_ASKED:
            training.give_up(self._fetches.pop(0))
        self._fetches.append(training.fetch(names[: training.verify_donors], partial(check_history, wanted=best)))

    def _take(self, training: Training, own: History) -> Fetch | None:
        """The first download that has ended with a state that counts more than `own`; others that have ended go."""
        for fetch in [fetch for fetch in self._fetches if fetch.done()]:
            self._fetches.remove(fetch)
            try:
                history = History.unpack(training.receive(fetch).get("history"))
            except (StateError, RoundError) as error:
                self.failed(training, own, fetch, error)
                continue
            if own.yields_to(history, donates=training.donates):
                return fetch
        return None


def check_history(user: Mapping[str, Any], wanted: History) -> None:
    """Refuses a state that is behind what its donor has announced.

    Args:
        user: what the state holds of its strategy.
        wanted: the history that was announced.

    Raises:
        StateError: it is behind.
    """
    if History.unpack(user.get("history")) < wanted:
        raise StateError(f"its state is not yet at global step {wanted.step}")
