"""Files that are replaced whole: after a full disk or a crash at any moment there is the old one or the new one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def beside(path: Path) -> Path:
    """A new name in the same directory."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def replaced_atomically(path: Path) -> Iterator[Path]:
    """Where to write inside; outside it is on the disk and at `path`, or, after an error, gone.

    Raises:
        OSError: it cannot be moved there.
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
    """Waits until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
