"""The book of a run and its groups, kept together in one SQLite file. Every method is one thread's."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from averaging.errors import ConfigError, FeedRefusedError
from averaging.feed.book import Book, Env, Group
from averaging.feed.messages import RegisterEnv, Registration

logger = logging.getLogger(__name__)

APPLICATION, VERSION = 0x61766664, 1
"""They mark a file as one of these."""

KEY_SECONDS = 86400.0
"""For how long a post is recognized when it is repeated."""

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE envs (id INTEGER PRIMARY KEY, told BLOB NOT NULL, name TEXT NOT NULL, connected INTEGER NOT NULL);
CREATE TABLE groups (
  number INTEGER PRIMARY KEY, env INTEGER, size INTEGER NOT NULL, place INTEGER, step INTEGER, content BLOB NOT NULL
);
CREATE INDEX by_step ON groups (step, place) WHERE step IS NOT NULL;
CREATE TABLE posts (
  key TEXT PRIMARY KEY, digest BLOB NOT NULL, buffered BLOB NOT NULL, time REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX by_time ON posts (time);
"""
# place: the order in the queue; NULL while a group waits in its environment's buffer. step: of the batch that it is in.


@dataclass(frozen=True, slots=True)
class Post:
    """Groups that came in one request.

    Attributes:
        groups: environment and number of sequences of each.
        contents: the JSON of each.
        key: by which a repetition of the request is recognized; empty if none is expected.
        digest: of what a repetition has in common with the request.
    """

    groups: Sequence[tuple[int | None, int]]
    contents: Sequence[bytes]
    key: str
    digest: bytes


class Ledger:
    """Opens a file, or makes it.

    Args:
        path: the file; ":memory:" for none.
        fsync: whether a commit waits for the disk.
        new_book: makes a book with the limits of this server.

    Attributes:
        book: the state; read it, and change it through the methods below.
        latest: the content of the group that entered the queue last; empty if none did.

    Raises:
        ConfigError: the file cannot be opened, is of another kind, or is used by another process.
    """

    def __init__(self, path: str | Path, *, fsync: bool, new_book: Callable[..., Book]) -> None:
        self._new_book, self._stale = new_book, False
        self.latest = b""
        try:
            if str(path) != ":memory:":
                Path(path).touch(mode=0o600)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=0.0)
            self._open(fsync=fsync)
            self._load()
        except (sqlite3.Error, OSError) as error:
            reason = "another process uses it" if "locked" in str(error) else str(error)
            raise ConfigError(f"store {path} cannot be used: {reason}; give another file") from None

    def begin(self) -> None:
        """Begins a transaction.

        Raises:
            sqlite3.Error: the file cannot be read, nor could it when the last transaction was undone.
        """
        if self._stale:
            self._load()
        self._db.execute("BEGIN")

    def commit(self) -> None:
        """Makes what was done since `begin` last: this process may be killed now; with `fsync` the machine may, too.

        Raises:
            sqlite3.Error: it cannot be written, as on a full disk.
        """
        self._db.execute("COMMIT")

    def rollback(self, *, reload: bool) -> None:
        """Undoes what was done since `begin` in the file, with `reload` in the book as well.

        Raises:
            sqlite3.Error: the file cannot be read.
        """
        self._stale = reload
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        if reload:
            self._load()

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def register(self, registration: Registration) -> bool:
        """See `Book.register`."""
        began = self.book.register(registration)
        if began:
            told = msgspec.json.encode(registration)
            self._note(registration=told, step=self.book.step, saved=self.book.saved)
        return began

    def register_env(self, told: RegisterEnv) -> int:
        """See `Book.register_env`."""
        env_id = self.book.register_env(told)
        if env_id >= 0:
            row = (env_id, msgspec.json.encode(told), self.book.envs[env_id].name)
            self._db.execute("INSERT INTO envs VALUES (?, ?, ?, 1)", row)
        return env_id

    def disconnect(self, env_id: int) -> None:
        """See `Book.disconnect`."""
        self.book.disconnect(env_id)
        self._db.execute("UPDATE envs SET connected = 0 WHERE id = ?", (env_id,))

    def post(self, post: Post, now: float) -> tuple[list[int], bool]:
        """Takes groups in, once for each key.

        Args:
            post: the groups.
            now: seconds since the epoch.

        Returns:
            `Added.buffered`, and whether this is a repetition.

        Raises:
            FeedRefusedError: a group can never be part of a batch, or the key was used for something else.
            FeedBusyError: there is no room.
        """
        before = self._db.execute("SELECT digest, buffered FROM posts WHERE key = ?", (post.key,)).fetchone()
        if before is not None:
            if before[0] != post.digest:
                raise FeedRefusedError(422, "this Idempotency-Key came with other data before; give new data a new one")
            return msgspec.json.decode(before[1], type=list[int]), True
        told = [(*group, len(content)) for group, content in zip(post.groups, post.contents, strict=True)]
        added = self.book.add(told)
        self._db.executemany(
            "INSERT INTO groups (number, env, size, content) VALUES (?, ?, ?, ?)",
            [(added.first + i, *told[i][:2], content) for i, content in enumerate(post.contents)],
        )
        self._db.executemany(
            "UPDATE groups SET place = ? WHERE number = ?",
            [(self._place + i, group.number) for i, group in enumerate(added.entered)],
        )
        self._place += len(added.entered)
        for group in added.entered[-1:]:
            query = "SELECT content FROM groups WHERE number = ?"
            self.latest = self._db.execute(query, (group.number,)).fetchone()[0]
        if post.key:
            self._db.execute("DELETE FROM posts WHERE time < ?", (now - KEY_SECONDS,))
            row = (post.key, post.digest, msgspec.json.encode(added.buffered), now)
            self._db.execute("INSERT INTO posts VALUES (?, ?, ?, ?)", row)
        return added.buffered, False

    def batch(self, step: int | None, saved: int | None) -> tuple[int, int, list[bytes]] | None:
        """The batch of `step`, the same one whenever it is asked for; without `step` the next one, once.

        Args:
            step: of the trainer that will train it.
            saved: batches up to this step are not asked for again; None means up to the one before `step`.

        Returns:
            The batch's step, its sequences, and the content of each group; None if there is none yet.

        Raises:
            FeedRefusedError: no trainer has registered, or `step` is not of this run or forgotten.
        """
        again = step is not None and self.book.again(step)
        if self.book.registration is not None and not self.book.started:
            self.book.started = True
            self._note(started=1)
        if not again:
            taken = self.book.take()
            if taken is not None:
                numbers = [(taken[0], group.number) for group in taken[1]]
                self._db.executemany("UPDATE groups SET step = ? WHERE number = ?", numbers)
                self._note(step=taken[0])
            elif step is None:
                return None
        given = self.book.step if step is None else step
        sequences = sum(group.size for group in self.book.batches.get(given, ()))
        query = "SELECT content FROM groups WHERE step = ? ORDER BY place"
        contents = [content for (content,) in self._db.execute(query, (given,))]
        self._forget(given if step is None else given - 1 if saved is None else min(saved, given - 1))
        return (given, sequences, contents) if contents else None

    def reset(self) -> None:
        """Forgets everything."""
        for table in ("facts", "envs", "groups", "posts"):
            self._db.execute(f"DELETE FROM {table}")  # noqa: S608 - one of these
        self.latest = b""
        self._load()

    def _forget(self, saved: int) -> None:
        before, after = self.book.saved, self.book.forget(saved)
        if after > max(before, saved):
            logger.warning("too many batches to keep: a trainer can resume from step %d on, no longer earlier", after)
        if after > before:
            self._db.execute("DELETE FROM groups WHERE step <= ?", (after,))
            self._note(saved=after)

    def _note(self, **facts: object) -> None:
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", list(facts.items()))

    def _open(self, *, fsync: bool) -> None:
        execute = self._db.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA page_size = 16384")
        execute("PRAGMA journal_mode = WAL")
        execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        execute("BEGIN EXCLUSIVE")
        found = tuple(execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if found == (0, 0) and not execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in SCHEMA.split(";"):
                execute(statement)
            execute(f"PRAGMA application_id = {APPLICATION}")
            execute(f"PRAGMA user_version = {VERSION}")
        elif found != (APPLICATION, VERSION):
            raise sqlite3.DatabaseError("it is not the store of a feed, or of another version")
        execute("COMMIT")

    def _load(self) -> None:
        execute = self._db.execute
        facts: dict[str, Any] = dict(execute("SELECT name, value FROM facts"))
        told = facts.get("registration")
        book = self._new_book(
            registration=told and msgspec.json.decode(told, type=Registration),
            started=bool(facts.get("started")),
            step=facts.get("step", 0),
            saved=facts.get("saved", 0),
        )
        for _, told, name, connected in execute("SELECT * FROM envs ORDER BY id"):
            book.envs.append(Env(msgspec.json.decode(told, type=RegisterEnv), name, bool(connected)))
        query = "SELECT place, step, number, env, size, length(content) FROM groups ORDER BY place, number"
        for place, step, *fields in execute(query):
            book.restore(Group(*fields), queued=place is not None, step=step)
        self._place = execute("SELECT coalesce(max(place), 0) + 1 FROM groups").fetchone()[0]
        self.book, self._stale = book, False
