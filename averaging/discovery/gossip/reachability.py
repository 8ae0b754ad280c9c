"""Warns if other peers seem unable to reach this one."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

WARN_AFTER = 30
"""Answers in a row without a call from another peer. Each peer calls a random one every 2 s, so this is no chance."""


class Reachability:
    """Logs a warning once if other peers answer the calls of this one and never call it.

    Args:
        endpoint: this peer's name.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._answers = 0  # since the last call

    def note_answer(self) -> None:
        """Another peer has answered a call."""
        self._answers += 1
        if self._answers == WARN_AFTER:
            logger.warning(
                "other peers answered this peer %d times, and none has called it meanwhile: can they reach %s? "
                "Let connections to it through, advertise an address that leads here, or take part in client mode, "
                "which needs none",
                *(WARN_AFTER, self._endpoint),
            )

    def note_call(self) -> None:
        """Another peer has called."""
        self._answers = 0
