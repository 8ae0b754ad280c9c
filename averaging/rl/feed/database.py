"""A `RunState` and the content of its groups in one SQLite file. Use a `Database` in one thread only."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from averaging.errors import ConfigError, FeedError
from averaging.rl.feed.messages import Post, RegisterEnv, Registration
from averaging.rl.feed.run_state import Env, Move, RunState, SampleGroup
from averaging.rl.feed.versions import TrainerVersion

logger = logging.getLogger(__name__)

APPLICATION_ID, VERSION = 0x61766664, 3
"""They mark a file as the store of a feed."""

KEY_SECONDS = 86400.0
"""Seconds for which the key of a post is remembered."""

MAX_HEADROOM, VOLUME_PARTS = 32 << 20, 16
"""Free bytes of the disk that posts leave to the writes of delivered batches, and the limit of that as a part of it."""

WRITE_RETRY_SECONDS = 5.0
"""`Retry-After` while the file cannot be written."""

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE envs (
  id INTEGER PRIMARY KEY, config BLOB NOT NULL, name TEXT NOT NULL, connected INTEGER NOT NULL, owner BLOB
);
CREATE TABLE groups (
  number INTEGER PRIMARY KEY, env INTEGER, size INTEGER NOT NULL, place INTEGER, step INTEGER, content BLOB NOT NULL,
  version INTEGER, aside INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX by_step ON groups (step, place) WHERE step IS NOT NULL;
CREATE TABLE posts (
  key TEXT PRIMARY KEY, digest BLOB NOT NULL, buffered BLOB NOT NULL, time REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX by_time ON posts (time);
"""
# place: the order in the queue; NULL while a group waits in the buffer of its environment. step: that of its batch.
# version: the oldest one of the weights that made it. aside: whether it was set aside, because that is too old.

UPGRADES = {
    1: ["ALTER TABLE envs ADD COLUMN owner BLOB"],
    2: [
        "ALTER TABLE groups ADD COLUMN version INTEGER",
        "ALTER TABLE groups ADD COLUMN aside INTEGER NOT NULL DEFAULT 0",
    ],
}
"""What makes the store of an earlier version one of the next."""

MOVES = {
    Move.QUEUED: "UPDATE groups SET aside = 0, place = (SELECT coalesce(max(place), 0) + 1 FROM groups) "
    "WHERE number = ?",
    Move.BUFFERED: "UPDATE groups SET aside = 0, place = NULL WHERE number = ?",
    Move.ASIDE: "UPDATE groups SET aside = 1 WHERE number = ?",
    Move.DROPPED: "DELETE FROM groups WHERE number = ?",
}


def _env_row(env_id: int, env: Env) -> tuple[object, ...]:
    return env_id, msgspec.json.encode(env.config), env.name, env.connected, env.owner


class Database:
    """Opens a file, and creates it if needed.

    While the file cannot be written, for example because the disk is full, the database can be detached from it: what
    the trainer and the environments do then changes the state in memory only, and `write_state` writes it later.

    Args:
        path: the file; ":memory:" keeps everything in memory.
        fsync: whether a commit waits for the disk.
        new_state: creates a `RunState` with the limits of this server.
        clock: returns the seconds since the epoch. Environments have `RunState.env_timeout` from the opening on.

    Attributes:
        state: the state of the run. Change it through the methods below only.
        latest: content of the group that entered the queue last; empty if none did since the file was opened.
        detached: whether changes are kept in memory, until `attach`. Neither `post` nor `reset` may be called then.

    Raises:
        ConfigError: the file cannot be opened, is of another kind, is used by another process, or a part of it is gone.
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
        self.latest, self.detached = b"", False
        self._delivered: dict[int, int] = {}  # while detached: the steps of groups by their number
        self._moved: list[tuple[SampleGroup, Move]] = []  # while detached
        self._path = None if str(path) == ":memory:" else Path(path)
        try:
            log_bytes = self._look_for_log()
            self._db = sqlite3.connect(path, isolation_level=None, timeout=0.0)
            try:
                self._open(fsync=fsync)
                self._check_log(log_bytes)
                self._load()
            except BaseException:
                self._db.close()
                raise
        except (sqlite3.Error, OSError) as error:
            in_use = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            reason = "another process uses it" if in_use else str(error)
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

    def write_state(self) -> None:
        """Writes what has changed while the database was detached, in the present transaction.

        Raises:
            sqlite3.Error: the file still cannot be written.
        """
        state, saved = self.state, self.state.saved
        forgotten = [(number,) for number, step in self._delivered.items() if step <= saved]
        kept = [(step, number) for number, step in self._delivered.items() if step > saved]
        self._db.executemany("DELETE FROM groups WHERE number = ?", forgotten)  # first, because it makes room
        self._write_moves(self._moved)
        self._db.execute("DELETE FROM groups WHERE step <= ?", (saved,))
        self._db.executemany("UPDATE groups SET step = ? WHERE number = ?", kept)
        self._db.executemany(
            "INSERT OR REPLACE INTO envs VALUES (?, ?, ?, ?, ?)", [_env_row(*each) for each in enumerate(state.envs)]
        )
        facts: dict[str, object] = {name: getattr(state, name) for name in ("step", "saved", "started", "trainer")}
        facts |= {"version": state.version.newest, "version_trainer": state.version.trainer}
        if state.registration is not None:
            facts["registration"] = msgspec.json.encode(state.registration)
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", list(facts.items()))

    def attach(self) -> None:
        """Ends `detached`. Call it after `write_state` and `commit`."""
        self.detached = False
        self._delivered.clear()
        self._moved.clear()

    def close(self) -> None:
        """Closes the file, and marks it as whole without its write-ahead log."""
        with suppress(sqlite3.Error):  # otherwise the log stays beside the file
            if not self.detached:
                self._set(open=0)
        self._db.close()

    def register(self, registration: Registration, trainer: int = 0) -> bool:
        is_new = self.state.register(registration, trainer)
        if is_new:
            encoded = msgspec.json.encode(registration)
            self._set(registration=encoded, step=self.state.step, saved=self.state.saved)
        self._set(trainer=self.state.trainer)
        return is_new

    def register_env(self, config: RegisterEnv, owner: bytes, now: float) -> int:
        env_id = self.state.register_env(config, owner, now)
        if env_id >= 0:
            row = _env_row(env_id, self.state.envs[env_id])
            self._write("INSERT OR REPLACE INTO envs VALUES (?, ?, ?, ?, ?)", [row])
        return env_id

    def disconnect(self, env_id: int, owners: Collection[bytes]) -> None:
        self.state.disconnect(env_id, owners)
        self._write("UPDATE envs SET connected = 0 WHERE id = ?", [(env_id,)])

    def post(self, post: Post, now: float) -> tuple[list[int], bool]:
        """Adds groups, once for each key.

        Args:
            post: the groups.
            now: seconds since the epoch.

        Returns:
            `Added.buffered`, and whether this post is a repetition.

        Raises:
            FeedError: a group can never be part of a batch, the key belongs to other data, or queue or disk are full.
        """
        earlier = self._db.execute("SELECT digest, buffered FROM posts WHERE key = ?", (post.key,)).fetchone()
        if earlier is not None:
            if earlier[0] != post.digest:
                raise FeedError(
                    "this Idempotency-Key was used for other data before; send new data with a new key", 422
                )
            return msgspec.json.decode(earlier[1], type=list[int]), True
        self._check_disk(sum(map(len, post.contents)))
        versions = post.versions or [None] * len(post.groups)
        groups = [
            (*group, len(content), version)
            for group, content, version in zip(post.groups, post.contents, versions, strict=True)
        ]
        unfit_before = [env_id for env_id, env in enumerate(self.state.envs) if env.unfit]
        added = self.state.add(groups, now)
        unfit = [env_id for env_id, env in enumerate(self.state.envs) if env.unfit]
        if unfit != unfit_before:
            self._set(unfit=msgspec.json.encode(unfit))
        self._db.executemany(
            "INSERT INTO groups (number, env, size, content, version) VALUES (?, ?, ?, ?, ?)",
            [(added.first + i, *groups[i][:2], content, versions[i]) for i, content in enumerate(post.contents)],
        )
        self._take_moves()
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
        self,
        step: int | None,
        saved: int | None,
        now: float,
        trainer: int | None = None,
        version: int | None = None,
    ) -> tuple[int, int, list[bytes]] | None:
        """Returns the batch of `step`, the same one each time. Without `step`, returns the next batch, once.

        Args:
            step: the step at which the trainer trains the batch.
            saved: the batches up to this step are not needed any more; None means up to the one before `step`.
            now: seconds since the epoch.
            trainer: number of the trainer's registration; None if the trainer knows of none.
            version: the trainer's newest version of the weights; None if it reports none.

        Returns:
            The batch's step, its number of sequences, and the content of each group; None if there is no batch yet.

        Raises:
            FeedError: no trainer has registered, or another one since, or `step` is of another run or forgotten.
        """
        if trainer is not None:
            self.state.check_trainer(trainer)
        delivered = step is not None and self.state.was_delivered(step)
        if self.state.registration is not None and not self.state.started:
            self.state.started = True
            self._set(started=1)
        if version is not None and self.state.registration is not None:
            self._report(version, trainer)
        self._take_moves()
        if not delivered:
            formed = self.state.next_batch(now)
            if formed is not None:
                rows = [(formed[0], group.number) for group in formed[1]]
                self._write("UPDATE groups SET step = ? WHERE number = ?", rows)
                if self.detached:
                    self._delivered.update((number, step) for step, number in rows)
                self._set(step=formed[0])
            elif step is None:
                return None
        delivered_step = self.state.step if step is None else step
        groups = self.state.batches.get(delivered_step, ())
        sequences = sum(group.size for group in groups)
        query = "SELECT content FROM groups WHERE number = ?"
        contents = [self._db.execute(query, (group.number,)).fetchone()[0] for group in groups]
        # Without `step` the trainer never asks again; otherwise it needs this batch again if it fails in this step.
        self._forget(delivered_step if step is None else step - 1 if saved is None else min(saved, step - 1))
        return (delivered_step, sequences, contents) if contents else None

    def _report(self, version: int, trainer: int | None) -> None:
        before = (self.state.version.newest, self.state.version.trainer)
        self.state.report(version, trainer)
        newest = self.state.version
        if (newest.newest, newest.trainer) != before:
            self._set(version=newest.newest, version_trainer=newest.trainer)

    def _take_moves(self) -> None:
        """Writes what has become of groups because of their version."""
        moves, self.state.moves = self.state.moves, []
        if self.detached:
            self._moved += moves
        elif moves:
            self._write_moves(moves)

    def _write_moves(self, moves: Sequence[tuple[SampleGroup, Move]]) -> None:
        for group, move in moves:
            self._db.execute(MOVES[move], (group.number,))
        self._next_place = self._db.execute("SELECT coalesce(max(place), 0) + 1 FROM groups").fetchone()[0]

    def reset(self) -> None:
        """Deletes everything but the number of the latest trainer, so that an earlier one cannot come back."""
        trainer = self.state.trainer
        for table in ("facts", "envs", "groups", "posts"):
            self._db.execute(f"DELETE FROM {table}")  # noqa: S608 - one of these
        self._set(trainer=trainer, open=1)
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
            self._write("DELETE FROM groups WHERE step <= ?", [(after,)])
            self._set(saved=after)

    def _set(self, **facts: object) -> None:
        self._write("INSERT OR REPLACE INTO facts VALUES (?, ?)", list(facts.items()))

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        if not self.detached:
            self._db.executemany(statement, rows)

    def _check_disk(self, nbytes: int) -> None:
        """Refuses a post that would leave too little of the disk to write that batches are delivered and forgotten."""
        if self._path is None:
            return
        free_pages, page_size = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_size")
        )
        disk, log = shutil.disk_usage(self._path.parent), Path(f"{self._path}-wal")
        # A post goes to the log first, and what is in the log needs room in the file, too.
        needed = (
            min(MAX_HEADROOM, disk.total // VOLUME_PARTS) + 2 * nbytes + (log.stat().st_size if log.exists() else 0)
        )
        if disk.free < needed and free_pages * page_size < needed:
            raise FeedError(
                f"the store cannot be written: its disk is nearly full, with {disk.free} bytes free; nothing was "
                "changed, so send the same again",
                503,
                WRITE_RETRY_SECONDS,
            )

    def _look_for_log(self) -> int:
        """Creates the file if needed. Returns the bytes of its write-ahead log, which SQLite may remove later."""
        if self._path is None:
            return 0
        log = Path(f"{self._path}-wal")
        log_bytes = log.stat().st_size if log.exists() else 0
        if log_bytes and not (self._path.exists() and self._path.stat().st_size):
            raise OSError(f"it is gone or empty, but {log} is there; put it back, or remove that to begin another run")
        self._path.touch(mode=0o600)
        return log_bytes

    def _check_log(self, log_bytes: int) -> None:
        """Notices that the log of a file that was not closed is gone, and marks this file as not closed."""
        if self._path is None:
            return
        was_open = self._db.execute("SELECT value FROM facts WHERE name = 'open'").fetchone()
        if was_open == (1,) and not log_bytes:
            raise OSError(
                f"its server was killed, and {self._path}-wal is gone, which holds the groups and batches that were "
                "stored last; put it back beside the store"
            )
        if was_open != (1,):
            with suppress(sqlite3.OperationalError):  # a full disk: it can be drained all the same
                self._set(open=1)
                self._db.execute("PRAGMA wal_checkpoint")  # the mark is in the file itself; the log is not cut

    def _open(self, *, fsync: bool) -> None:
        execute = self._db.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA page_size = 16384")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA wal_autocheckpoint = 256")  # 4 MiB; a log of the default 16 MiB fills small disks
        execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        execute("BEGIN EXCLUSIVE")
        marks = tuple(execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if marks == (0, 0) and not execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in SCHEMA.split(";"):
                execute(statement)
            execute(f"PRAGMA application_id = {APPLICATION_ID}")
            execute(f"PRAGMA user_version = {VERSION}")
        elif marks[0] == APPLICATION_ID and marks[1] in UPGRADES:
            for earlier in range(marks[1], VERSION):
                for statement in UPGRADES[earlier]:
                    execute(statement)
            execute(f"PRAGMA user_version = {VERSION}")
        elif marks != (APPLICATION_ID, VERSION):
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
            version=TrainerVersion(facts.get("version"), facts.get("version_trainer") or 0),
        )
        now = self._clock()
        for _, config, name, connected, owner in execute("SELECT * FROM envs ORDER BY id"):
            decoded = msgspec.json.decode(config, type=RegisterEnv)
            state.envs.append(Env(decoded, name, bool(connected), owner or b"", heard=now, posted=True, waited=now))
        for env_id in msgspec.json.decode(facts.get("unfit", b"[]"), type=list[int]):
            state.envs[env_id].unfit = True
        query = (
            "SELECT place, step, aside, number, env, size, length(content), version FROM groups ORDER BY place, number"
        )
        for place, step, aside, *fields in execute(query):
            state.restore(SampleGroup(*fields), queued=place is not None, step=step, aside=bool(aside))
        state.sort_out()  # the limit may be another one now; what moves is written with the next request
        self._next_place = execute("SELECT coalesce(max(place), 0) + 1 FROM groups").fetchone()[0]
        self.state, self._stale = state, False


T = TypeVar("T")

ATTACH_SECONDS, COMPLAIN_SECONDS = 1.0, 60.0
"""Least time between two attempts to write a detached state, and between two warnings that this is not possible."""


class DatabaseThread:
    """Runs jobs on a database one after the other, each in a transaction. Use it as an async context manager.

    Args:
        open_database: opens the database; called in the thread.
    """

    def __init__(self, open_database: Callable[[], Database]) -> None:
        self._open = open_database
        self._attempted = self._complained = -math.inf
        self._thread = ThreadPoolExecutor(1, "feed-database")

    async def __aenter__(self) -> DatabaseThread:
        try:
            self._database = await asyncio.get_running_loop().run_in_executor(self._thread, self._open)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.submit(self._close)
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def state(self) -> RunState:
        """The present state. Another thread changes it, so two values read from it can be of different moments."""
        return self._database.state

    async def run(self, job: Callable[[Database], T], *, drains: bool = False) -> T:
        """Runs `job` in a transaction. Returns its result after the commit.

        Args:
            job: changes the database only with its methods.
            drains: whether the result may be returned while the file cannot be written, and is written later. Not for
                jobs that post or reset.

        Raises:
            FeedError: `job` raised it, or the file cannot be written; nothing was changed.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, job, drains)

    def _run(self, job: Callable[[Database], T], drains: bool) -> T:
        database = self._database
        try:
            if database.detached and not self._attach():
                if not drains:
                    raise sqlite3.OperationalError("its disk is full, and batches are delivered from memory")
                return job(database)
            try:
                return self._transact(job)
            except sqlite3.Error as error:
                self._complain(f"the store cannot be written: {error}")
                if not drains:
                    raise
                database.detached = True
                return job(database)
        except sqlite3.Error as error:
            message = f"the store cannot be written: {error}; nothing was changed, so send the same again"
            raise FeedError(message, 503, WRITE_RETRY_SECONDS) from None

    def _transact(self, job: Callable[[Database], T]) -> T:
        try:
            self._database.begin()
            result = job(self._database)
            self._database.commit()
        except Exception as error:
            with suppress(sqlite3.Error):  # the next transaction loads the state again
                self._database.rollback(reload=not isinstance(error, FeedError))
            if isinstance(error, FeedError) and error.retry_after == WRITE_RETRY_SECONDS:
                self._complain(str(error))
            raise
        return result

    def _attach(self) -> bool:
        """Tries to write the state of a detached database, but not all the time. Returns whether it succeeded."""
        if time.monotonic() - self._attempted < ATTACH_SECONDS:
            return False
        self._attempted = time.monotonic()
        try:
            self._database.begin()
            self._database.write_state()
            self._database.commit()
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                self._database.rollback(reload=False)
            return False
        self._database.attach()
        logger.warning("the store can be written again, and holds everything")
        return True

    def _complain(self, error: str) -> None:
        """Says once a minute at most what all refused posts have in common."""
        if time.monotonic() - self._complained >= COMPLAIN_SECONDS:
            self._complained = time.monotonic()
            logger.warning("%s. Posts are answered with 503 meanwhile, and batches are delivered", error)

    def _close(self) -> None:
        self._attempted = -math.inf
        if self._database.detached and not self._attach():
            logger.warning("the store does not hold the last changes, because it cannot be written")
        self._database.close()
