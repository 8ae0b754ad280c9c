"""What was logged and should not have been."""

import logging
from collections.abc import Iterable


def complaints(records: Iterable[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]
