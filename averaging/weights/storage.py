"""Versions of weights in a folder on a disk, in a bucket or behind a web server, through fsspec.

- `index.json`: the versions, oldest first. It is replaced last, so a version is there whole or not at all.
- `VERSION-DIGEST.manifest`: a `Version` of weights.proto, with the digests of all pieces, as they travel directly.
- `VERSION-DIGEST.whole.N`: pieces of the whole version, which then is an *anchor*. A piece is its number (4 bytes), its
  coding as in weights.proto (1), the length of its data (4), and the data.
- `VERSION-DIGEST.difference.N`: the same as differences to the version whose digest is `base`.
- `lease.json`: which publisher writes here; it renews it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Annotated, Literal

import msgspec
from google.protobuf.message import DecodeError

from averaging.common import Backoff, is_count
from averaging.errors import CallRefusedError, ConfigError, ProtocolViolationError, RefusalCause, StateError
from averaging.tensors import in_thread
from averaging.weights.differences import Coding
from averaging.weights.download import all_of
from averaging.weights.layout import WeightManifest, read_version, version_message
from averaging.weights.snapshot import Incoming, WeightSnapshot
from averaging.weights.store import difference, is_left_out
from averaging.wire import weights_pb2 as wire

logger = logging.getLogger("averaging.weights")

INDEX, LEASE = "index.json", "lease.json"
OF_VERSION = re.compile(r"(\d+-[0-9a-f]{16})\.(?:manifest|(?:whole|difference)\.\d+)(?:\.\w+\.tmp)?")
PIECE = struct.Struct("<IBI")

# Objects have about this length, and `LANES` of them travel at once. The storage must deliver so many bytes/s.
OBJECT_BYTES, LANES, LEAST_RATE, TRIES = 8 << 20, 4, 64 << 10, 5

# A version is written whole too if the differences since the last anchor are so many, or have this share of its bytes:
# who starts late reads one and a half times the model at most.
ANCHOR_EVERY, ANCHOR_SHARE = 32, 0.5

POLL_SECONDS = 1.0  # interval at which followers read the index
LEASE_SECONDS, RENEW_SECONDS = 60.0, 10.0  # a lease that has not changed for the first is taken over
MIN_PAUSE, MAX_PAUSE = 0.1, 10.0  # seconds between two attempts; the pause doubles

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Step = tuple["StoredVersion", str]  # a version on the way to the newest, and which objects of it are read


class StoredVersion(msgspec.Struct, frozen=True, omit_defaults=True):
    version: Count
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    whole: tuple[Count, ...] | None = None  # bytes of the objects, if it is an anchor
    difference: tuple[Count, ...] | None = None
    base: str = ""  # digest of the version to which it has a difference

    @property
    def name(self) -> str:
        return f"{self.version}-{self.digest[:16]}"


class Index(msgspec.Struct, frozen=True):
    format: Literal[1] = 1
    run: str = ""  # empty if the publisher has none
    versions: tuple[StoredVersion, ...] = ()  # oldest first


def route(entries: Sequence[StoredVersion], has: str, unusable: Collection[Step] = ()) -> list[Step] | None:
    """The shortest way to the last entry from the version with the digest `has` or from an anchor; pure."""
    ways: list[list[Step]] = [[]] if entries and entries[-1].digest == has else []
    after: list[Step] = []
    for place in reversed(range(len(entries))):
        entry = entries[place]
        if entry.whole is not None and (entry, "whole") not in unusable:
            ways.append([(entry, "whole"), *after])
        if entry.difference is None or (entry, "difference") in unusable:
            break
        after = [(entry, "difference"), *after]
        if entry.base == has:
            ways.append(after)
        if place == 0 or entries[place - 1].digest != entry.base:
            break
    return min(ways, key=lambda way: sum(sum(sizes(step)) for step in way), default=None)


def sizes(step: Step) -> tuple[int, ...]:
    return (step[0].whole if step[1] == "whole" else step[0].difference) or ()


def objects_of(snapshot: WeightSnapshot, base: WeightSnapshot | None) -> Iterator[bytes]:
    """What a reader lacks that has the version `base` of the same layout, or none."""
    parts, nbytes = list[bytes | memoryview](), 0
    for index in range(snapshot.manifest.layout.count):
        if not is_left_out(snapshot, base, index):
            raw = Coding.RAW, snapshot.piece(index).data
            coding, data = raw if base is None else difference(snapshot, base, index)
            if parts and nbytes + len(data) > OBJECT_BYTES:
                yield b"".join(parts)
                parts, nbytes = [], 0
            parts += [PIECE.pack(index, coding, len(data)), data]
            nbytes += len(data)
    if parts:
        yield b"".join(parts)


def pieces_of(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    place = 0
    while place < len(data):
        index, coding, length = PIECE.unpack_from(data, place)
        place += PIECE.size + length
        yield index, coding, data[place - length : place]


class Files:
    # The objects of one folder, by their names.

    def __init__(self, address: str) -> None:
        try:
            from fsspec.asyn import AsyncFileSystem
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(os.path.expanduser(address), skip_instance_cache=True)  # noqa: PTH111
        except (ImportError, ValueError) as error:
            remedy = "`pip install 'averaging[storage]'` has what s3:// and https:// need"
            raise ConfigError(f"{address}: {error}; {remedy}") from None
        self._is_store = isinstance(self._fs, AsyncFileSystem)  # an object that is written appears there as a whole
        self.address = re.sub(r"//[^/@]*@", "//", address).rstrip("/")  # without a password

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def read(self, name: str) -> bytes | None:
        try:
            data: bytes = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return data

    async def fetch(self, name: str, seconds: float) -> bytes | None:
        """The same in an event loop; StateError if the storage fails, or takes longer."""
        try:
            async with asyncio.timeout(seconds):
                if not self._is_store:
                    return await in_thread(lambda: self.read(name))
                reading = asyncio.run_coroutine_threadsafe(self._fs._cat_file(self._path(name)), self._fs.loop)
                data: bytes = await asyncio.wrap_future(reading)
                return data
        except FileNotFoundError:
            return None
        except Exception as error:  # each kind of storage has its own
            raise StateError(f"{self.address}/{name} was not read: {str(error) or type(error).__name__}") from None

    def index(self, data: bytes | None) -> Index:
        try:
            return msgspec.json.decode(data, type=Index) if data else Index()
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise StateError(f"{self.address}/{INDEX} is damaged: {error}; publish into another folder") from None

    def write(self, objects: dict[str, bytes]) -> None:
        if self._is_store:
            self._fs.pipe({self._path(name): data for name, data in objects.items()})
            return
        for path, data in ((self._path(name), data) for name, data in objects.items()):
            temporary = f"{path}.{secrets.token_hex(4)}.tmp"
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, path)

    def create(self, name: str, data: bytes) -> None:
        """Writes an object that is not there; an error of the storage if by now it is."""
        if not self._is_store:
            self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(self._path(name), data, mode="create")

    def names(self) -> list[str]:
        self._fs.invalidate_cache()
        return [str(path).rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]

    def remove(self, names: Iterable[str]) -> None:
        if paths := [self._path(name) for name in names]:
            self._fs.rm(paths)


class VersionFolder:
    # A folder that is followed, as a publisher is through `PublisherLink`.
    is_local = False

    def __init__(self, address: str, stall_timeout: float, max_bytes: int) -> None:
        self._files, self._max_bytes = Files(address), max_bytes
        self.endpoint = self._files.address
        self._seconds = stall_timeout + OBJECT_BYTES / LEAST_RATE  # for one object
        self._entries: tuple[StoredVersion, ...] = ()
        self._unusable: set[Step] = set()  # objects that are damaged or missing
        self._last: Step | None = None

    async def announcements(self, run_id: str) -> AsyncGenerator[WeightManifest | None, None]:
        """The newest version, and each that is newest at a later look; None while there is none."""
        announced: StoredVersion | None = None
        while True:
            index = self._files.index(await self._files.fetch(INDEX, self._seconds))
            if run_id and index.run and run_id != index.run:
                reason = f"the versions belong to run {index.run[:64]!r}, not to {run_id!r}; give both the same run id"
                raise CallRefusedError(self.endpoint, reason, RefusalCause.WRONG_RUN)
            self._entries, newest = index.versions, next(reversed(index.versions), None)
            if newest is None or newest != announced:
                yield None if newest is None else await self._manifest((newest, "whole"))
                announced = newest
            await asyncio.sleep(POLL_SECONDS)

    async def catch_up(
        self, manifest: WeightManifest, base: WeightSnapshot | None, counting: Callable[[Incoming], Callable[[], None]]
    ) -> WeightSnapshot | None:
        """Receives the versions between `base` and an announced one; returns that to which it is a difference."""
        entries = [entry for entry in self._entries if entry.version <= manifest.version]
        steps = route(entries, "" if base is None else base.manifest.digest.hex(), self._unusable)
        if steps is None or entries[-1].digest != manifest.digest.hex():
            self._unusable.clear()
            raise StateError(f"{self.endpoint} does not have all that version {manifest.version} needs")
        self._last = next(reversed(steps), None)
        for step in steps[:-1]:
            incoming = Incoming(await self._manifest(step), base)
            await self._receive(step, incoming, counting(incoming))
            base = incoming.finish()
        return base

    async def receive(self, incoming: Incoming, arrived: Callable[[], None]) -> None:
        """Receives the announced version; StateError if the storage does not deliver it."""
        if self._last is not None:  # else its content is that of the version before
            await self._receive(self._last, incoming, arrived)

    def _damaged(self, step: Step, reason: object) -> StateError:
        self._unusable.add(step)  # from now on another way is taken, if there is one
        return StateError(f"{self.endpoint}/{step[0].name}: {reason}")

    async def _receive(self, step: Step, incoming: Incoming, arrived: Callable[[], None]) -> None:
        objects = enumerate(sizes(step))

        async def lane() -> None:
            for number, nbytes in objects:
                await self._take(step, number, nbytes, incoming)
                arrived()

        await all_of([lane() for _ in range(LANES)])
        if not incoming.complete:
            raise self._damaged(step, f"{len(incoming.missing())} pieces are missing")

    async def _take(self, step: Step, number: int, nbytes: int, incoming: Incoming) -> None:
        backoff, name = Backoff(MIN_PAUSE, MAX_PAUSE), f"{step[0].name}.{step[1]}.{number}"
        for left in reversed(range(TRIES)):
            try:
                data = await self._files.fetch(name, self._seconds)
                if data is None:
                    raise ProtocolViolationError("it was removed; if that happens often, raise the publisher's keep")
                if len(data) != nbytes:
                    raise ProtocolViolationError(f"it is cut off: {len(data)} of {nbytes} bytes")
                for piece in pieces_of(data):
                    incoming.add(*piece)  # which verifies it
                return
            except (StateError, ProtocolViolationError, struct.error) as error:
                if not left:
                    raise error if isinstance(error, StateError) else self._damaged(step, error) from None
                logger.warning("%s/%s: %s; reading it again", self.endpoint, name, error)
            await asyncio.sleep(backoff.next_delay())

    async def _manifest(self, step: Step) -> WeightManifest:
        data = await self._files.fetch(f"{step[0].name}.manifest", self._seconds)
        try:
            manifest = read_version(wire.Version.FromString(data or b""), self._max_bytes)
        except (DecodeError, ProtocolViolationError) as error:
            raise self._damaged(step, f"the manifest has {error}") from None
        if manifest is None or (manifest.version, manifest.digest.hex()) != (step[0].version, step[0].digest):
            raise self._damaged(step, "the manifest is missing, or of another version")
        return replace(manifest, opened=b"", shards=())


class Lease:
    # The right to write into a folder. No clock of another machine is trusted: a lease is stale once this process has
    # seen it unchanged for long enough.

    def __init__(self, files: Files) -> None:
        self._files, self._id, self._held = files, secrets.token_hex(8).encode(), False
        self._renewed, self._other = 0.0, (b"", 0.0)  # what another publisher has written, and when it was first seen

    def hold(self, *, check: bool = False) -> bool:
        """Takes the lease, or renews it if that is due or `check`; returns whether it was taken anew.

        Raises:
            StateError: another publisher has it.
        """
        now = time.monotonic()
        if self._held and not check and now < self._renewed + RENEW_SECONDS:
            return False
        there, held, self._held = self._files.read(LEASE), self._held, False
        text = b"%s %s %d %d" % (self._id, socket.gethostname().encode(), os.getpid(), time.time_ns())
        if there is None:
            self._files.create(LEASE, msgspec.json.encode(text.decode()))
        else:
            if self._id not in there:
                self._check_stale(there, now)
                held = False
            self._files.write({LEASE: msgspec.json.encode(text.decode())})
        self._held, self._renewed = True, now
        return there is None or not held

    def _check_stale(self, there: bytes, now: float) -> None:
        if there != self._other[0]:
            self._other = there, now
        address, holder = self._files.address, b" ".join(there[:200].split(b" ")[1:3]).decode(errors="replace")
        if now - self._other[1] < LEASE_SECONDS:
            raise StateError(
                f"another publisher writes to {address} (host and process: {holder}); close it, or give one of them "
                f"another folder; if it has died, this one goes on {LEASE_SECONDS:g} s later"
            )
        logger.warning("%s: the lease of %s, which does not renew it, is taken over", address, holder)

    def release(self) -> None:
        if self._held and not self.hold(check=True):
            self._files.remove([LEASE])
        self._held = False


class FolderWriter:
    """Writes versions into a folder, in a thread of its own. A newer one replaces one that still waits.

    What fails is tried again until the storage takes it; the reason is logged once.
    """

    def __init__(self, address: str, keep: int) -> None:
        if not is_count(keep) or keep < 1:
            raise ConfigError(f"keep must be a whole number, at least 1, not {keep!r}")
        self._files, self._keep = Files(address), keep  # anchors
        self._lease = Lease(self._files)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: tuple[WeightSnapshot, str] | None = None
        self._closing = self._stopped = self._failed = False
        self._entries: tuple[StoredVersion, ...] = ()
        self._base: WeightSnapshot | None = None  # the content of the last entry
        self._done: set[str] = set()  # objects of the version that is being written
        self._failure = ""

    def write_soon(self, snapshot: WeightSnapshot, run_id: str) -> None:
        with self._changed:
            self._waiting, self._closing, self._stopped = (snapshot, run_id), False, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="the writer of versions", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, timeout: float) -> None:
        with self._changed:
            self._closing, thread = True, self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                with self._changed:
                    self._stopped = True
                    self._changed.notify()
                reason = self._failure or "the storage is slow; close the publisher with a longer timeout"
                raise StateError(f"the newest version was not written to {self._files.address}: {reason}")

    def _run(self) -> None:
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing, RENEW_SECONDS)
                if (waiting := self._waiting) is None and self._closing:
                    with suppress(Exception):  # it is taken over later
                        self._lease.release()
                    self._thread = None
                    return
            try:
                if waiting is not None:
                    self._write(*waiting)
                elif self._lease.hold():
                    self._failed = True  # others may have written meanwhile
            except Exception as error:  # each kind of storage has its own
                if (reason := str(error) or type(error).__name__) != self._failure:
                    logger.error("%s is not written to: %s; trying again", self._files.address, reason)
                self._failure, self._failed = reason, True
                with self._changed:
                    if self._changed.wait_for(lambda: self._stopped, backoff.next_delay()):
                        self._thread = None
                        return
            else:
                self._failure = ""
                backoff.reset()
                with self._changed:
                    self._waiting = None if self._waiting is waiting else self._waiting

    def _write(self, snapshot: WeightSnapshot, run_id: str) -> None:
        manifest = replace(snapshot.manifest, opened=b"")
        entry = StoredVersion(manifest.version, manifest.digest.hex())
        if self._lease.hold() or self._failed:
            self._begin(entry, run_id)
        newest = next(reversed(self._entries), None)
        if newest is not None and newest.digest == entry.digest:
            self._base = snapshot
        if newest is not None and newest.version >= entry.version:
            if newest.digest != entry.digest:
                text = "%s has version %d, so version %d is not written; give another folder, or empty it"
                logger.warning(text, self._files.address, newest.version, entry.version)
            return
        self._put({f"{entry.name}.manifest": version_message(manifest).SerializeToString()})
        entry = self._put_content(entry, snapshot, "" if newest is None else newest.digest)
        entries = (*self._entries, entry)
        anchors = [place for place, each in enumerate(entries) if each.whole is not None]
        kept = entries[anchors[-self._keep :][0] :]
        self._put({INDEX: msgspec.json.encode(Index(1, run_id, kept))})
        self._entries, self._base, self._done = kept, snapshot, set()
        logger.info("wrote version %d to %s", entry.version, self._files.address)
        if len(kept) < len(entries):
            self._collect()

    def _begin(self, entry: StoredVersion, run_id: str) -> None:
        """Reads what is there, and removes what a publisher that died or failed has left."""
        index = self._files.index(self._files.read(INDEX))
        if index.run and run_id and index.run != run_id:
            raise StateError(f"it has versions of run {index.run!r}; give run {run_id!r} another folder")
        self._entries, last = index.versions, next(reversed(index.versions), None)
        if self._base is not None and (last is None or last.digest != self._base.manifest.digest.hex()):
            self._base = None
        self._done = {name for name in self._done if name.startswith(f"{entry.name}.")}
        self._collect()
        self._failed = False

    def _put(self, objects: dict[str, bytes]) -> None:
        if self._lease.hold(check=INDEX in objects):
            raise StateError("the lease was lost meanwhile")
        if missing := {name: data for name, data in objects.items() if name not in self._done}:
            self._files.write(missing)
            self._done |= missing.keys()

    def _put_content(self, entry: StoredVersion, snapshot: WeightSnapshot, base: str) -> StoredVersion:
        """Writes the difference to the version before, unless it is hardly shorter, and all if an anchor is due."""
        most, since = ANCHOR_SHARE * snapshot.manifest.layout.nbytes, list[int]()
        for each in reversed(self._entries):
            if each.whole is not None:
                break
            since.append(sum(each.difference or ()))
        if self._base is not None and self._base.manifest.layout == snapshot.manifest.layout:
            objects = list(objects_of(snapshot, self._base))
            since.append(sum(map(len, objects)))
            if since[-1] <= most:
                entry = msgspec.structs.replace(
                    entry, difference=self._put_all(entry, "difference", objects), base=base
                )
        if entry.difference is None or len(since) >= ANCHOR_EVERY or sum(since) > most:
            entry = msgspec.structs.replace(entry, whole=self._put_all(entry, "whole", objects_of(snapshot, None)))
        return entry

    def _put_all(self, entry: StoredVersion, kind: str, objects: Iterable[bytes]) -> tuple[int, ...]:
        nbytes, objects = list[int](), iter(objects)
        while some := list(islice(objects, LANES)):
            self._put({f"{entry.name}.{kind}.{number}": data for number, data in enumerate(some, len(nbytes))})
            nbytes += map(len, some)
        return tuple(nbytes)

    def _collect(self) -> None:
        """Removes the objects of versions that are not in the index, but that which is being written."""
        names = {entry.name for entry in self._entries}
        found = (OF_VERSION.fullmatch(name) for name in self._files.names())
        self._files.remove([each[0] for each in found if each and each[1] not in names and each[0] not in self._done])
