"""What is scored and not yet posted, in a SQLite file. Use a `RolloutStore` in one thread only.

A rollout is written when it is scored, and its group is deleted when the feed has acknowledged it. So a process that is
ended or killed at any time loses rollouts in progress only, and posts nothing twice, because a group keeps its key.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from averaging.errors import ConfigError, RolloutError
from averaging.rl.rollouts.samples import ScoredSequence

APPLICATION_ID, STORE_VERSION = 0x61767272, 1
"""They mark a file as the store of rollouts."""

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE groups (number INTEGER PRIMARY KEY, key TEXT NOT NULL, task TEXT NOT NULL);
CREATE TABLE rollouts (
  number INTEGER, member INTEGER, sequences BLOB NOT NULL, PRIMARY KEY (number, member)
) WITHOUT ROWID;
"""


@dataclass(slots=True)
class PendingGroup:
    """A group that is being made, or waits to be posted.

    Attributes:
        number: its place in the order of tasks, from 0.
        key: identifies its post, also after a restart.
        task: the task's data, as JSON.
        rollouts: the sequences of each scored rollout, by its place in the group.
    """

    number: int
    key: str
    task: str
    rollouts: dict[int, list[ScoredSequence]] = field(default_factory=dict)

    def missing(self, size: int) -> list[int]:
        """Returns the places without a rollout, in a group of `size` rollouts."""
        return [member for member in range(size) if member not in self.rollouts]

    def sequences(self) -> list[ScoredSequence]:
        """Returns all sequences, in the order of the rollouts."""
        return [sequence for member in sorted(self.rollouts) for sequence in self.rollouts[member]]


class RolloutStore:
    """The file of one environment. Close it after use.

    Args:
        path: the file; it is made if there is none.
        identity: what must not change between two starts, such as the environment and the size of its groups.

    Raises:
        ConfigError: the file is something else, belongs to another environment, or is in use.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=0)
        except sqlite3.Error as error:
            raise ConfigError(f"{path} cannot be opened: {error}; give another file") from None
        try:
            self._open(identity)
        except sqlite3.OperationalError as error:
            self.close()
            in_use = "locked" in str(error)
            remedy = "another process uses it; give each its own file" if in_use else "give another file"
            raise ConfigError(f"{path} cannot be used ({error}): {remedy}") from None
        except sqlite3.DatabaseError:
            self.close()
            raise ConfigError(f"{path} is no store of rollouts; give another file") from None
        except ConfigError:
            self.close()
            raise

    def _open(self, identity: str) -> None:
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("BEGIN EXCLUSIVE")
        marks = [self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        if marks == [0, 0] and not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
            for statement in SCHEMA.strip().split(";\n"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {STORE_VERSION}")
            self._set("identity", identity)
            self._set("key", uuid.uuid4().hex)
        elif marks != [APPLICATION_ID, STORE_VERSION]:
            raise ConfigError(f"{self._path} is no store of rollouts of this version; give another file")
        self._db.execute("COMMIT")
        if self._get("identity") != identity:
            raise ConfigError(
                f"{self._path} holds rollouts of {self._get('identity')}, not of {identity}; give another --store"
            )

    @property
    def key(self) -> str:
        """The secret by which the feed knows this environment again."""
        return str(self._get("key"))

    @property
    def next_number(self) -> int:
        """The number of the next group that is begun."""
        return int(self._get("next_number") or 0)

    def pending(self) -> list[PendingGroup]:
        """Reads all groups that are not posted, the oldest first."""
        rows = self._db.execute("SELECT number, key, task FROM groups ORDER BY number")
        groups = {number: PendingGroup(number, key, task) for number, key, task in rows}
        for number, member, content in self._db.execute("SELECT number, member, sequences FROM rollouts"):
            groups[number].rollouts[member] = msgspec.msgpack.decode(content, type=list[ScoredSequence])
        return list(groups.values())

    def begin(self, task: str) -> PendingGroup:
        """Begins a group.

        Raises:
            RolloutError: the file cannot be written, for example because the disk is full.
        """
        group = PendingGroup(self.next_number, uuid.uuid4().hex, task)
        self._execute("INSERT INTO groups VALUES (?, ?, ?)", group.number, group.key, group.task)
        self._execute("INSERT OR REPLACE INTO facts VALUES ('next_number', ?)", group.number + 1)
        return group

    def save(self, group: PendingGroup, member: int, sequences: Sequence[ScoredSequence]) -> None:
        """Adds a scored rollout to a group.

        Raises:
            RolloutError: the file cannot be written.
        """
        group.rollouts[member] = list(sequences)
        content = msgspec.msgpack.encode(group.rollouts[member])
        self._execute("INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?)", group.number, member, content)

    def forget(self, group: PendingGroup) -> None:
        """Deletes a group that was posted or dropped."""
        self._execute("DELETE FROM rollouts WHERE number = ?", group.number)
        self._execute("DELETE FROM groups WHERE number = ?", group.number)

    def close(self) -> None:
        """Closes the file."""
        with suppress(sqlite3.Error):
            self._db.close()

    def _execute(self, statement: str, *values: Any) -> None:
        try:
            self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise RolloutError("store", f"{self._path} cannot be written: {error}; free space there") from None

    def _get(self, name: str) -> Any:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def _set(self, name: str, value: object) -> None:
        self._db.execute("INSERT INTO facts VALUES (?, ?)", (name, value))
