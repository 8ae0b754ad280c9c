"""Base of the strategies whose peers hold equal parameters: a history, and global steps."""

from __future__ import annotations

import logging
import math
import operator
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from averaging.common import listed
from averaging.errors import StateError
from averaging.peer import ExpectedPeers, Topic
from averaging.protocol import Statement
from averaging.receipts import Receipt
from averaging.strategies.base import Strategy
from averaging.timing import SLOW_LINK
from averaging.training import (
    BackgroundDownload,
    History,
    Others,
    Own,
    Stage,
    StrategyContext,
    compare_progress,
    find_behind,
    find_late,
    find_together,
    same_origin,
    still_training,
)

logger = logging.getLogger(__name__)

HELD_SECONDS, HELD_COPIES = 300.0, 8
"""For how many seconds global steps are put off at most for a peer that is behind again after a download, besides the
time that so many copies of the model take on a slow link. It may have to download the state twice until it is level."""


class LockstepStrategy(Strategy):
    """A strategy in which peers make global steps together.

    A step counts for the members that have the whole result. A peer that has missed a step, or has made a different
    one, takes over the state of a peer that is ahead. No peer makes the same step twice.

    No peer makes a step alone while peers with its history wait for it in `finish`, but for at most `round_timeout`:
    what it gathers meanwhile goes into the last step of all, which so ends them with the same weights.
    """

    _warned_group_size = False
    _alone = False  # whether it has made the last step alone
    _awaited_since: float | None = None  # since when only peers that have ended their training share its history
    _put_off: Mapping[str, float] = {}  # until when it puts off its steps for a peer that is behind, on its own clock
    _missing: Mapping[str, bytes] = {}  # last announcements of the peers that the last round lacked or dropped
    _given: tuple[object, ...] = (None,)  # from what `_others` follows
    _others = Others((), 0.0, 0.0, {})

    @property
    def global_step(self) -> int:
        return self.history.step

    def announced_history(self, training: StrategyContext) -> History:
        return self.history

    def others(self, training: StrategyContext, announcements: Mapping[str, bytes]) -> Others:
        ignored = self._downloads.ignored(training)
        given = announcements, self.history, self._partners, self._missing, self.stage, ignored
        if all(map(operator.is_, given, self._given)):
            return self._others  # as in most steps
        # No peer waits for these again until they announce something new.
        absent = {name for name, progress in announcements.items() if self._missing.get(name) == progress}
        others = compare_progress(
            Own(self.history, training.donates, self._quorum_count(training, announcements), absent),
            announcements,
            self._partners,
            ignored=ignored,
            trains=self.stage is Stage.TRAINING,
        )
        if late := self._late_peers(announcements):
            others = replace(others, together=tuple(dict.fromkeys([*others.together, *late])))
        self._given, self._others = given, others
        return others

    def _quorum_count(self, training: StrategyContext, announcements: Mapping[str, bytes]) -> int:
        if self.quorum is None:
            return 0
        return min(self.quorum.count(self._training_peers(announcements)), training.peer.config.group_size)

    def _training_peers(self, announcements: Mapping[str, bytes]) -> int:
        return 1 + len(still_training(announcements) & same_origin(self.history, announcements))

    def _late_peers(self, announcements: Mapping[str, bytes]) -> tuple[str, ...]:
        with_quorum = self.quorum is not None and self.stage is Stage.TRAINING
        return find_late(self.history, announcements) if with_quorum else ()

    # A state that takes longer to download than the others take for a step is old once it is there. So a peer that has
    # only taken over states, and is behind again, says so, and nobody makes a step until it is level. Training goes on
    # meanwhile, and the step that is put off averages all of it.

    def catch_up(
        self, training: StrategyContext, others: Others, start_timeout: float = 0.0, *, wait: bool = True
    ) -> bool:
        if others.ahead and self.quorum is None:
            self._note_behind(training, others.ahead)
        taken = super().catch_up(training, others, start_timeout, wait=wait)
        if taken or self._late is None or self.quorum is not None:
            return taken
        if not training.site.broadcast_from_leader(lambda: self._downloads.busy):
            self._late = None  # its download has failed
            self.announce(training)
        return taken

    def _note_behind(self, training: StrategyContext, ahead: Mapping[str, History]) -> None:
        newest, rate = max(ahead.values()), training.states.rate
        same_run = newest.origin.id == self.history.origin.id
        if not training.standing.made and same_run:
            asked, self._late = self._late, newest.step
            if asked is None:
                self.announce(training)
        reason = f"it is at global step {self.history.step}, and downloads the state of {listed(sorted(ahead))} at "
        reason += f"{newest.step}; its last download came at {rate / 1e6:.3g} MB/s" if rate else f"{newest.step}"
        self._standstill.reason = f"{reason}{'; the others put off their next step for it' * (self._late is not None)}"
        self._tell_standstill(training, self.history.step)

    def _take_over(self, training: StrategyContext, fetch: BackgroundDownload) -> None:
        super()._take_over(training, fetch)
        if self._late is not None and self.quorum is None:
            # They may have made a step before they knew of it; if they did not wait on now, this peer would always be
            # one step behind.
            ahead = self.present_others(training, wait=False).ahead
            self._late = max(ahead.values()).step if ahead else None

    def _holds(self, training: StrategyContext, topic: Topic) -> bool:
        """Whether this peer puts off a global step that is due; called at the leader of a site."""
        if self.quorum is not None or training.announcements.declared_until(topic, self.history.phase) is not None:
            return False  # another peer has begun already
        behind = find_behind(self.history, training.announcements.of_others(wait=False))
        if not behind and not self._put_off:
            return False
        now = training.monotonic()
        size = sum(parameter.nbytes for parameter in training.parameters.values())
        limit = HELD_SECONDS + HELD_COPIES * size / SLOW_LINK
        known = self._put_off  # once its time is over a peer is not waited for again before it was level, or has left
        held = {name: known.get(name, now + limit) for name, asks in behind.items() if asks or name in known}
        waits = [name for name, until in held.items() if behind[name] and until > now]
        if waits:
            text = "the next global step waits for up to %.0f s for %s, which downloads the state and is behind again"
            self._standstill.reason = text % (limit, listed(waits))
        if over := [name for name, until in held.items() if -math.inf < until <= now]:
            logger.warning(
                "%s has not become level with global step %d in %.0f s: no step waits for it any more. Its link may be "
                "too slow for this run: make global steps rarer, or use a quorum",
                *(listed(over), self.history.step, limit),
            )
        self._put_off = held | dict.fromkeys(over, -math.inf)
        return bool(waits)

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        if "history" not in user:
            raise StateError("the state has no history of global steps")

    def _expected_peers(self, training: StrategyContext, together: tuple[str, ...]) -> ExpectedPeers:
        """The peers of `together` for which the next round waits, as long as they neither leave nor advance.

        Warns once if a group has no room for all of them.
        """
        if not self._warned_group_size and len(together) >= training.peer.config.group_size:
            self._warned_group_size = True
            logger.warning(
                "%d peers make global steps together, but group_size is %d: peers outside the group have no part in "
                "a step. Set group_size to at least %d at all peers",
                len(together) + 1,
                training.peer.config.group_size,
                len(together) + 1,
            )
        own, partners, trains = self.history, self._partners, self.stage is Stage.TRAINING
        if self.quorum is None:
            return lambda announcements: find_together(own, announcements, partners, trains=trains)
        return lambda announcements: {
            *find_together(own, announcements, partners, trains=trains),
            *find_late(own, announcements),
        }

    def _ends_with_others(self, training: StrategyContext, together: tuple[str, ...]) -> bool:
        """Whether a step is left to the end of the training, since nobody trains with this peer and others wait for it.

        If it made the step alone, those that wait would have to follow a single peer, and would lose what they have
        gathered for it.
        """

        def is_awaited() -> bool:
            seen = training.announcements.at_leader(wait=False)
            if together or not find_together(self.history, seen, self._partners, trains=False):
                self._awaited_since = None
                return False
            now = training.monotonic()
            self._awaited_since = now if self._awaited_since is None else self._awaited_since
            return now - self._awaited_since < training.peer.config.round_timeout

        return training.site.broadcast_from_leader(is_awaited)

    def _advance(self, training: StrategyContext, receipt: Receipt | None, samples: float) -> None:
        """Adds a global step to the history; without a receipt one that this peer made alone, with its `samples`."""
        if receipt is None and not self._alone and training.site.leads:
            logger.warning("%r is alone and trains on; it averages again as soon as other peers come", training.peer)
        self._alone, self._late = receipt is None, None
        if receipt is not None:
            present = set(receipt.members) - {dropped.endpoint for dropped in receipt.dropped}
            # Who does not hold the state takes over the result when it can; nobody waits for that.
            self._partners = frozenset(name for name in present if Statement.read(receipt.gathered[name]).holds)
            announcements = training.announcements.of_others(wait=False)
            self._missing = {name: progress for name, progress in announcements.items() if name not in present}
        if receipt is None:
            training.standing = training.standing.after_step()
            self.history = training.site.broadcast_from_leader(
                lambda: self.history.after(secrets.token_bytes(20), samples)
            )
        else:
            contributions = (Statement.read(receipt.gathered[member]) for member in receipt.members)
            self.history = self.history.after(receipt.group_id, sum(said.samples or 0.0 for said in contributions))
