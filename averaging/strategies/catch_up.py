"""Downloads the state of a peer that is ahead, while training goes on or waits for it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from averaging.common import Backoff
from averaging.errors import AveragingError, RoundError, StateError
from averaging.training import BackgroundDownload, History, Others, StrategyContext

logger = logging.getLogger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.25, 8.0
"""Seconds for which the donors of a failed download are ignored, doubled with each further failure; and the maximum,
unless the download itself took longer."""

FIRST_ANSWER_SECONDS = 0.25
"""Seconds for which training waits for the answer of a peer that is asked for its state, also if it could average with
others. A state that comes with the next step only is a step old by then, so this peer would stay one step behind."""

START_TIMEOUT = 10.0
"""Seconds for which a peer that can average with nobody waits for a download to start; then it continues alone."""


class CatchUp:
    """The downloads of one strategy from peers that are ahead, one at a time.

    Members of the last group are asked first, then the peers that are furthest. Donors that do not deliver are ignored
    for a while: this peer may not reach them, or they may have died.
    """

    def __init__(self) -> None:
        self._fetch: BackgroundDownload | None = None  # in progress
        self._ignored: dict[str, float] = {}  # donors that did not deliver, and until when they are not asked again
        self._backoff = Backoff(FIRST_PAUSE, LAST_PAUSE)
        self._warned = False  # of a failure since the last success

    @property
    def busy(self) -> bool:
        return self._fetch is not None

    def ignored(self, training: StrategyContext) -> Collection[str]:
        now = training.monotonic()
        return tuple(name for name, until in self._ignored.items() if now < until)

    def follow(
        self,
        training: StrategyContext,
        own: History,
        others: Others,
        partners: Collection[str] = (),
        start_timeout: float = 0.0,
        *,
        wait: bool = True,
    ) -> BackgroundDownload | None:
        """Downloads the state of a peer that is ahead; returns a download that has brought another history than `own`.

        A peer that can average with nobody waits until a download starts for `START_TIMEOUT` at least, and any other
        one for `start_timeout`, or `FIRST_ANSWER_SECONDS`. One that has started is always waited for. Without `wait`
        training goes on during the download, and later calls return it.
        """
        began = training.monotonic()
        if wait and not others.together and not self.ignored(training):
            start_timeout = max(start_timeout, START_TIMEOUT)
        until = began + start_timeout
        while (fetch := self._fetch or self._ask(training, others, partners)) is not None:
            self._fetch = fetch
            if fetch.done():
                self._fetch = None
                if self._brings_more(training, own, others, fetch):
                    return fetch
                continue  # others may deliver
            if not wait:
                return None
            if fetch.began >= began:
                until = max(until, fetch.began + FIRST_ANSWER_SECONDS)
            left = until - training.monotonic()
            if left <= 0 and not fetch.delivering:
                if start_timeout:
                    self._ignore(training, fetch, began)
                return None
            training.states.wait(fetch, None if fetch.delivering else left)
        return None

    def succeeded(self, before: History, now: History) -> None:
        """Records that the state of a download from `follow` has been taken over."""
        self._ignored.clear()
        self._backoff.reset()
        self._warned = False
        if before.origin.id != now.origin.id:
            logger.info("took over the run of another origin: global step %d", now.step)
        else:
            logger.info("caught up from global step %d to %d", before.step, now.step)

    def failed(self, training: StrategyContext, own: History, fetch: BackgroundDownload, error: AveragingError) -> None:
        """Records that a download has failed, or that its state does not fit."""
        self._ignore(training, fetch, fetch.began)
        logger.log(
            logging.INFO if self._warned else logging.WARNING,
            "peers announce more than global step %d, but their state cannot be downloaded: %s; training goes on",
            *(own.step, error),
        )
        self._warned = True

    def _ignore(self, training: StrategyContext, fetch: BackgroundDownload, since: float) -> None:
        now = training.monotonic()
        pause = max(self._backoff.next_delay(), now - since)
        self._ignored = {name: until for name, until in self._ignored.items() if now < until}
        self._ignored |= dict.fromkeys(fetch.donors, now + pause)

    def _ask(self, training: StrategyContext, others: Others, partners: Collection[str]) -> BackgroundDownload | None:
        ignored = self.ignored(training)
        ahead = {name: history for name, history in others.ahead.items() if name not in ignored}
        if not ahead:
            return None
        known = ahead.keys() & set(partners) or ahead.keys()
        best = max(ahead[name] for name in known)
        names = sorted(name for name in known if ahead[name] == best)
        return training.states.fetch(names, partial(check_history, wanted=best))

    def _brings_more(self, training: StrategyContext, own: History, others: Others, fetch: BackgroundDownload) -> bool:
        try:
            history = read_history(training.states.receive(fetch))
        except (StateError, RoundError) as error:
            self.failed(training, own, fetch, error)
            return False
        if history == own or (history < own and own.includes(history)):
            return False
        # If the records of its donors have gone meanwhile, nobody says any more how many hold that history.
        return bool({*fetch.donors} & others.ahead.keys()) or own.yields_to(history, donates=training.donates)


def read_history(user: Mapping[str, Any]) -> History:
    """The history in the strategy's part of a state, or StateError if it is malformed."""
    return History.unpack(user.get("history"), user.get("trail"))


def check_history(user: Mapping[str, Any], wanted: History) -> None:
    """Refuses a state of another origin than its donor has announced, or with fewer steps, as after its restart."""
    history = read_history(user)
    if history.origin.id != wanted.origin.id:
        raise StateError("its state has another origin than it announces")
    if history < wanted:
        raise StateError(f"its state is not yet at global step {wanted.step}")
