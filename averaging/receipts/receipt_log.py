"""Receipts as JSON lines, one per round, in the format of docs/operate/receipts.md."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from averaging.common import plain
from averaging.errors import CallRefusedError
from averaging.receipts.receipt import Receipt, Totals

logger = logging.getLogger(__name__)

FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags to open the file. It does not block, because a full pipe must not stop a round."""

VERSION = 1  # version of the format. New fields do not change it; readers ignore unknown ones


def to_json(receipt: Receipt) -> dict[str, Any]:
    """Returns the receipt as JSON values by attribute name."""
    values = msgspec.to_builtins(replace(receipt, gathered={}), builtin_types=(bytes,))
    return {"version": VERSION, **values, "group_id": receipt.group_id.hex(), "gathered": plain(receipt.gathered)}


def dumps(receipt: Receipt) -> str:
    """Returns one line of ASCII without the newline."""
    return json.dumps(to_json(receipt), allow_nan=False)


def loads(line: str | bytes) -> Receipt:
    """Parses one line.

    Raises:
        ValueError: it is not a receipt in a format that this release reads.
    """
    try:
        values = json.loads(line, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(values, dict) or "version" not in values:
        raise ValueError('it is not a receipt: not a JSON object with "version"')
    if values["version"] != VERSION:
        raise ValueError(f"it has format version {values['version']!r}; this release reads version {VERSION}")
    try:
        values["group_id"] = bytes.fromhex(values.get("group_id", ""))
        return msgspec.convert(values, Receipt, builtin_types=(bytes,))
    except (TypeError, ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"it is not a receipt: {error}") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


@dataclass(frozen=True, slots=True)
class Recorded:
    """The content of a file of receipts."""

    receipts: list[Receipt]  # the receipts in the file's order
    bad: Mapping[int, str]  # reasons of unreadable lines by line number, from 1
    cut_off: bool  # whether the last line is incomplete, because its writer was killed or the disk was full


def read(lines: Iterable[bytes]) -> Recorded:
    """Reads a file opened in binary mode. Empty lines are ignored."""
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
    """Whether a line is an incomplete JSON object. A missing newline alone is no proof: other files lack it too."""
    if line.endswith(b"\n") or not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


class ReceiptLog:
    """A file to which receipts are appended, each in one write.

    Failures never raise, because a round matters more than its receipt. The first failure logs a warning, and later
    receipts are tried again. The file is opened for each, so it may be moved or removed, as by log rotation.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lost = 0
        self._warned = False

    def append(self, receipt: Receipt) -> None:
        """Writes a receipt. The operating system has it when this returns."""
        try:
            self._write(dumps(receipt).encode() + b"\n")
        except (OSError, ValueError) as error:
            self._lost += 1
            if not self._warned:
                self._warned = True
                logger.warning(
                    "could not write the receipt of round %d to %s: %s; averaging continues. Later receipts are "
                    "tried without further warnings; free disk space, or use another file",
                    *(receipt.round, self._path, getattr(error, "strerror", None) or error),
                )
        else:
            if self._lost:
                logger.warning("receipts are written to %s again; %d are missing", self._path, self._lost)
                self._lost = 0

    def _write(self, line: bytes) -> None:
        line = b"\n" * _ends_in_a_line(self._path) + line
        file = os.open(self._path, FLAGS, 0o666)
        try:
            written = os.write(file, line)  # one write per line, so that lines of several writers do not mix
        finally:
            os.close(file)
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")


def _ends_in_a_line(path: Path) -> bool:
    """Whether an existing file does not end with a newline, as after a full disk or the death of its writer."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


# The receipts of one peer: the last ones are kept, all are written to a file if configured, and watchers get each.


HISTORY = 64  # receipts kept in memory for watchers. One that is slower skips the oldest
MAX_WATCHERS = 64  # maximum number of watchers, because each costs memory


@dataclass(frozen=True, slots=True)
class Watched:
    """A receipt as a watcher gets it."""

    receipt: Receipt
    skipped: int = 0  # number of receipts before this one that were skipped because the watcher was too slow


class ReceiptBook:
    """Keeps the receipts of a peer, writes them to a file if there is one, and hands them to watchers."""

    def __init__(
        self, log: ReceiptLog | None = None, on_receipt: Callable[[Receipt], object] = lambda receipt: None
    ) -> None:
        self._on_receipt = on_receipt
        self.last: Receipt | None = None
        self.totals = Totals()  # replaced, not changed, so any thread may read it
        self._log = log
        self._history: deque[Receipt] = deque(maxlen=HISTORY)
        self._kept, self._watchers = 0, 0
        self._changed = asyncio.Event()
        self._closed = False

    def keep(self, receipt: Receipt) -> None:
        """Adds the receipt of a round that has just ended."""
        self.last = receipt
        self.totals = self.totals.plus(receipt)
        self._history.append(receipt)
        self._kept += 1
        if self._log is not None:
            self._log.append(receipt)
        self._wake()
        self._on_receipt(receipt)

    def recent(self, count: int, after_round: int = 0) -> tuple[Receipt, ...]:
        """The last `count` receipts, at most `HISTORY`, of rounds after this one; the oldest first."""
        later = [receipt for receipt in self._history if receipt.round > after_round]
        return tuple(later[max(0, len(later) - count) :])

    async def watch(self, last: int = 0) -> AsyncGenerator[Watched, None]:
        """Yields the `last` receipts, at most `HISTORY`, then each new one until the book is closed.

        Raises:
            CallRefusedError: there are too many watchers.
        """
        if self._watchers >= MAX_WATCHERS:
            raise CallRefusedError("", f"it has {MAX_WATCHERS} watchers already; try again later")
        self._watchers += 1
        seen = self._kept - min(last, len(self._history))
        try:
            while True:
                while seen < self._kept:
                    oldest = self._kept - len(self._history)
                    skipped, seen = max(0, oldest - seen), max(seen, oldest) + 1
                    yield Watched(self._history[seen - 1 - oldest], skipped)
                if self._closed:
                    return
                await self._changed.wait()
        finally:
            self._watchers -= 1

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Watchers end once they have all receipts."""
        self._closed = True
        self._wake()
