"""The versions that this process holds, and how their pieces are sent to others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import cast

from averaging.common import HostQuota
from averaging.errors import BusyError, StateError
from averaging.rpc import RpcMethod, rpc_caller
from averaging.tensors import in_thread
from averaging.weights.differences import Coding, encode
from averaging.weights.layout import WeightLayout, indices_of
from averaging.weights.snapshot import WeightPieces, WeightSnapshot
from averaging.wire import weights_pb2 as wire

_PATH = "/averaging.weights.v1.Weights"
FOLLOW = RpcMethod(f"{_PATH}/Follow", wire.FollowRequest, wire.Version, replies_stream=True, max_request_bytes=4096)
FETCH = RpcMethod(f"{_PATH}/Fetch", wire.FetchRequest, wire.Reply, replies_stream=True, max_request_bytes=1 << 20)
DESCRIBE = RpcMethod(
    f"{_PATH}/Describe", wire.DescribeRequest, wire.Digests, replies_stream=True, max_request_bytes=4096
)

# Calls that are served at once, each with the memory of two messages; a follower makes up to four. More are refused,
# and their callers try again.
MAX_SENDING, MAX_SENDING_PER_HOST = 128, 64

BATCH_BYTES, MESSAGE_BYTES = 4 << 20, 1 << 20  # of pieces that are encoded at once in a thread, and sent together

# A caller whose pieces are still on their way here gets an empty message after this time, and knows that this process
# lives.
WAITING_SECONDS = 0.25

# Versions that are sent to their end although newer ones have pushed them out. Without one, followers that receive
# slower than versions come would never have any; with more, these could take any amount of memory.
MOST_OUTDATED = 2

Encoded = tuple[Coding, bytes]


class Changes:
    """Wakes coroutines in any event loops when something has changed, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def happened(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for loop, woken in waiting:
            with suppress(RuntimeError):  # its event loop is closed
                loop.call_soon_threadsafe(woken.set)

    async def wait(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `condition` is true, and returns whether it is. It is called in this event loop."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    waiter = asyncio.get_running_loop(), asyncio.Event()
                    with self._lock:
                        self._waiting.add(waiter)
                    try:
                        if condition():  # only now, so that no change is missed
                            return True
                        await waiter[1].wait()
                    finally:
                        with self._lock:
                            self._waiting.discard(waiter)
        except TimeoutError:
            return condition()


class Store:
    """The newest version, `bases` earlier ones for differences, and the one that is being received or published.

    Versions are added from any thread. They are sent in one event loop. `changes` happen when a version is added, and
    when pieces have arrived.
    """

    def __init__(self, bases: int, changes: Changes | None = None) -> None:
        self._bases = bases
        self._kept: tuple[WeightSnapshot, ...] = ()  # newest first; replaced, never changed
        self._incoming: WeightPieces | None = None
        self._encoded: dict[tuple[bytes, bytes], dict[int, Encoded]] = {}  # by base and version
        self._encoding = asyncio.Lock()
        self._quota = HostQuota(MAX_SENDING, MAX_SENDING_PER_HOST)
        self._sending: dict[object, WeightPieces] = {}  # by call
        self.changes = changes or Changes()
        self.sent = 0  # bytes of encoded pieces

    @property
    def newest(self) -> WeightSnapshot | None:
        return next(iter(self._kept), None)

    @property
    def latest(self) -> WeightPieces | None:  # also if it is still being received or published
        return self._incoming or self.newest

    def find(self, name: bytes) -> WeightPieces | None:
        incoming = self._incoming
        for pieces in self._kept if incoming is None else (*self._kept, incoming):
            manifest = pieces.manifest
            if name and (name == manifest.opened or (manifest.is_described and name == manifest.digest)):
                return pieces
        return None

    def complete(self, digest: bytes) -> WeightSnapshot | None:
        return next((snapshot for snapshot in self._kept if snapshot.manifest.digest == digest), None)

    def add(self, snapshot: WeightSnapshot) -> None:
        self._kept = (snapshot, *self._kept[: self._bases])
        self.changes.happened()

    def arrange(self, layout: WeightLayout) -> None:
        # Differences need versions in the same order.
        self._kept = tuple(snapshot.arranged(layout) for snapshot in self._kept)

    def receiving(self, incoming: WeightPieces | None) -> None:
        self._incoming = incoming
        self.changes.happened()

    def difference_bytes(self) -> int:
        # Of the last version of which differences were sent; 0 if there is none.
        pieces = next(reversed(self._encoded.values()), {})
        return sum(len(data) for _, data in pieces.values())

    async def send(self, request: wire.FetchRequest) -> AsyncGenerator[wire.Reply, None]:
        """Sends the requested pieces, those that are not here yet as soon as they arrive."""
        source, host = self.get(request.name), rpc_caller().host
        indices = indices_of(((each.first, each.count) for each in request.pieces), source.manifest.layout.count)
        base = self.complete(request.base)
        if base is not None and base.manifest.layout != source.manifest.layout:
            base = None
        if not self._quota.take(host):
            raise BusyError(f"there are {len(self._sending)} calls for weights here; try again later")
        call = object()
        self._sending[call] = source
        try:
            done = 0
            while done < len(indices):
                batch = _available(source, indices, done)
                if batch:
                    wanted = [index for index in batch if not is_left_out(source, base, index)]
                    replies = _grouped(wanted, await self._encode(source, base, request.base, wanted))
                # The next piece is not here. It comes only while this version is being received.
                elif source is not self._incoming and not source.has(indices[done]):
                    raise StateError("the version that was being received here has been given up; ask another source")
                elif await self.changes.wait(
                    lambda: source is not self._incoming or source.has(indices[done]),  # noqa: B023
                    WAITING_SECONDS,
                ):
                    continue
                else:
                    replies = [wire.Reply()]
                for reply in replies:
                    self.sent += sum(len(piece.data) for piece in reply.pieces)
                    yield reply
                    if self._is_outdated(source):
                        raise BusyError("this version is not kept any more; ask for the newest one")
                done += len(batch)
        finally:
            del self._sending[call]
            self._quota.leave(host)

    async def describe(self, name: bytes, first: int) -> AsyncGenerator[wire.Digests, None]:
        """Sends the digests of a version from the piece `first` on, as they become known."""
        source, sent = self.get(name), first
        while True:
            given_up = source is not self._incoming  # before it is looked at, since both are set after its last digest
            complete, known = source.manifest.is_described, source.digests[sent:]
            if not known and complete:
                yield wire.Digests(digest=source.manifest.digest)
                return
            if not known and given_up:
                raise StateError("the version has been given up; ask for the newest one")
            yield wire.Digests(pieces=b"".join(known))  # without any it says that this process lives
            sent += len(known)
            await self.changes.wait(
                lambda: source is not self._incoming or len(source.digests) > sent,  # noqa: B023
                WAITING_SECONDS,
            )

    def get(self, name: bytes) -> WeightPieces:
        pieces = self.find(name)
        if pieces is None:
            raise StateError(f"no version with the digest {name.hex()[:8]} is here; ask for the newest one")
        return pieces

    def _is_outdated(self, source: WeightPieces) -> bool:
        """Whether a version that newer ones have pushed out is sent no further."""
        outdated = {each.manifest.version for each in self._sending.values() if self.find(each.manifest.name) is None}
        # The oldest are kept, whose followers have received most of them.
        return source.manifest.version in sorted(outdated)[MOST_OUTDATED:]

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
            raw = Coding.RAW
            return [(raw, source.piece(i).tobytes()) if known[i][0] is raw else known[i] for i in batch]


def is_left_out(source: WeightPieces, base: WeightSnapshot | None, index: int) -> bool:
    return source.repeats(index) or (base is not None and base.digests[index] == source.digests[index])


def _available(source: WeightPieces, indices: Sequence[int], place: int) -> list[int]:
    most = max(1, BATCH_BYTES // source.manifest.layout.piece_bytes)
    batch: list[int] = []
    for index in islice(indices, place, place + most):
        if not source.has(index):
            break
        batch.append(index)
    return batch


def _differences(source: WeightPieces, base: WeightSnapshot, todo: Sequence[int]) -> dict[int, Encoded]:
    """Encodes pieces. Those that are sent as they are get no bytes, since they are here anyway."""
    differences = {}
    for index in todo:
        coding, data = difference(source, base, index)
        differences[index] = (coding, b"" if coding is Coding.RAW else data)
    return differences


def difference(source: WeightPieces, base: WeightSnapshot, index: int) -> Encoded:
    layout = source.manifest.layout
    return encode(source.piece(index), base.piece(index), layout.buckets[layout.pieces[index].bucket].itemsize)


def _grouped(batch: Iterable[int], encoded: Iterable[Encoded]) -> list[wire.Reply]:
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
