"""Files that are replaced atomically: after a full disk or a crash there is either the old file or the new one."""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def beside(path: Path) -> Path:
    """Returns the path of a temporary file in the same directory."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def replaced_atomically(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to. On exit it is synced and moved to `path`, or removed after an error.

    Raises:
        OSError: the file cannot be moved.
    """
    temporary = beside(path)
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Syncs a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
