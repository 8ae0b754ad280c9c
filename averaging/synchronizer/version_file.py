"""Keeps the version of a synchronizer in its checkpoint folder, so that a restarted one does not go back.

The file has the highest version that may have been handed out. It is written before such a version is handed out.
"""

from __future__ import annotations

import os
from pathlib import Path

from averaging.errors import ConfigError
from averaging.synchronizer.coordination import MAX_VERSION

NAME = "synchronizer_version.txt"

LATEST = "latest_state_dict_iteration.txt"
"""In it, a trainer writes the step of its newest checkpoint for explorers."""


def read_number(path: Path) -> int | None:
    """Returns the number in a file; None if there is none, or it cannot be read now."""
    try:
        number = int(path.read_text().strip())
    except (OSError, ValueError):
        return None
    return number if 0 <= number <= MAX_VERSION else None


def read_version(folder: Path) -> int:
    """Returns the version that a former synchronizer has kept in `folder`, 0 if there was none.

    Raises:
        ConfigError: The file is damaged or cannot be read.
    """
    path = folder / NAME
    if not path.exists():
        return 0
    version = read_number(path)
    if version is None:
        raise ConfigError(f"{path} should hold the last version as a number; restore it, or write the version into it")
    return version


def write_version(folder: Path, version: int) -> None:
    """Writes the version to disk.

    Raises:
        OSError: The file cannot be written; the former one stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / NAME, folder / f".{NAME}.tmp"
    with temporary.open("w") as file:
        file.write(f"{version}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
