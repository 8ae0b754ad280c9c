"""A `RunState` and the content of its groups in one SQLite file."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from averaging.errors import ConfigError, FeedError
from averaging.rl.feed.messages import Post, RegisterEnv, Registration
from averaging.rl.feed.run_state import Env, RunRecord, RunState, SampleGroup

logger = logging.getLogger(__name__)

APPLICATION_ID, VERSION = 0x61766664, 4  # they mark a file as the store of a feed
KEY_SECONDS = 86400.0  # for which the key of a post is remembered
WRITE_RETRY_SECONDS = 5.0  # `Retry-After` while the file cannot be written, for example because the disk is full

SCHEMA = """
CREATE TABLE run (id INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE envs (id INTEGER PRIMARY KEY, env BLOB NOT NULL);
CREATE TABLE groups (
  number INTEGER PRIMARY KEY, env INTEGER, size INTEGER NOT NULL, version INTEGER, place INTEGER, step INTEGER,
  content BLOB NOT NULL
);
CREATE INDEX by_step ON groups (step) WHERE step IS NOT NULL;
CREATE TABLE posts (
  key TEXT PRIMARY KEY, digest BLOB NOT NULL, buffered BLOB NOT NULL, time REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX by_time ON posts (time);
"""
# place: the order in the queue; NULL while a group waits in the buffer of its environment. step: that of its batch.


class Database:
    """Opens a file, and creates it if needed; a ConfigError says why that fails. Use it in one thread at a time.

    Each method is a transaction: it is stored when the method returns, and if it raises, nothing has changed. With
    `fsync` it waits for the disk, and so survives a power failure and not only a kill.

    Attributes:
        state: the state of the run, which `new_state` makes with the limits of the server. Change it through the
            methods below only.
        latest: content of the group that entered the queue last; empty if none did since the file was opened.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fsync: bool,
        new_state: Callable[..., RunState],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._new_state, self._clock = new_state, clock
        self.state = new_state()
        self.latest = self._record = b""
        self._is_stale = False  # whether the file must be read again, because memory is ahead of it
        try:
            if str(path) != ":memory:":
                Path(path).touch(mode=0o600)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=0.0, check_same_thread=False)
            try:
                self._open(fsync=fsync)
                self._load()
            except BaseException:
                self._db.close()
                raise
        except (sqlite3.Error, OSError) as error:
            in_use = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            reason = "another process uses it" if in_use else str(error)
            raise ConfigError(f"store {path} cannot be used: {reason}; give another file") from None

    def close(self) -> None:
        self._db.close()

    def register(self, registration: Registration, trainer: int = 0) -> bool:
        with self._transaction():
            return self.state.register(registration, trainer)

    def register_env(self, config: RegisterEnv, key: bytes, now: float) -> int:
        with self._transaction():
            env_id = self.state.register_env(config, key, now)
            if env_id >= 0:
                self._write_env(env_id)
            return env_id

    def disconnect(self, env_id: int) -> None:
        with self._transaction():
            self.state.disconnect(env_id)
            self._write_env(env_id)

    def post(self, post: Post, now: float) -> tuple[list[int], bool]:
        """Adds groups, once for each key. Returns `Added.buffered`, and whether this post is a repetition."""
        with self._transaction():
            query = "SELECT digest, buffered FROM posts WHERE key = ?"
            if (earlier := self._db.execute(query, (post.key,)).fetchone()) is not None:
                if earlier[0] != post.digest:
                    text = "this Idempotency-Key was used for other data before; send new data with a new key"
                    raise FeedError(text, 422)
                return msgspec.json.decode(earlier[1], type=list[int]), True
            versions = post.versions or [None] * len(post.groups)
            parts = list(zip(post.groups, versions, post.contents, strict=True))
            added = self.state.add([(*group, len(content), version) for group, version, content in parts], now)
            self._db.executemany(
                "INSERT INTO groups (number, env, size, version, content) VALUES (?, ?, ?, ?, ?)",
                [(added.first + i, *group, version, content) for i, (group, version, content) in enumerate(parts)],
            )
            self._queue(added.queued)
            if post.key:
                self._db.execute("DELETE FROM posts WHERE time < ?", (now - KEY_SECONDS,))
                row = (post.key, post.digest, msgspec.json.encode(added.buffered), now)
                self._db.execute("INSERT INTO posts VALUES (?, ?, ?, ?)", row)
            return added.buffered, False

    def batch(
        self, step: int | None, saved: int | None, now: float, trainer: int | None = None, version: int | None = None
    ) -> tuple[int, int, list[bytes]] | None:
        """Returns the batch of `step`, the same one each time. Without `step`, returns the next batch, once.

        Batches up to step `saved` are not needed any more; None means up to the one before `step`. `trainer` is the
        number of the trainer's registration, and `version` its newest version of the weights, if it tells them.

        Returns:
            The batch's step, its number of sequences, and the content of each group; None if there is no batch yet.
        """
        with self._transaction():
            state = self.state
            if trainer is not None:
                state.check_trainer(trainer)
            delivered = step is not None and state.was_delivered(step)
            if state.run.registration is not None:
                state.run.started = True
                if version is not None:
                    state.report(version, trainer)
            if not delivered:
                formed = state.next_batch(now)
                if formed is not None:
                    rows = [(state.run.step, group.number) for group in formed]
                    self._db.executemany("UPDATE groups SET step = ? WHERE number = ?", rows)
                elif step is None:
                    return None
            step_of_batch = state.run.step if step is None else step
            groups = state.batches.get(step_of_batch, ())
            contents = [self._content(group) for group in groups]
            # Without `step` the trainer never asks again; otherwise it needs this batch again if it fails in this step.
            self._forget(step_of_batch if step is None else step - 1 if saved is None else min(saved, step - 1))
            return (step_of_batch, sum(group.size for group in groups), contents) if contents else None

    def reset(self) -> None:
        """Deletes everything but the number of the latest trainer, so that an earlier one cannot come back."""
        with self._transaction():
            for table in ("envs", "groups", "posts"):
                self._db.execute(f"DELETE FROM {table}")  # noqa: S608 - one of these
            self.state = self._new_state(run=RunRecord(trainer=self.state.run.trainer))
            self._next_place, self.latest = 1, b""

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Stores what the block has changed, or undoes it in the file and in memory."""
        try:
            if self._is_stale:
                self._load()
            self._db.execute("BEGIN")
            yield
            self._write_record()
            self._db.execute("COMMIT")
        except FeedError:  # the state refuses, and is as it was
            self._db.execute("ROLLBACK")
            raise
        except BaseException as error:
            self._is_stale = True
            with suppress(sqlite3.Error):  # otherwise the next transaction loads the state
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                self._load()
            if not isinstance(error, sqlite3.Error):
                raise
            message = f"the store cannot be written: {error}; nothing was changed, so send the same again"
            raise FeedError(message, 503, WRITE_RETRY_SECONDS) from None

    def _write_record(self) -> None:
        record = msgspec.json.encode(self.state.run)
        if record != self._record:
            self._db.execute("INSERT OR REPLACE INTO run VALUES (0, ?)", (record,))
            self._record = record
        self._db.executemany("DELETE FROM groups WHERE number = ?", [(number,) for number in self.state.dropped])
        self.state.dropped.clear()

    def _write_env(self, env_id: int) -> None:
        row = (env_id, msgspec.json.encode(self.state.envs[env_id]))
        self._db.execute("INSERT OR REPLACE INTO envs VALUES (?, ?)", row)

    def _queue(self, groups: list[SampleGroup]) -> None:
        places = [(self._next_place + i, group.number) for i, group in enumerate(groups)]
        self._db.executemany("UPDATE groups SET place = ? WHERE number = ?", places)
        self._next_place += len(groups)
        if groups:
            self.latest = self._content(groups[-1])

    def _content(self, group: SampleGroup) -> bytes:
        row = self._db.execute("SELECT content FROM groups WHERE number = ?", (group.number,)).fetchone()
        return bytes(row[0])

    def _forget(self, saved: int) -> None:
        before = self.state.run.saved
        self.state.forget(saved)
        after = self.state.run.saved
        if after > max(before, saved):
            text = "the kept batches exceed their limit: a trainer can resume from step %d or later only"
            logger.warning(f"{text}; to keep more, raise --queue-bytes or save checkpoints more often", after)
        if after > before:
            self._db.execute("DELETE FROM groups WHERE step <= ?", (after,))

    def _open(self, *, fsync: bool) -> None:
        execute = self._db.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA page_size = 16384")
        execute("PRAGMA journal_mode = WAL")
        execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        execute("BEGIN EXCLUSIVE")
        marks = tuple(execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if marks == (0, 0) and not execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in SCHEMA.split(";"):
                execute(statement)
            execute(f"PRAGMA application_id = {APPLICATION_ID}")
            execute(f"PRAGMA user_version = {VERSION}")
        elif marks != (APPLICATION_ID, VERSION):
            raise sqlite3.DatabaseError("it is not the store of a feed, or another version wrote it")
        execute("COMMIT")

    def _load(self) -> None:
        execute, now = self._db.execute, self._clock()
        row = execute("SELECT record FROM run").fetchone()
        self._record = b"" if row is None else row[0]
        state = self._new_state(run=msgspec.json.decode(self._record, type=RunRecord) if row else RunRecord())
        for (content,) in execute("SELECT env FROM envs ORDER BY id"):
            env = msgspec.json.decode(content, type=Env)
            env.heard, env.waited, env.posted, env.silent = now, now, True, False
            state.envs.append(env)
        query = "SELECT place, step, number, env, size, length(content), version FROM groups ORDER BY place, number"
        for place, step, *fields in execute(query):
            group = SampleGroup(*fields)
            state.next_number = max(state.next_number, group.number + 1)
            if step is not None:
                state.batches.setdefault(step, []).append(group)
            elif place is not None or group.env is None:
                state.queue.append(group)
            else:
                state.buffers.setdefault(group.env, []).append(group)
        state.drop_stale()  # the limit may be another one now; what is dropped is deleted with the next transaction
        self._next_place = execute("SELECT coalesce(max(place), 0) + 1 FROM groups").fetchone()[0]
        self.state, self._is_stale = state, False
