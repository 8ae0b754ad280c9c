"""Whether etcd answers."""

from __future__ import annotations

import asyncio
import logging

from averaging.errors import AveragingError, printable

logger = logging.getLogger(__name__)


class Contact:
    """Notes the calls of one peer to etcd; logs once that it does not answer, and once that it answers again.

    Args:
        name: the cluster as its user wrote it.

    Attributes:
        reason: why the last call failed; empty if it did not.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reason = ""
        self._lost_at: float | None = None

    @property
    def lost_seconds(self) -> float | None:
        return None if self._lost_at is None else asyncio.get_running_loop().time() - self._lost_at

    def note_answer(self) -> None:
        if (seconds := self.lost_seconds) is not None:
            logger.warning("%s answers again after %.0f s", self.name, seconds)
        self._lost_at, self.reason = None, ""

    def note_failure(self, error: AveragingError) -> None:
        """A call was not answered, or refused."""
        self.reason = printable(error.reason, 300)
        if self._lost_at is None:
            self._lost_at = asyncio.get_running_loop().time()
            logger.warning(
                "%s does not answer: %s. This peer goes on with the peers that it knows, and finds no others until it "
                "answers again",
                *(self.name, self.reason),
            )

    def __str__(self) -> str:
        """Why peers may be missing, and what to do; empty if it answers."""
        if (seconds := self.lost_seconds) is None:
            return ""
        return f"{self.name} has not answered for {seconds:.0f} s ({self.reason}); check that a majority of it is up"
