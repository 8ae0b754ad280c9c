"""Receipts as JSON lines: one line for each attempt, in the form that docs/receipts.md describes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from averaging.common.sanitize import plain
from averaging.observe.receipts import Receipt

logger = logging.getLogger(__name__)

FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
"""How the file is opened; a pipe that nobody reads must not stop a round."""

VERSION = 1
"""The version of the form. New fields do not change it, and readers pass over those that they do not know."""


def to_json(receipt: Receipt) -> dict[str, Any]:
    """The receipt as plain values under the names of its attributes."""
    values = msgspec.to_builtins(replace(receipt, gathered={}), builtin_types=(bytes,))
    return {"version": VERSION, **values, "group_id": receipt.group_id.hex(), "gathered": plain(receipt.gathered)}


def dumps(receipt: Receipt) -> str:
    """One line of ASCII, without its end."""
    return json.dumps(to_json(receipt), allow_nan=False)


def loads(line: str | bytes) -> Receipt:
    """Reads one line.

    Raises:
        ValueError: it is not a receipt in a form that this version reads; says why.
    """
    try:
        values = json.loads(line, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(values, dict) or "version" not in values:
        raise ValueError('it is not a receipt: it is no JSON object with "version"')
    if values["version"] != VERSION:
        raise ValueError(f"it has version {values['version']!r} of the form; this release reads version {VERSION}")
    try:
        values["group_id"] = bytes.fromhex(values.get("group_id", ""))
        return msgspec.convert(values, Receipt, builtin_types=(bytes,))
    except (TypeError, ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"it is not a receipt: {error}") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a file of receipts holds.

    Attributes:
        receipts: in the file's order.
        bad: the numbers of the lines that cannot be read, counted from 1, and why.
        cut_off: whether the last line is only the beginning of one, as when its writer was killed or the disk full.
    """

    receipts: list[Receipt]
    bad: Mapping[int, str]
    cut_off: bool


def read(lines: Iterable[bytes]) -> Recorded:
    """Reads a file, opened in binary mode. Empty lines are passed over."""
    receipts: list[Receipt] = []
    bad: dict[int, str] = {}
    cut_off = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            receipts.append(loads(line))
        except ValueError as error:
            if _is_cut_off(line):
                cut_off = True
            else:
                bad[number] = str(error)
    return Recorded(receipts, bad, cut_off)


def _is_cut_off(line: bytes) -> bool:
    """Whether a line is the beginning of an object; what has no end need not be, other files end like that too."""
    if line.endswith(b"\n") or not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


class ReceiptLog:
    """A file to which receipts are appended, each in one write. It never raises: a round matters more than its receipt.

    What cannot be written is told once as a warning; the next receipt is tried all the same, as a disk may be freed. A
    file that was moved away or removed, as logs are, is begun anew.

    Args:
        path: made if it is not there, with its first receipt; otherwise it is added to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: int | None = None
        self._in_line = False  # the file ends in the middle of a line
        self._lost = 0
        self._warned = False

    def append(self, receipt: Receipt) -> None:
        """Writes a receipt down; it is with the operating system when this returns."""
        try:
            self._write(dumps(receipt).encode() + b"\n")
        except (OSError, ValueError) as error:
            self._lost += 1
            if not self._warned:
                self._warned = True
                why = error.strerror or error if isinstance(error, OSError) else error
                logger.warning(
                    "the receipt of round %d could not be written to %s: %s; averaging goes on without it. Later "
                    "receipts are tried again without further warnings; free the disk, or give another file",
                    receipt.round,
                    self._path,
                    why,
                )
        else:
            if self._lost:
                logger.warning("receipts are written to %s again; %d are missing there", self._path, self._lost)
                self._lost = 0

    def close(self) -> None:
        """Closes the file; a further receipt would open it again."""
        file, self._file = self._file, None
        if file is not None:
            try:
                os.close(file)
            except OSError as error:
                logger.warning("%s may lack the last receipts: %s", self._path, error.strerror)

    def _write(self, line: bytes) -> None:
        if self._file is not None and not _is_at(self._path, self._file):
            self.close()
        if self._file is None:
            self._file = os.open(self._path, FLAGS, 0o666)
            self._in_line = _ends_in_a_line(self._path)
        line = b"\n" + line if self._in_line else line
        written = os.write(self._file, line)  # a single write, so that lines of several writers do not mix
        self._in_line = written < len(line) and line[written - 1 : written] != b"\n"
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes fit")


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is still the one at `path`, as far as can be told."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _ends_in_a_line(path: Path) -> bool:
    """Whether the last character of a file that may have been written before is not the end of a line."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
