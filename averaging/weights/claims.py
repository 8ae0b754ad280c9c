"""Decides which version a follower takes that receives slower than versions come, so that few are kept for all. Pure.

A follower claims the version that it receives, until it asks for the next one. A version that a newer one has pushed
out is kept while it is claimed, but never more than `MOST_CLAIMED` of them. If there is no room for a further one, a
slow follower takes the newest of those that others receive.

Two are enough: who has received the newest claimed one began after it was claimed, and so, if all take equally long,
those who receive the older one are done then, and there is room for the newest version. What such a follower has is
at most three transfers old: it took a version that was claimed for at most one, received it in one, and has it for one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

Follower = bytes

MOST_CLAIMED = 2
"""Versions that are kept for slow followers, besides the newest ones."""

CLAIM_SECONDS, CLAIM_RATE = 60.0, 500e3
"""A claim ends after so many seconds and those of the version at so many bytes/s. So nobody can hold one for ever."""


@dataclass(slots=True)
class _Claim:
    version: int
    until: float
    slow: bool


class Claims:
    """What the followers of one publisher receive."""

    def __init__(self) -> None:
        self._claims: dict[Follower, _Claim] = {}

    def ask(
        self, follower: Follower, has: int, asked: int, kept: Collection[int], nbytes: int, now: float
    ) -> int | None:
        """A follower asks for a version.

        Args:
            follower: the follower.
            has: the version that it has; -1 for none.
            asked: the version that it asks for, one of `kept` or one that it receives already.
            kept: versions that are here without claims.
            nbytes: length of a version.
            now: seconds of a monotonic clock.

        Returns:
            The version that it takes, which it claims now; None if it has to wait and ask again.
        """
        before = self._claims.pop(follower, None)
        # What it received before was pushed out meanwhile.
        slow = before is not None and before.version not in kept
        taken = asked
        if slow and before is not None and before.version != asked:
            claimed = {claim.version for claim in self._valid(now) if claim.slow} - {asked}
            if len(claimed) >= MOST_CLAIMED:
                taken = max(claimed)
        if taken <= has:
            if before is not None:
                self._claims[follower] = _Claim(before.version, now, slow=True)  # over, but it is slow still
            return None
        self._claims[follower] = _Claim(taken, now + CLAIM_SECONDS + nbytes / CLAIM_RATE, slow)
        return taken

    def claimed(self, kept: Collection[int], here: Collection[int], now: float) -> set[int]:
        """The versions to keep besides `kept`; the claims of others are over.

        Args:
            kept: versions that stay in any case.
            here: all versions that are here.
            now: seconds of a monotonic clock.
        """
        chosen: set[int] = set()
        # Who claims a version that was given up has not asked again yet, and is slow.
        for claim in self._valid(now):
            if claim.version not in here and claim.version not in kept:
                claim.until, claim.slow = now, True
        # Slow followers first, as they have been promised theirs, also if it is among `kept` still. Of the others, who
        # show only now that they are slow, those with the oldest version, which they have received most of.
        for claim in sorted(self._valid(now), key=lambda each: (not each.slow, each.version)):
            if not claim.slow and claim.version in kept:
                continue
            if claim.version in chosen or len(chosen) < MOST_CLAIMED:
                chosen.add(claim.version)
                claim.slow = True
        return chosen - set(kept)

    def leave(self, follower: Follower) -> None:
        """A follower is gone."""
        self._claims.pop(follower, None)

    def _valid(self, now: float) -> list[_Claim]:
        return [claim for claim in list(self._claims.values()) if claim.until > now]  # other threads ask meanwhile
