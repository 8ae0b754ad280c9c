"""Keeps the version of a synchronizer in its checkpoint folder, so that a restarted one does not go back.

The file has the highest version that may have been handed out, and the step of the trainer that has it. It is written
before such a version is handed out.
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
    numbers = _read_numbers(path)
    return numbers[0] if numbers is not None and len(numbers) == 1 else None


def _read_numbers(path: Path) -> list[int] | None:
    try:
        numbers = [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return None
    return numbers if all(0 <= number <= MAX_VERSION for number in numbers) else None


def read_version(folder: Path) -> tuple[int, int | None]:
    """Returns the version that a former synchronizer has kept in `folder`, 0 if there was none, and its step.

    The step is None if it is not known, as in the files of version 0.2.

    Raises:
        ConfigError: The file is damaged or cannot be read.
    """
    path = folder / NAME
    if not path.exists():
        return 0, None
    numbers = _read_numbers(path)
    if numbers is None or len(numbers) not in (1, 2):
        raise ConfigError(f"{path} should hold the last version as a number; restore it, or write the version into it")
    return numbers[0], numbers[1] if len(numbers) == 2 else None


def write_version(folder: Path, version: int, step: int | None) -> None:
    """Writes the version and its step to disk.

    Raises:
        OSError: The file cannot be written; the former one stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / NAME, folder / f".{NAME}.tmp"
    with temporary.open("w") as file:
        file.write(f"{version}\n" if step is None else f"{version} {step}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
