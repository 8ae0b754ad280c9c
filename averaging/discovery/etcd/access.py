"""What the parts of discovery in etcd share: the settings, the cluster, and whether it answers."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field

from averaging.common import Backoff
from averaging.discovery.gossip import RecordLimits
from averaging.errors import AveragingError, printable
from averaging.transport import KeyValueStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSettings:
    """Times (in seconds) and sizes of discovery in etcd."""

    name: str = "etcd"  # the cluster as its user wrote it, for errors
    limits: RecordLimits = field(default_factory=RecordLimits)
    join_timeout: float = 10.0  # within which etcd must answer; time in which this peer stood still does not count
    lease: float = 30.0  # after which the records of a dead peer go
    renew: float = 8.0  # interval of the renewals of the lease
    presence: float = 60.0  # interval of the renewals of the record that shows that this peer is in the run
    # Other peers that this peer knows although it reads none of their records. Together the peers know all, so
    # `averaging top` finds the whole run through any of them.
    neighbours: int = 32
    look: float = 20.0  # mean time between two looks for neighbours
    most: int = 1024  # records of one key that it holds
    lapse: float = 60.0  # after which a key is no longer followed that nobody reads
    hold: float = 600.0  # for which expired records stay while etcd does not answer, since nobody can renew them
    wait: float = 3.0  # for the first read of a key
    leave: float = 1.0  # for the withdrawal of this peer's records when it leaves


class EtcdAccess:
    """One peer's access to etcd. It logs once that etcd does not answer, and once that it answers again."""

    def __init__(self, store: KeyValueStore, settings: EtcdSettings, rng: random.Random) -> None:
        self.store, self.settings, self.rng = store, settings, rng
        self._reason = ""  # why the last call failed
        self._lost_at: float | None = None

    @property
    def lost_seconds(self) -> float | None:
        return None if self._lost_at is None else asyncio.get_running_loop().time() - self._lost_at

    def backoff(self) -> Backoff:
        return Backoff(0.1, 3.0, self.rng)

    def note_answer(self) -> None:
        if (seconds := self.lost_seconds) is not None:
            logger.warning("%s answers again after %.0f s", self.settings.name, seconds)
        self._lost_at = None

    def note_failure(self, error: AveragingError) -> None:
        self._reason = printable(error.reason, 300)
        if self._lost_at is None:
            self._lost_at = asyncio.get_running_loop().time()
            logger.warning(
                "%s does not answer: %s. This peer goes on with the peers that it knows, and finds no others until it "
                "answers again",
                *(self.settings.name, self._reason),
            )

    def explain(self) -> str:
        """Since when it has not answered, and what to do; empty if it answers."""
        if (seconds := self.lost_seconds) is None:
            return ""
        return f"has not answered for {seconds:.0f} s ({self._reason}); check that a majority of it is up"
