"""Who is in the run, who did not answer lately, and whom to look for. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence, Set

from averaging.common.addresses import CLIENT_PREFIX, is_endpoint
from averaging.discovery.gossip.broadcast_tree import RING, BroadcastBranch, BroadcastRing

_FAILURE_SECONDS = 60.0  # for which a failed call counts; who is there is called again sooner, as a rule
_LOST_AT_ONCE = 8  # of many that vanished together: enough to find one of them again soon


class Membership:
    """The members of the run but this peer, as its records name them.

    Args:
        endpoint: this peer's name.
        seeds: the peers it was told to join.
        rng: picks members.
        retry_lost: seconds for which a member that vanished is looked for.
        most_lost: how many of these are remembered.

    Attributes:
        followed: the member whose stream this peer follows, if it is a client.
    """

    def __init__(
        self, endpoint: str, seeds: Sequence[str], rng: random.Random, *, retry_lost: float, most_lost: int
    ) -> None:
        self._endpoint = endpoint
        self._seeds = tuple(dict.fromkeys(seed for seed in seeds if seed != endpoint))
        self._rng = rng
        self._retry_lost = retry_lost
        self._most_lost = most_lost
        self._ring = BroadcastRing()
        self._suspects: dict[str, None] = {}  # ordered, so that one seed gives one run
        self._lost: dict[str, float] = {}
        self._failures: dict[str, tuple[float, str]] = {}  # of those who did not answer, the last: when, and why
        self.followed: str | None = None

    @property
    def seeds(self) -> tuple[str, ...]:
        """The peers to join, without this one and without doubles."""
        return self._seeds

    def __len__(self) -> int:
        return len(self._ring)

    def heard_of(self, endpoint: str) -> None:
        """`endpoint` gave a sign of life."""
        self._suspects.pop(endpoint, None)
        if endpoint in self._ring:
            return
        self._lost.pop(endpoint, None)
        self._failures.pop(endpoint, None)
        if endpoint != self._endpoint and is_endpoint(endpoint) and not endpoint.startswith(CLIENT_PREFIX):
            self._ring.add(endpoint)

    def gone(self, endpoint: str, now: float, *, vanished: bool) -> None:
        """`endpoint` left, or `vanished`: its record expired."""
        known = endpoint in self._ring
        self._ring.discard(endpoint)
        self._suspects.pop(endpoint, None)
        if not vanished:
            self._failures.pop(endpoint, None)
        if known and vanished:
            self._lost[endpoint] = now
            if len(self._lost) > self._most_lost:
                del self._lost[next(iter(self._lost))]

    @property
    def vanished(self) -> Set[str]:
        """Those whose record has expired lately, as that of a killed peer does, and that have not come back."""
        return self._lost.keys()

    def trust(self, endpoint: str) -> None:
        """`endpoint` is up: it answered, or called itself."""
        self._suspects.pop(endpoint, None)

    def answered(self, endpoint: str) -> None:
        """`endpoint` has answered this peer."""
        self.trust(endpoint)
        self._failures.pop(endpoint, None)

    def suspect(self, endpoint: str, now: float, why: str) -> None:
        """`endpoint` did not answer: until it gives a sign of life it is tried after all others."""
        if endpoint in self._ring:
            self._suspects[endpoint] = None
        if endpoint in self._ring or endpoint in self._seeds or endpoint in self._lost:
            self._failures[endpoint] = now, why

    def silent(self, now: float) -> dict[str, str]:
        """Why each did not answer that was last asked in the last minute, as far as it may still be there."""
        self._failures = {
            name: (when, why)
            for name, (when, why) in self._failures.items()
            if now - when < _FAILURE_SECONDS and (name in self._ring or name in self._seeds or name in self._lost)
        }
        return {name: why for name, (_, why) in self._failures.items()}

    def pick(self) -> str | None:
        """A random member, if possible one that is not suspected; None if there is none."""
        if len(self._suspects) < len(self._ring):
            while (choice := self._ring[self._rng.randrange(len(self._ring))]) in self._suspects:
                pass
            return choice
        return self._ring[self._rng.randrange(len(self._ring))] if len(self._ring) else None

    def pick_to_follow(self, now: float) -> str | None:
        """Whom a client should turn to: a random member, else anyone there could be."""
        if len(self._suspects) < len(self._ring):
            return self.pick()
        others = [*self._suspects, *self.pick_missing(now)]
        return self._rng.choice(others) if others else None

    def pick_missing(self, now: float) -> list[str]:
        """Whom to look for: the seeds that are no members, and a few of those that vanished not too long ago."""
        self._lost = {name: since for name, since in self._lost.items() if now - since < self._retry_lost}
        lost = self._rng.sample(list(self._lost), min(len(self._lost), _LOST_AT_ONCE))
        return list(dict.fromkeys([*(seed for seed in self._seeds if seed not in self._ring), *lost]))

    def branches(self, start: int, end: int, fanout: int) -> list[BroadcastBranch]:
        """How this peer reaches [start, end], see `BroadcastRing.branches`. A client asks a member to do it."""
        if not self._endpoint.startswith(CLIENT_PREFIX):
            return self._ring.branches(self._endpoint, start, end, fanout, self._suspects)
        names = sorted((name for _, name in self._ring.within(1, RING - 1)), key=lambda name: name in self._suspects)
        first = () if self.followed is None else (self.followed,)
        return [BroadcastBranch(1, RING - 1, tuple(dict.fromkeys((*first, *names, *self._seeds))))]
