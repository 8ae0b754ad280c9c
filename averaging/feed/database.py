"""A `RunState` and the content of its groups in one SQLite file. Use a `Database` in one thread only."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from averaging.errors import ConfigError, FeedRefusedError
from averaging.feed.messages import RegisterEnv, Registration
from averaging.feed.run_state import Env, Group, RunState

logger = logging.getLogger(__name__)

APPLICATION_ID, VERSION = 0x61766664, 2
"""They mark a file as the store of a feed."""

KEY_SECONDS = 86400.0
"""Seconds for which the key of a post is remembered."""

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE envs (
  id INTEGER PRIMARY KEY, config BLOB NOT NULL, name TEXT NOT NULL, connected INTEGER NOT NULL, owner BLOB
);
CREATE TABLE groups (
  number INTEGER PRIMARY KEY, env INTEGER, size INTEGER NOT NULL, place INTEGER, step INTEGER, content BLOB NOT NULL
);
CREATE INDEX by_step ON groups (step, place) WHERE step IS NOT NULL;
CREATE TABLE posts (
  key TEXT PRIMARY KEY, digest BLOB NOT NULL, buffered BLOB NOT NULL, time REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX by_time ON posts (time);
"""
# place: the order in the queue; NULL while a group waits in the buffer of its environment. step: that of its batch.


@dataclass(frozen=True, slots=True)
class Post:
    """The groups of one request.

    Attributes:
        groups: environment and number of sequences of each.
        contents: the JSON of each.
        key: identifies repetitions of the request; empty if the client sent none.
        digest: equal in all repetitions of the request.
    """

    groups: Sequence[tuple[int | None, int]]
    contents: Sequence[bytes]
    key: str
    digest: bytes


class Database:
    """Opens a file, and creates it if needed.

    Args:
        path: the file; ":memory:" keeps everything in memory.
        fsync: whether a commit waits for the disk.
        new_state: creates a `RunState` with the limits of this server.
        clock: returns the seconds since the epoch. Environments have `RunState.env_timeout` from the opening on.

    Attributes:
        state: the state of the run. Change it through the methods below only.
        latest: content of the group that entered the queue last; empty if none did since the file was opened.

    Raises:
        ConfigError: the file cannot be opened, is of another kind, or is used by another process.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fsync: bool,
        new_state: Callable[..., RunState],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._new_state, self._clock, self._stale = new_state, clock, False
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
            sqlite3.Error: the file cannot be read to replace a state that the last `rollback` could not reload.
        """
        if self._stale:
            self._load()
        self._db.execute("BEGIN")

    def commit(self) -> None:
        """Commits the transaction. It then survives the end of this process, and with `fsync` also a power failure.

        Raises:
            sqlite3.Error: the file cannot be written, for example because the disk is full.
        """
        self._db.execute("COMMIT")

    def rollback(self, *, reload: bool) -> None:
        """Undoes the transaction in the file. With `reload` the state is read from the file again.

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

    def register(self, registration: Registration, trainer: int = 0) -> bool:
        """See `RunState.register`."""
        began = self.state.register(registration, trainer)
        if began:
            encoded = msgspec.json.encode(registration)
            self._set(registration=encoded, step=self.state.step, saved=self.state.saved)
        self._set(trainer=self.state.trainer)
        return began

    def register_env(self, config: RegisterEnv, owner: bytes, now: float) -> int:
        """See `RunState.register_env`."""
        env_id = self.state.register_env(config, owner, now)
        if env_id >= 0:
            row = (env_id, msgspec.json.encode(config), self.state.envs[env_id].name, owner)
            self._db.execute("INSERT OR REPLACE INTO envs VALUES (?, ?, ?, 1, ?)", row)
        return env_id

    def disconnect(self, env_id: int, owners: Collection[bytes]) -> None:
        """See `RunState.disconnect`."""
        self.state.disconnect(env_id, owners)
        self._db.execute("UPDATE envs SET connected = 0 WHERE id = ?", (env_id,))

    def post(self, post: Post, now: float) -> tuple[list[int], bool]:
        """Adds groups, once for each key.

        Args:
            post: the groups.
            now: seconds since the epoch.

        Returns:
            `Added.buffered`, and whether this post is a repetition.

        Raises:
            FeedRefusedError: a group can never be part of a batch, or the key belongs to other data.
            FeedBusyError: the queue is full.
        """
        earlier = self._db.execute("SELECT digest, buffered FROM posts WHERE key = ?", (post.key,)).fetchone()
        if earlier is not None:
            if earlier[0] != post.digest:
                raise FeedRefusedError(
                    422, "this Idempotency-Key was used for other data before; send new data with a new key"
                )
            return msgspec.json.decode(earlier[1], type=list[int]), True
        groups = [(*group, len(content)) for group, content in zip(post.groups, post.contents, strict=True)]
        added = self.state.add(groups, now)
        self._db.executemany(
            "INSERT INTO groups (number, env, size, content) VALUES (?, ?, ?, ?)",
            [(added.first + i, *groups[i][:2], content) for i, content in enumerate(post.contents)],
        )
        self._db.executemany(
            "UPDATE groups SET place = ? WHERE number = ?",
            [(self._next_place + i, group.number) for i, group in enumerate(added.queued)],
        )
        self._next_place += len(added.queued)
        if added.queued:
            query = "SELECT content FROM groups WHERE number = ?"
            self.latest = self._db.execute(query, (added.queued[-1].number,)).fetchone()[0]
        if post.key:
            self._db.execute("DELETE FROM posts WHERE time < ?", (now - KEY_SECONDS,))
            row = (post.key, post.digest, msgspec.json.encode(added.buffered), now)
            self._db.execute("INSERT INTO posts VALUES (?, ?, ?, ?)", row)
        return added.buffered, False

    def batch(
        self, step: int | None, saved: int | None, now: float, trainer: int | None = None
    ) -> tuple[int, int, list[bytes]] | None:
        """Returns the batch of `step`, the same one each time. Without `step`, returns the next batch, once.

        Args:
            step: the step at which the trainer trains the batch.
            saved: the batches up to this step are not needed any more; None means up to the one before `step`.
            now: seconds since the epoch.
            trainer: number of the trainer's registration; None if the trainer knows of none.

        Returns:
            The batch's step, its number of sequences, and the content of each group; None if there is no batch yet.

        Raises:
            FeedRefusedError: no trainer has registered, or another one since, or `step` is of another run or forgotten.
        """
        if trainer is not None:
            self.state.check_trainer(trainer)
        delivered = step is not None and self.state.was_delivered(step)
        if self.state.registration is not None and not self.state.started:
            self.state.started = True
            self._set(started=1)
        if not delivered:
            formed = self.state.next_batch(now)
            if formed is not None:
                rows = [(formed[0], group.number) for group in formed[1]]
                self._db.executemany("UPDATE groups SET step = ? WHERE number = ?", rows)
                self._set(step=formed[0])
            elif step is None:
                return None
        found = self.state.step if step is None else step
        sequences = sum(group.size for group in self.state.batches.get(found, ()))
        query = "SELECT content FROM groups WHERE step = ? ORDER BY place"
        contents = [content for (content,) in self._db.execute(query, (found,))]
        self._forget(found if step is None else found - 1 if saved is None else min(saved, found - 1))
        return (found, sequences, contents) if contents else None

    def reset(self) -> None:
        """Deletes everything but the number of the latest trainer, so that an earlier one cannot come back."""
        trainer = self.state.trainer
        for table in ("facts", "envs", "groups", "posts"):
            self._db.execute(f"DELETE FROM {table}")  # noqa: S608 - one of these
        self._set(trainer=trainer)
        self.latest = b""
        self._load()

    def _forget(self, saved: int) -> None:
        before, after = self.state.saved, self.state.forget(saved)
        if after > max(before, saved):
            logger.warning(
                "the kept batches exceed their limit: a trainer can resume from step %d or later only; to keep more, "
                "raise --replay-bytes or save checkpoints more often",
                after,
            )
        if after > before:
            self._db.execute("DELETE FROM groups WHERE step <= ?", (after,))
            self._set(saved=after)

    def _set(self, **facts: object) -> None:
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
            execute(f"PRAGMA application_id = {APPLICATION_ID}")
            execute(f"PRAGMA user_version = {VERSION}")
        elif found == (APPLICATION_ID, 1):
            execute("ALTER TABLE envs ADD COLUMN owner BLOB")
            execute(f"PRAGMA user_version = {VERSION}")
        elif found != (APPLICATION_ID, VERSION):
            raise sqlite3.DatabaseError("it is not the store of a feed, or another version wrote it")
        execute("COMMIT")

    def _load(self) -> None:
        execute = self._db.execute
        facts: dict[str, Any] = dict(execute("SELECT name, value FROM facts"))
        registration = facts.get("registration")
        state = self._new_state(
            registration=registration and msgspec.json.decode(registration, type=Registration),
            started=bool(facts.get("started")),
            step=facts.get("step", 0),
            saved=facts.get("saved", 0),
            trainer=facts.get("trainer", 0),
        )
        now = self._clock()
        for _, config, name, connected, owner in execute("SELECT * FROM envs ORDER BY id"):
            decoded = msgspec.json.decode(config, type=RegisterEnv)
            state.envs.append(Env(decoded, name, bool(connected), owner or b"", heard=now, posted=True, waited=now))
        query = "SELECT place, step, number, env, size, length(content) FROM groups ORDER BY place, number"
        for place, step, *fields in execute(query):
            state.restore(Group(*fields), queued=place is not None, step=step)
        self._next_place = execute("SELECT coalesce(max(place), 0) + 1 FROM groups").fetchone()[0]
        self.state, self._stale = state, False
