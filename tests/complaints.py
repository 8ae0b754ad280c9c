"""What was logged and should not have been."""

from __future__ import annotations

import logging
from collections.abc import Iterable


def complaints(records: Iterable[logging.LogRecord]) -> list[str]:
    """The words of warnings and worse.

    gRPC has one poller for all event loops of a process; it may wake for a loop that an earlier test has closed.
    """
    return [
        record.getMessage()
        for record in records
        if record.levelno >= logging.WARNING and "PollerCompletionQueue._handle_events" not in record.getMessage()
    ]
