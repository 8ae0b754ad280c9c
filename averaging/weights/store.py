"""The versions that this process holds, and how their pieces are sent to others."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import cast

from averaging.errors import BusyError, StateError
from averaging.rpc import rpc_caller
from averaging.tensors import in_thread
from averaging.weights.differences import Coding, encode
from averaging.weights.layout import MAX_WARM_BYTES, WeightLayout, indices_of
from averaging.weights.places import Place, SlotTable
from averaging.weights.snapshot import WeightPieces, WeightSnapshot
from averaging.wire import weights_pb2 as wire

BATCH_BYTES = 4 << 20
"""Bytes of the pieces that are encoded at once in a thread."""

MESSAGE_BYTES = 1 << 20
"""Pieces are sent together up to this size."""

WAITING_SECONDS = 0.25
"""A caller that waits for pieces that are still on their way here gets an empty message after this time."""

MAX_SENDING, MAX_SENDING_PER_HOST, MAX_SENDING_PER_CONNECTION = 64, 48, 8
"""Calls that are served at once; a follower makes up to four, each on a connection of its own."""

UNREAD_SECONDS = 5.0
"""A caller that does not read a message within this time gives way to others."""

FILLER = bytes(256 << 10)

Encoded = tuple[Coding, bytes]


class Changes:
    """Wakes coroutines in any event loops when something has changed, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[Callable[[], object]] = set()

    def happened(self) -> None:
        """Wakes all that wait."""
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for wake in waiting:
            try:
                wake()
            except RuntimeError:  # its event loop is closed
                continue

    async def wait(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `condition` is true, and returns whether it is. It is called in this event loop."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                while True:
                    woken = asyncio.Event()

                    def wake(woken: asyncio.Event = woken) -> None:
                        loop.call_soon_threadsafe(woken.set)

                    with self._lock:
                        self._waiting.add(wake)
                    try:
                        if condition():  # only now, so that no change is missed
                            return True
                        await woken.wait()
                    finally:
                        with self._lock:
                            self._waiting.discard(wake)
        except TimeoutError:
            return condition()


class Store:
    """The newest version, some earlier ones as bases of differences, and the one that is being received.

    Versions are added from any thread. They are sent in one event loop.

    Args:
        bases: number of versions before the newest one that are kept.
        max_bytes: earlier versions are dropped if all together have more; None for no limit.
        changes: shared with other stores; None for its own.
        retain: returns the versions to keep besides the first ones, of all that are here. What is not kept is sent no
            further;
            None if it is sent to its end.

    Attributes:
        changes: happen when a version is added, and when pieces have arrived.
        sent: bytes of encoded pieces sent so far.
    """

    def __init__(
        self,
        bases: int,
        max_bytes: int | None = None,
        changes: Changes | None = None,
        retain: Callable[[Collection[int], Collection[int]], Collection[int]] | None = None,
    ) -> None:
        self._bases, self._max_bytes, self._retain = bases, max_bytes, retain
        self._kept: tuple[WeightSnapshot, ...] = ()  # newest first; replaced, never changed
        self._incoming: WeightPieces | None = None
        self._encoded: dict[tuple[bytes, bytes], dict[int, Encoded]] = {}
        self._encoding = asyncio.Lock()
        self._places = SlotTable("calls for weights", MAX_SENDING, MAX_SENDING_PER_HOST, MAX_SENDING_PER_CONNECTION)
        self.changes = changes or Changes()
        self.sent = 0

    @property
    def newest(self) -> WeightSnapshot | None:
        """The newest complete version."""
        return next(iter(self._kept), None)

    @property
    def latest(self) -> WeightPieces | None:
        """The version that is being received or described, else the newest complete one."""
        return self._incoming or self.newest

    def is_newer_than(self, version: int) -> bool:
        """Whether `latest` has a higher number."""
        latest = self.latest
        return latest is not None and latest.manifest.version > version

    def holds(self, name: bytes) -> bool:
        """Whether a version is here, completely or in part."""
        return self.find(name) is not None

    def find(self, name: bytes) -> WeightPieces | None:
        """The version of that name or digest."""
        incoming = self._incoming
        for pieces in self._kept if incoming is None else (*self._kept, incoming):
            manifest = pieces.manifest
            if name and (name == manifest.opened or (manifest.is_described and name == manifest.digest)):
                return pieces
        return None

    def complete(self, digest: bytes) -> WeightSnapshot | None:
        """The complete version with that digest, if it is here."""
        return next((snapshot for snapshot in self._kept if snapshot.manifest.digest == digest), None)

    def add(self, snapshot: WeightSnapshot) -> None:
        """Makes a version the newest one."""
        kept, total = [snapshot], snapshot.manifest.layout.nbytes
        usual = {snapshot.manifest.version, *(each.manifest.version for each in self._kept[: self._bases])}
        here = [each.manifest.version for each in self._kept]
        retained = self._retain(usual, here) if self._retain else ()
        for place, earlier in enumerate(self._kept):
            if place >= self._bases and earlier.manifest.version not in retained:
                continue
            total += _own_bytes(earlier, kept[-1])
            if self._max_bytes is not None and total > self._max_bytes:
                break
            kept.append(earlier)
        self._kept = tuple(kept)
        self.changes.happened()

    @property
    def usual(self) -> set[int]:
        """The numbers of the versions that are here without `retain`."""
        pieces = [self._incoming, *self._kept[: 1 + self._bases]]
        return {each.manifest.version for each in pieces if each is not None}

    def with_number(self, version: int) -> WeightPieces | None:
        """The version of that number, if it is here."""
        pieces = (self._incoming, *self._kept)
        return next((each for each in pieces if each is not None and each.manifest.version == version), None)

    def arrange(self, layout: WeightLayout) -> None:
        """Brings the tensors of all versions into the order of a layout, so that differences to them are possible."""
        self._kept = tuple(snapshot.arranged(layout) for snapshot in self._kept)

    def receiving(self, incoming: WeightPieces | None) -> None:
        """Sets the version that is being received or described, so that its pieces are handed on as they come."""
        self._incoming = incoming
        self.changes.happened()

    async def send(self, request: wire.FetchRequest, early: float = 0.0) -> AsyncGenerator[wire.Reply, None]:
        """Sends the requested pieces, those that are not here yet as soon as they arrive.

        Args:
            request: the request.
            early: seconds to wait for the announcement of an unknown version.

        Raises:
            BusyError: too many callers are served, or another one got the place because this one does not read.
            StateError: this process has no such version, or has given up receiving it.
            ProtocolViolationError: the request is malformed.
        """
        clock = asyncio.get_running_loop().time
        place = Place(rpc_caller())
        self._places.enter(place, clock())
        try:
            if self._incoming is None and not self.holds(request.name):
                # The caller may have been announced a version sooner than this process.
                await self.changes.wait(lambda: self._incoming is not None or self.holds(request.name), early)
            source = self._find(request.name)
            indices = indices_of(((each.first, each.count) for each in request.pieces), source.manifest.layout.count)
            base = self.complete(request.base)
            if base is not None and base.manifest.layout != source.manifest.layout:
                base = None
            done = 0
            while done < len(indices):
                batch = _available(source, indices, done)
                replies = [wire.Reply()]
                if batch:
                    wanted = [index for index in batch if not _is_left_out(source, base, index)]
                    replies = _grouped(wanted, await self._encode(source, base, request.base, wanted))
                # The next piece is not here. It comes only while this version is being received; the follower that
                # waits for it is told by an empty message that this source lives.
                elif not source.has(indices[done]) and self._is_given_up(source):
                    raise StateError("the version that was being received here has been given up; ask another source")
                elif source.has(indices[done]) or await self._await_piece(source, indices[done]):
                    continue
                for reply in replies:
                    self.sent += sum(len(piece.data) for piece in reply.pieces)
                    place.due = clock() + UNREAD_SECONDS
                    yield reply
                    place.due = math.inf
                    if place.lost:
                        raise BusyError("other callers get weights here, because you read too slowly; ask again")
                    if self._retain is not None and not self.holds(request.name):
                        raise BusyError("this version is not kept any more; ask for the newest one")
                done += len(batch)
        finally:
            self._places.leave(place)

    def difference_bytes(self) -> int:
        """Length of the last version of which differences were sent; 0 if there is none."""
        pieces = next(reversed(self._encoded.values()), {})
        return sum(len(data) for _, data in pieces.values())

    async def warm(self, request: wire.WarmRequest) -> AsyncGenerator[wire.Filler, None]:
        """Sends bytes that mean nothing.

        Raises:
            BusyError: too many callers are served.
        """
        clock = asyncio.get_running_loop().time
        place = Place(rpc_caller(), rank=-1)
        self._places.enter(place, clock())
        try:
            for start in range(0, min(request.bytes, MAX_WARM_BYTES), len(FILLER)):
                place.due = clock() + UNREAD_SECONDS
                yield wire.Filler(data=FILLER[: request.bytes - start])
                if place.lost:
                    raise BusyError("other callers get weights here")
        finally:
            self._places.leave(place)

    async def describe(self, name: bytes, first: int) -> AsyncGenerator[wire.Digests, None]:
        """Sends the digests of a version from the piece `first` on, as they become known.

        Raises:
            StateError: this process has no such version, or has given it up.
        """
        source, sent, count = self._find(name), first, 0
        while sent < (count := source.manifest.layout.count) or not self._is_complete(name):
            given_up = self._is_given_up(source)
            known = source.digests[sent:]  # only now, since the last ones come before it is complete
            if given_up and len(known) < count - sent:
                raise StateError("the version has been given up; ask for the newest one")
            yield wire.Digests(pieces=b"".join(known))
            sent += len(known)
            await self._await(source, lambda: len(source.digests) > sent)  # noqa: B023
        complete = self._find(name)
        yield wire.Digests(digest=complete.manifest.digest)

    def _is_complete(self, name: bytes) -> bool:
        return self._find(name).manifest.is_described

    def _find(self, name: bytes) -> WeightPieces:
        pieces = self.find(name)
        if pieces is None:
            raise StateError(f"no version with the digest {name.hex()[:8]} is here; ask for the newest one")
        return pieces

    def _is_given_up(self, source: WeightPieces) -> bool:
        return source is not self._incoming

    async def _await_piece(self, source: WeightPieces, index: int) -> bool:
        """Waits for a piece, or until it will not come. Returns False after `WAITING_SECONDS`."""
        return await self._await(source, lambda: source.has(index))

    async def _await(self, source: WeightPieces, condition: Callable[[], bool]) -> bool:
        return await self.changes.wait(lambda: source is not self._incoming or condition(), WAITING_SECONDS)

    async def _encode(
        self, source: WeightPieces, base: WeightSnapshot | None, named: bytes, batch: Sequence[int]
    ) -> list[Encoded]:
        if base is None:
            return [(Coding.RAW, source.piece(index).tobytes()) for index in batch]
        name = source.manifest.name
        async with self._encoding:  # so that two callers do not encode the same
            known = self._encoded.get((named, name))
            if known is None:
                newest = self.newest
                current = {name, newest.manifest.name if newest else b""}
                self._encoded = {pair: pieces for pair, pieces in self._encoded.items() if pair[1] in current}
                known = self._encoded.setdefault((named, name), {})
            todo = [index for index in batch if index not in known]
            known.update((index, got) for index in todo if (got := source.encoded(index, named)) is not None)
            todo = [index for index in todo if index not in known]
            if todo:
                known.update(await in_thread(lambda: _differences(source, base, todo)))
            return [_or_raw(known[index], source, index) for index in batch]


def _own_bytes(earlier: WeightSnapshot, later: WeightSnapshot) -> int:
    """Bytes of a version that it does not share with the next one."""
    shared = {id(buffer) for buffer in later.buffers}
    return sum(len(buffer) for buffer in earlier.buffers if id(buffer) not in shared)


def _is_left_out(source: WeightPieces, base: WeightSnapshot | None, index: int) -> bool:
    return source.repeats(index) or (base is not None and base.digests[index] == source.digests[index])


def _available(source: WeightPieces, indices: Sequence[int], place: int) -> list[int]:
    """The next indices whose pieces are there, up to `BATCH_BYTES`."""
    most = max(1, BATCH_BYTES // source.manifest.layout.piece_bytes)
    batch: list[int] = []
    for index in islice(indices, place, place + most):
        if not source.has(index):
            break
        batch.append(index)
    return batch


def _differences(source: WeightPieces, base: WeightSnapshot, todo: Sequence[int]) -> dict[int, Encoded]:
    """Encodes pieces. Those that are sent as they are get no bytes, since they are here anyway."""
    layout, differences = source.manifest.layout, {}
    for index in todo:
        itemsize = layout.buckets[layout.pieces[index].bucket].itemsize
        coding, data = encode(source.piece(index), base.piece(index), itemsize)
        differences[index] = (coding, b"" if coding is Coding.RAW else data)
    return differences


def _or_raw(encoded: Encoded, source: WeightPieces, index: int) -> Encoded:
    return encoded if encoded[0] is not Coding.RAW else (Coding.RAW, source.piece(index).tobytes())


def _grouped(batch: Iterable[int], encoded: Iterable[Encoded]) -> list[wire.Reply]:
    """Messages of about `MESSAGE_BYTES`."""
    replies: list[wire.Reply] = []
    size = 0
    for index, (coding, data) in zip(batch, encoded, strict=True):
        if not replies or size + len(data) > MESSAGE_BYTES:
            replies.append(wire.Reply())
            size = 0
        replies[-1].pieces.append(
            wire.Piece(index=index, coding=cast("wire.Piece.Coding.ValueType", coding.value), data=data)
        )
        size += len(data)
    return replies
