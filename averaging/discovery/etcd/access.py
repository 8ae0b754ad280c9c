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
    """Times (in seconds) and sizes of discovery in etcd.

    Attributes:
        name: the cluster as its user wrote it, for errors.
        limits: bounds of acceptable records, as with gossip.
        join_timeout: time within which etcd must answer; time in which this peer stood still does not count.
        lease: time after which the records of a dead peer go.
        renew: interval of the renewals of the lease.
        presence: interval of the renewals of the record that shows that this peer is in the run.
        neighbours: number of other peers that this peer knows although it reads none of their records. Together the
            peers know all, so `averaging top` finds the whole run through any of them.
        look: mean interval at which it looks for its neighbours.
        most: number of records of one key that it holds.
        lapse: time after which a key is no longer followed that nobody reads.
        hold: time for which records that expire are kept while etcd does not answer, since nobody can renew them.
        wait: time for which the first read of a key is waited for.
        leave: time limit for the withdrawal of this peer's records when it leaves.
    """

    name: str = "etcd"
    limits: RecordLimits = field(default_factory=RecordLimits)
    join_timeout: float = 10.0
    lease: float = 30.0
    renew: float = 8.0
    presence: float = 60.0
    neighbours: int = 32
    look: float = 20.0
    most: int = 1024
    lapse: float = 60.0
    hold: float = 600.0
    wait: float = 3.0
    leave: float = 1.0


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
