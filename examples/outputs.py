"""The folder of an example's outputs: a new run replaces those of the last one, but keeps its plots."""

from __future__ import annotations

import errno
import fcntl
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import IO

LOCK = ".lock"
"""File in the folder of a run, which the run keeps locked."""


_claimed: list[IO[bytes]] = []  # a lock lasts as long as its file is open


def claim(directory: Path) -> None:
    """Makes a folder, and keeps other runs out of it until this process ends.

    Raises:
        OSError: it cannot be made, or belongs to another run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = (directory / LOCK).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise OSError(errno.EBUSY, "another run writes there") from None
    _claimed.append(lock)


def clear(directory: Path) -> None:
    """Removes everything in a folder except its plots, and the lock of `claim`.

    Raises:
        OSError: something cannot be removed.
    """
    for one in directory.iterdir():
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        elif one.suffix != ".png" and one.name != LOCK:
            one.unlink()


def write_plot(file: Path, draw: Callable[[Path], None]) -> None:
    """Writes a plot. If there is one of an earlier run, it gets a number once the new one is complete: plot-1.png, ….

    Args:
        file: where the plot is to be.
        draw: writes the plot to the file that it is given.

    Raises:
        OSError: the plot cannot be written; that of the earlier run stays.
    """
    new = file.with_name(f".{file.stem}.new{file.suffix}")
    try:
        draw(new)
        if file.exists():
            numbered = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in count(1))
            file.rename(next(one for one in numbered if not one.exists()))
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
