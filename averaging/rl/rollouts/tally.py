"""Counts what happens to rollouts and groups, and tells of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from statistics import fmean
from typing import Any

from averaging.common import counted
from averaging.errors import RolloutError
from averaging.metrics import counter, gauge
from averaging.rl.feed import CommandEvent, Posted
from averaging.rl.rollouts.samples import SampledGroup

MAX_DROPPED = 10  # groups that are dropped one after the other, before it is an error
MANY_EQUAL = 100  # groups in a row of which all scores are equal, after which they are named

OWN_REASONS = frozenset({"empty", "lengths", "logprobs", "long", "score", "sequences", "truncated"})
"""Reasons of failures that lie in what was made. Others come from the environment, whose grader may be away."""

ROLLOUT_METRICS = (
    counter("rollouts_groups", "Groups by outcome.", "outcome", known=(("posted",), ("dropped",))),
    counter("rollouts_stale_groups", "Posted groups that were too old for the trainer."),
    counter("rollouts_scored", "Rollouts that were scored."),
    counter("rollouts_failed", "Rollouts that failed, or are no sample to train, by reason.", "reason"),
    gauge("rollouts_score", "Mean score of the group that was posted last."),
    gauge("rollouts_version", "The version of the weights that the engine serves; -1 if it tells none."),
    gauge("rollouts_waiting_groups", "Complete groups that wait for the feed."),
    gauge("rollouts_engine_up", "Whether the engine answers."),
    gauge("rollouts_feed_up", "Whether the feed answers."),
)
"""What `averaging rollouts` tells Prometheus."""


class RolloutTally:
    """What was made since the start."""

    def __init__(self, emit: Callable[[CommandEvent], None]) -> None:
        self._emit, self._began = emit, time.monotonic()
        self.posted_groups = self.posted_rollouts = self.dropped_groups = 0
        self.stale_groups = 0  # posted groups that are too old for the trainer
        self.scored = 0  # rollouts
        self.failed: Counter[str] = Counter()  # rollouts that were no sample, by reason
        self.score: float | None = None  # mean of the group that was posted last
        self.away: dict[str, str] = {}  # why the engine, the feed or the environment does not answer, by these names
        # In a row: groups with a rollout that failed each time, groups that the feed refused, posted groups of equal
        # scores, rollouts that the environment has failed.
        self._incomplete = self._refused = self._equal = self._failures = 0
        self._last_failure = ""

    def note_away(self, what: str, url: str, reason: str) -> None:
        """Tells once that something is away, and with an empty reason once that it is back."""
        if bool(reason) != (what in self.away):
            text = f"waiting for the {what} {url}: {reason}" if reason else f"the {what} {url} is back"
            self._tell("away" if reason else "back", text, what=what, url=url, message=reason)
        if reason:
            self.away[what] = reason
        else:
            self.away.pop(what, None)

    def note_scored(self) -> None:
        self.scored += 1
        self._failures = 0

    def note_failed(self, group: int, error: RolloutError, attempt: int) -> bool:
        """Notes a rollout that failed. Returns whether the environment fails all, so that its grader may be away."""
        is_own = error.reason in OWN_REASONS
        self.failed[error.reason] += 1
        self._failures = 0 if is_own else self._failures + 1
        self._last_failure = str(error)
        number = self.failed[error.reason]
        text = f"group {group}: rollout {number} that failed ({error.reason}): {error}"
        fields = {"group": group, "reason": error.reason, "message": str(error), "attempt": attempt, "number": number}
        self._tell("failed", text, **fields)
        return not is_own and self._failures >= MAX_DROPPED

    def note_complete(self) -> None:
        self._incomplete = 0

    def note_incomplete(self, group: int) -> None:
        """Notes a group that is dropped, because a rollout of it failed each time. Raises if too many were in a row."""
        self._incomplete += 1
        self._drop(group, f"a rollout of it failed each time: {self._last_failure}", self._incomplete)

    def note_refused(self, group: int, reason: str) -> None:
        """Notes a group that the feed does not take. Raises if it took none for too long."""
        self._refused += 1
        self._drop(group, reason, self._refused)

    def _drop(self, group: int, reason: str, in_a_row: int) -> None:
        self.dropped_groups += 1
        self._tell("dropped", f"group {group} is dropped: {reason}", group=group, message=reason)
        if in_a_row >= MAX_DROPPED:
            failed = ", ".join(f"{count} {name}" for name, count in self.failed.most_common()) or "no rollout"
            raise RolloutError(
                "dropped", f"{MAX_DROPPED} groups were dropped one after the other ({failed} failed): {reason}"
            )

    def note_posted(self, group: SampledGroup, answer: Posted, waiting: int) -> None:
        """Notes a group that the feed has, while `waiting` others wait for it."""
        scores = [each.score for each in group.sequences]
        lowest, highest = min(scores), max(scores)
        self.score = fmean(scores)
        self.posted_groups += 1
        self.posted_rollouts += group.rollouts
        self.stale_groups += answer.stale
        self._refused = 0
        self._equal = self._equal + 1 if lowest == highest else 0
        if self._equal and self._equal % MANY_EQUAL == 0:
            text = (
                f"{self._equal} groups in a row have equal scores, now {self.score:.3g}, so that most trainers learn "
                "nothing from them; look at the grader and at how hard the tasks are"
            )
            self._tell("equal", text, groups=self._equal, score=self.score)
        versions = sorted({version for each in group.sequences for version in each.versions})
        rate = self.scored / max(1e-3, time.monotonic() - self._began)
        made_by = f", version{'s' * (len(versions) > 1)} {', '.join(map(str, versions))}" if versions else ""
        stale = f", too old for the trainer, which is at {answer.newest_version}" if answer.stale else ""
        left = f", {waiting} wait" if waiting else ""
        self._tell(
            "posted",
            f"group {group.number}: {group.rollouts} rollouts, score {self.score:.3g} ({lowest:.3g} to {highest:.3g})"
            f"{made_by}{stale}; {rate:.1f} rollouts/s{left}",
            **{"group": group.number, "rollouts": group.rollouts, "versions": versions, "waiting": waiting},
            **{"score": self.score, "lowest": lowest, "highest": highest, "rate": round(rate, 2)},
            **{"newest_version": answer.newest_version, "stale": answer.stale},
        )

    def summary(self, waiting: int) -> CommandEvent:
        failed = ", ".join(f"{count} {reason}" for reason, count in self.failed.items())
        parts = [
            f"posted {counted(self.posted_groups, 'group')} of {counted(self.posted_rollouts, 'rollout')}",
            f"{self.stale_groups} too old" * bool(self.stale_groups),
            f"{self.dropped_groups} dropped" * bool(self.dropped_groups),
            f"rollouts that failed: {failed}" * bool(failed),
            f"{counted(waiting, 'complete group')} could not be posted" * bool(waiting),
        ]
        fields = {"groups": self.posted_groups, "rollouts": self.posted_rollouts, "stale": self.stale_groups}
        fields |= {"dropped": self.dropped_groups, "waiting": waiting}
        return CommandEvent("done", "; ".join(filter(None, parts)), {**fields, "failed": dict(self.failed)})

    def _tell(self, name: str, text: str, /, **fields: Any) -> None:
        self._emit(CommandEvent(name, text, fields))
