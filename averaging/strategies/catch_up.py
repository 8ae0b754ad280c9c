"""Downloads the state of a peer that is ahead, once that peer has proved that it has one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from averaging.common import Backoff, listed
from averaging.errors import AveragingError, RoundError, StateError
from averaging.state import of_all_members
from averaging.training import TRAIL, BackgroundDownload, History, Others, StrategyContext

# Decides which peers that claim to be ahead are asked for their state. Pure: the caller passes the time.


FIRST_PAUSE, LAST_PAUSE = 0.25, 8.0
"""Seconds for which claims are ignored after the first failed download, doubled with each further failure; and the
maximum, unless the download itself took longer."""


class ProgressClaims:
    """Remembers the peers whose claims failed, so that a false claim delays no other peer.

    A peer that was not asked before is asked at once. A peer that failed is ignored for a pause and then asked again.
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._backoff = Backoff(FIRST_PAUSE, LAST_PAUSE)
        self._next = 0.0

    def ignored(self, now: float) -> Collection[str]:
        return frozenset(self._failed) if now < self._next else frozenset()

    def may_wait(self, now: float) -> bool:
        return now >= self._next

    def failed(self, donors: Collection[str], now: float, seconds: float) -> None:
        """Records that none of `donors` could deliver, and that finding out took `seconds`."""
        if now - seconds < self._next:  # it began while other peers were ignored already
            self._next = max(self._next, now + seconds)
        else:
            self._failed.clear()
            self._next = now + max(self._backoff.next_delay(), seconds)
        self._failed.update(donors)

    def succeeded(self) -> None:
        self._failed, self._next = set(), 0.0
        self._backoff.reset()


logger = logging.getLogger(__name__)

FIRST_ANSWER_SECONDS = 0.25
"""Seconds for which training waits for the answer of a peer that is asked for its state, also if it could average with
others. A state that comes with the next step only is a step old by then, so this peer would stay one step behind."""

FIRST_IMPATIENCE, LAST_IMPATIENCE = 2.0, 30.0
"""Seconds without such a wait after a peer did not answer in time, doubled with each further one; and the maximum."""

NEXT_DONOR_SECONDS = 1.0
"""Seconds without an answer after which the next peer that is ahead is asked as well."""

MAX_DOWNLOADS = 8
"""Downloads at a time; the oldest one is cancelled in favour of a further one."""

MAX_FURTHER = 10_000
"""Global steps that a donor may have made since the record was written, which may be some seconds old."""

MAX_REFUSED = 256
"""Peers of which a peer remembers that it has warned of them."""

REFUSED_SECONDS = 5.0
"""Seconds for which a step of the own run is refused until that is worth a warning."""

START_TIMEOUT = 10.0
"""Seconds for which a peer that can average with nobody waits for a download to start; then it continues alone."""


class CatchUp:
    """The downloads of one strategy from peers that claim to be ahead.

    A record in discovery is only a claim. Training waits for it once that peer starts to send a state that is as far as
    claimed. A claim whose download failed is ignored for a while, see `ProgressClaims`. Members of the last group are
    asked first, then the peers that claim most.
    """

    def __init__(self) -> None:
        self._claims = ProgressClaims()
        self._fetches: list[BackgroundDownload] = []  # in progress, the oldest first
        self._impatience = Backoff(FIRST_IMPATIENCE, LAST_IMPATIENCE)
        self._patient_from = 0.0
        self._warned = False  # of a failure since the last success
        self._refused_since: dict[str, float] = {}  # peers whose greater history is refused now
        self._refused: dict[str, str] = {}  # peers of whose history a warning was logged, and its origin

    @property
    def busy(self) -> bool:
        return bool(self._fetches)

    def ignored(self, training: StrategyContext) -> Collection[str]:
        return self._claims.ignored(training.monotonic())

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
        """Downloads the state of a peer that is ahead; returns one that has brought a greater history than `own`.

        A peer that can average with nobody waits until a download starts for `START_TIMEOUT` at least, and any other
        one for `start_timeout`, or `FIRST_ANSWER_SECONDS`. One that has started is always waited for. Without `wait`
        training goes on during the download, and later calls return it.
        """
        began = training.monotonic()
        if wait and not others.together and self._claims.may_wait(began):
            start_timeout = max(start_timeout, START_TIMEOUT)
        until = began + start_timeout
        while others.ahead or self._fetches:
            if self._ask(training, others, partners) and self._patient_from <= (now := training.monotonic()):
                until = max(until, now + FIRST_ANSWER_SECONDS)
            download = self._take(training, own, others)
            if download is not None:
                self.stop(training)
                return download
            if not self._fetches or not wait:
                return None
            now = training.monotonic()
            left = until - now
            if delivering := [fetch for fetch in self._fetches if fetch.delivering]:
                self._keep(training, delivering[0])
                training.states.wait(delivering[:1], None)
            elif left > 0:
                training.states.wait(self._fetches, min(left, NEXT_DONOR_SECONDS))
            else:
                if until > began:
                    self._patient_from = now + self._impatience.next_delay()
                if start_timeout:
                    self._claims.failed([name for fetch in self._fetches for name in fetch.donors], now, now - began)
                return None
        return None

    def succeeded(self, before: History, now: History) -> None:
        """Records that the state of a download from `follow` has been taken over."""
        self._claims.succeeded()
        self._impatience.reset()
        self._patient_from = 0.0
        self._warned = False
        if before.origin.id != now.origin.id:
            logger.info("took over the run of another origin: global step %d", now.step)
        else:
            logger.info("caught up from global step %d to %d", before.step, now.step)

    def note_refused(self, own: History, others: Others, now: float) -> None:
        """Warns once of the peers whose greater history is refused.

        The members of a round announce their step one after another, so for a moment the first one stands alone behind
        it. Only a step of this run that is refused for longer is one.
        """
        self._refused_since = {name: self._refused_since.get(name, now) for name in others.refused}
        new = {
            name: history
            for name, history in others.refused.items()
            if self._refused.get(name) != history.origin.id
            and (history.origin.id != own.origin.id or now - self._refused_since[name] >= REFUSED_SECONDS)
        }
        if not new:
            return
        if len(self._refused) + len(new) > MAX_REFUSED:
            self._refused.clear()
        self._refused |= {name: history.origin.id for name, history in new.items()}
        greatest = max(new.values())
        logger.warning(
            "too few members stand behind the history of %s, which is said to be at step %d of %s: this peer stays at "
            "its own step %d. To take over such a state, start this peer with allow_takeover=True",
            *(listed(sorted(new)), greatest.step),
            "this run" if greatest.origin.id == own.origin.id else "a run with another origin",
            own.step,
        )

    def failed(self, training: StrategyContext, own: History, fetch: BackgroundDownload, error: AveragingError) -> None:
        """Records that a download has failed, or that its state does not fit: its donors are ignored for a while."""
        now = training.monotonic()
        self._claims.failed(fetch.donors, now, now - fetch.began)
        logger.log(
            logging.INFO if self._warned else logging.WARNING,
            "peers announce more than global step %d, but their state cannot be downloaded: %s; training goes on",
            *(own.step, error),
        )
        self._warned = True

    def stop(self, training: StrategyContext) -> None:
        self._keep(training, None)

    def _keep(self, training: StrategyContext, only: BackgroundDownload | None) -> None:
        for fetch in self._fetches:
            if fetch is not only:
                training.states.cancel(fetch)
        self._fetches = [fetch for fetch in self._fetches if fetch is only]

    def _ask(self, training: StrategyContext, others: Others, partners: Collection[str]) -> bool:
        """Starts a download, unless the last one started recently or one delivers; returns whether it did."""
        now = training.monotonic()
        if any(fetch.delivering or now - fetch.began < NEXT_DONOR_SECONDS for fetch in self._fetches):
            return False
        asked = {name for fetch in self._fetches for name in fetch.donors}
        ignored = self._claims.ignored(now)
        claims = {name: history for name, history in others.ahead.items() if name not in asked and name not in ignored}
        if not claims:
            return False
        known = claims.keys() & set(partners) or claims.keys()
        best = max(claims[name] for name in known)
        names = of_all_members(sorted(name for name in known if claims[name] == best), training.announcements.members)
        if len(self._fetches) >= MAX_DOWNLOADS:
            training.states.cancel(self._fetches.pop(0))
        self._fetches.append(training.states.fetch(names[:1], partial(check_history, wanted=best)))
        return True

    def _take(self, training: StrategyContext, own: History, others: Others) -> BackgroundDownload | None:
        """The first finished download with a history to take over; removes all finished ones before it."""
        for fetch in [fetch for fetch in self._fetches if fetch.done()]:
            self._fetches.remove(fetch)
            try:
                history = read_history(training.states.receive(fetch))
            except (StateError, RoundError) as error:
                self.failed(training, own, fetch, error)
                continue
            if history == own or (history < own and own.includes(history)):
                continue
            donors = set(fetch.donors)
            if donors & others.ahead.keys():
                return fetch
            # The record of its donor has gone meanwhile.
            if not donors & others.refused.keys() and own.yields_to(history, donates=training.donates):
                return fetch
        return None


def read_history(user: Mapping[str, Any]) -> History:
    """The history in the strategy's part of a state.

    Raises:
        StateError: it is malformed.
    """
    return History.unpack(user.get("history"), user.get("trail"))


def check_history(user: Mapping[str, Any], wanted: History) -> None:
    """Refuses a state that does not have the history its donor has announced, or has left it far behind.

    Raises:
        StateError: the state has another history.
    """
    history = read_history(user)
    if history.origin.id != wanted.origin.id:
        raise StateError("its state has another origin than it announces")
    if history < wanted:
        raise StateError(f"its state is not yet at global step {wanted.step}")
    further = history.step - wanted.step
    follows = history.includes(wanted) if further <= min(TRAIL, len(history.trail)) else further <= MAX_FURTHER
    if "trail" in user and wanted.lineage and not follows:
        raise StateError(f"its state is at global step {history.step} and does not follow the announced {wanted.step}")
