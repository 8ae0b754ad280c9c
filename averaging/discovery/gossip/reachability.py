"""Whether others can reach this peer, as far as it can see by itself."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MANY_ANSWERS = 30
"""So many answers in a row without a call are no chance: each peer asks another one every 2 s."""


class Reachability:
    """Tells a peer once that it calls others, and they never call it.

    Args:
        endpoint: this peer's name.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._unrequited = 0

    def answered(self) -> None:
        """Another peer has answered a call."""
        self._unrequited += 1
        if self._unrequited == MANY_ANSWERS:
            logger.warning(
                "others answer this peer, and none of them has called it for %d answers: can they reach %s? "
                "Let connections to it through, advertise an address that leads here, or take part in client mode, "
                "which needs none",
                *(MANY_ANSWERS, self._endpoint),
            )

    def called(self) -> None:
        """Another peer has called."""
        self._unrequited = 0
