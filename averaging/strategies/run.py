"""The start and the end of one peer's training.

At the start a peer takes over the state of the run, or becomes the origin of a new one. At the end the peers average a
last time and compare their final weights.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial

from averaging.common import is_finite, listed, on_loop
from averaging.errors import ConfigError, StateError
from averaging.receipts import Finish
from averaging.strategies.base import Strategy
from averaging.training import (
    History,
    Origin,
    Others,
    Rank,
    Stage,
    StrategyContext,
    done_training,
    rank_donors,
    read_progress,
    same_origin,
    still_training,
)

logger = logging.getLogger("averaging.training")

START_TIMEOUT = 2.0
"""Seconds within which a peer that is ahead must start to send its state at the end of training."""

SETTLE_SECONDS = 1.0
"""Seconds for which a peer looks for others that began a run at the same time, or ended their training."""

LOOK_SECONDS = 2.0
"""Interval at which a peer that waits at the end of the training looks whether the others are still there."""


class RunStart:
    """The start of one peer's training, in the training thread; all ranks of a site do the same."""

    def __init__(self, strategy: Strategy, training: StrategyContext, rng: random.Random) -> None:
        self._strategy, self._training, self._peer = strategy, training, training.peer
        self._now, self._rng = training.now(), rng
        self._named: set[frozenset[str]] = set()  # the origins of which a warning said that there are several

    def begin(self) -> None:
        """Takes over the state of the run; without one, this peer offers its own parameters as the origin of a run."""
        training, site, thread = self._training, self._training.site, self._training.thread
        joins = site.broadcast_from_leader(lambda: self._joins)
        site.broadcast_from_leader(lambda: thread.run(on_loop(self._check_terms)))
        if joins and self._take_over_from(site.broadcast_from_leader(lambda: thread.run(on_loop(self.donors)))):
            return
        site.copy([*self._peer.own_tensors, *training.shared_buffers.values()])
        if training.donates:
            self._strategy.history = site.broadcast_from_leader(self._new_history)
            training.standing = training.standing.after_step()
            if site.owns:
                thread.run(self._peer.commit(1))
        self._strategy.announce(training)
        if not joins:
            return
        # Peers that began at the same moment see each other now; all but the greatest take over its parameters.
        greater = site.broadcast_from_leader(lambda: thread.run(self._greater_donors()))
        site.broadcast_from_leader(lambda: thread.run(on_loop(self._check_terms)))
        if not self._take_over_from(greater) and site.leads:
            logger.info(
                "no peer of run %r has the state of a greater origin, so this peer begins with its own parameters",
                self._peer.run_id,
            )

    def _check_terms(self) -> None:
        self._strategy.check_terms(self._training, self._peer.progress.announcements)

    @property
    def _joins(self) -> bool:
        return bool(set(self._peer.config.join) - {self._peer.endpoint})

    def _new_history(self) -> History:
        rank = Rank.FOUND_NOBODY if self._joins else Rank.APPOINTED
        return History(origin=Origin(rank, -self._now, self._rng.randbytes(8).hex()))

    def donors(self, *, above: bool = False) -> list[str]:
        """The peers that are asked for a state, the best first, see `rank_donors`. Warns of several runs."""
        announcements = self._peer.progress.announcements
        offered = [donor for donor in self._peer.donors if donor[0] > 0]
        if above:
            ahead = self._strategy.others(self._training, announcements).ahead
            offered = [donor for donor in offered if donor[1] in ahead]
        names, claims = rank_donors(offered, read_progress(announcements), self._peer.seeds)
        runs = frozenset(claim.history.origin.id for claim in claims)
        if len(runs) > 1 and runs not in self._named:
            self._named.add(runs)
            logger.warning(
                "the peers of run %r have different histories: %s. This peer takes the first if it can",
                *(self._peer.run_id, "; ".join(map(str, claims))),
            )
        return names

    async def _greater_donors(self) -> list[str]:
        """The peers with a greater history that offer their state, now or within `SETTLE_SECONDS`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS), aclosing(self._peer.progress.watch()) as changes:
                async for _ in changes:
                    if donors := self.donors(above=True):
                        return donors
        return self.donors(above=True)

    def _take_over_from(self, donors: list[str]) -> bool:
        """Takes over the state of one of `donors`. Returns False if there are none, or all of them are gone.

        It raises StateError if none could deliver a state, although not all are gone.
        """
        if not donors:
            return False
        states = self._training.states
        try:
            states.take_over(states.fetch(donors))
        except StateError as error:
            if error.gone >= set(donors):
                if self._training.site.leads:
                    logger.warning("%s; all of these peers are gone, so this peer starts without their state", error)
                return False
            raise StateError(
                f"{error}. A newcomer does not train without the run's state: check that it can reach those peers and "
                "has the same model and optimizer, then start it again"
            ) from error
        own = self._strategy.history
        if own.lineage:
            # The donor's record may be older than its state. Meanwhile nobody would seem to have made the same steps,
            # and this peer would make its first step alone.
            self._training.announcements.wait_for(
                lambda seen: any(each.history.includes(own) for each in read_progress(seen).values()), START_TIMEOUT
            )
        return True


def wait_for_peers(strategy: Strategy, training: StrategyContext, count: int, timeout: float) -> bool:
    """Waits until `count` peers with the same origin train in the run, this one included; returns whether they do.

    If several peers started the run at the same moment, all but one of them take over its parameters meanwhile.
    """
    if type(count) is not int:
        raise ConfigError(f"count must be a whole number of peers, not {count!r}")
    if not is_finite(timeout) and timeout != math.inf:
        raise ConfigError(f"timeout must be a number of seconds, not {timeout!r}")
    end = training.monotonic() + timeout

    def are_there(announcements: Mapping[str, bytes]) -> bool:
        return 1 + len(same_origin(strategy.announced_history(training), announcements)) >= count

    while True:
        announcements = training.announcements.wait_for(
            lambda announcements: are_there(announcements) or bool(strategy.others(training, announcements).ahead),
            max(0.0, end - training.monotonic()),
        )
        others = training.site.broadcast_from_leader(partial(strategy.others, training, announcements))
        left = training.site.broadcast_from_leader(lambda: end - training.monotonic())
        if not others.ahead or left <= 0:
            training.site.broadcast_from_leader(partial(strategy.check_terms, training, announcements))
            return are_there(announcements)
        strategy.catch_up(training, others, left)


class RunEnd:
    """The end of one peer's training, in the training thread.

    The other peers read in this peer's progress that its training has ended, and no longer wait for it in their rounds.
    It waits until their training has ended, too, or its time is up.
    """

    def __init__(self, training: StrategyContext, strategy: Strategy, timeout: float) -> None:
        if not is_finite(timeout) or timeout < 0:
            raise ConfigError(f"timeout must be a finite number of seconds, not {timeout!r}")
        self._training, self._strategy = training, strategy
        self._end = training.monotonic() + timeout
        self._digests: dict[str, str] = {}  # kept, since a peer that has finished may leave
        self._parts: dict[str, Mapping[str, str]] = {}  # likewise
        self._partners: frozenset[str] = frozenset()  # peers whose training has ended, too
        self._gone: set[str] = set()  # peers that were killed

    def finish(self) -> Finish:
        training, strategy = self._training, self._strategy
        training.modes.train()  # a round in progress belongs to the training weights
        strategy.finish(training)
        self._announce(Stage.WAITING)
        seen = self._wait_for_all()
        late = still_training(seen)
        self._partners = partners = done_training(seen)
        if late:
            logger.log(
                logging.WARNING if training.site.leads else logging.DEBUG,
                "%d peers are still training; this one ends without them: %s",
                len(late),
                listed(sorted(late)),
            )
        self._catch_up(partners, self._remaining / 2)
        receipt = strategy.conclude(training, partners, self._remaining)
        strategy.announce(training)
        training.modes.eval()
        self._catch_up(partners, self._remaining)
        own = strategy.digest = training.parts.averaged()
        training.parts.measure_all()
        self._announce(Stage.ENDED)
        self._wait_for(lambda seen: all(self._digest_of(name, seen) for name in partners & seen.keys()))
        self._forget_gone()
        digests = {name: self._digests.get(name, "") for name in sorted(partners - self._gone)}
        # A peer that leaves withdraws its record, so it stays until the others have read it.
        self._announce(Stage.COMPARED)
        self._wait_for(lambda seen: partners & seen.keys() <= done_training(seen, Stage.COMPARED))
        differing = {name: _differing(training.parts.digests, self._parts.get(name, {})) for name in digests}
        return Finish(
            own,
            digests,
            tuple(sorted(late)),
            receipt,
            differing={name: parts for name, parts in differing.items() if parts},
            dropped=strategy.dropped,
            unchecked=training.parts.model is None,
        )

    def _wait_for_all(self) -> Mapping[str, bytes]:
        """Waits until the training of all peers has ended; with a quorum not long for those that are late.

        If the training of some peer does not end, the first peer whose time is up ends the wait of the others.
        """
        quorum, group_size = self._strategy.quorum, self._training.peer.config.group_size

        def ended(seen: Mapping[str, bytes]) -> bool:
            return not still_training(seen) or bool(done_training(seen, Stage.CONCLUDING))

        def patience(seen: Mapping[str, bytes]) -> float:
            if ended(seen):
                return 0.0
            training = len(still_training(seen))
            return quorum.patience(1 + len(seen) - training, training, group_size) if quorum else math.inf

        end = self._training.monotonic() + self._remaining / 2
        seen = self._wait(lambda seen: patience(seen) < math.inf, self._remaining / 2)
        left = self._training.site.broadcast_from_leader(lambda: min(end - self._training.monotonic(), patience(seen)))
        if left > 0:
            self._wait(ended, left)
        self._announce(Stage.CONCLUDING)
        # What the last one to end has announced may come after what the others have announced because of it.
        return self._wait(lambda seen: not still_training(seen), min(SETTLE_SECONDS, self._remaining / 2))

    def _wait_for(self, condition: Callable[[Mapping[str, bytes]], bool]) -> None:
        """Waits until the announcements fulfil a condition; not for peers that are killed meanwhile."""
        while (left := self._training.site.broadcast_from_leader(lambda: self._remaining)) > 0:
            if condition(self._wait(condition, min(left, LOOK_SECONDS))):
                return
            self._forget_gone()

    def _announce(self, stage: Stage) -> None:
        self._strategy.stage = stage
        self._strategy.announce(self._training)
        self._forget_gone()

    def _forget_gone(self) -> None:
        """Ignores peers that were killed, whose records remain for a while; not those whose digests still count."""
        training = self._training
        others = training.announcements.of_others().keys() | self._partners
        if self._strategy.stage is not Stage.COMPARED:
            others -= self._digests.keys()
        gone = training.site.broadcast_from_leader(lambda: training.thread.run(training.peer.progress.gone_of(others)))
        self._gone.update(gone)
        training.announcements.refresh()

    def _catch_up(self, partners: frozenset[str], seconds: float) -> None:
        """Takes over the state of peers that are ahead, until all remaining partners have the same history."""
        training, strategy = self._training, self._strategy
        end = training.monotonic() + seconds

        def look(seen: Mapping[str, bytes]) -> tuple[Others, bool]:
            others = strategy.others(training, seen)
            # Also those that are about to follow: what they have gathered for the last step is not known before.
            histories = {progress.history for name, progress in read_progress(seen).items() if name in partners}
            together = partners & seen.keys() <= set(others.together)
            return others, together and (strategy.global_step is None or histories <= {strategy.history})

        while (left := training.site.broadcast_from_leader(lambda: end - training.monotonic())) > 0:
            seen = self._wait(lambda seen: (now := look(seen))[1] or bool(now[0].ahead), min(left, LOOK_SECONDS))
            others, level = training.site.broadcast_from_leader(partial(look, seen))
            if level:
                return
            if not others.ahead:
                self._forget_gone()
            strategy.catch_up(training, others, min(left, START_TIMEOUT))

    @property
    def _remaining(self) -> float:
        return max(0.0, self._end - self._training.monotonic())

    def _wait(self, condition: Callable[[Mapping[str, bytes]], bool], seconds: float) -> Mapping[str, bytes]:
        """Waits until the other peers' announcements fulfil the condition, or for `seconds`; returns them."""
        seen = self._training.announcements.wait_for(condition, seconds)
        self._training.announcements.refresh()
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
    return tuple(part for part, digest in own.items() if others.get(part, digest) != digest)
