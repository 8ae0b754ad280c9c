"""The interface between a peer and the network: what a peer serves, and how it calls other peers.

There are two implementations: `transport.grpc` with real sockets, and `transport.memory` in one process, optionally on
virtual time. The rest of the package does not depend on which one is used.

On both sides a stream is an async generator. The caller closes it (`contextlib.aclosing`) to end the call. If the
caller disappears, the transport closes the callee's generator, which gets a `GeneratorExit` or a `CancelledError` at
its `yield` or `await`. The end of the file is what both lanes of a stream share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from averaging.errors import AveragingError, CallRefusedError, PeerUnreachableError, ProtocolViolationError
from averaging.protocol import (
    AveragingData,
    Digest,
    DownloadData,
    ExchangeReply,
    JoinRequest,
    MessageFromLeader,
    Record,
    Refusal,
    Resume,
    Rumour,
)
from averaging.receipts import PeerStatus, Watched
from averaging.tensors import Schema


@dataclass(frozen=True, slots=True)
class Lane:
    """How a stream of parts travels."""

    name: str  # `grpc`; or `direct` for a connection beside gRPC, `sealed` if that is encrypted
    reason: str = ""  # text that says why it is not the direct lane


class AveragingService(Protocol):
    """The calls about averaging that a peer serves."""

    def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        """Yields the verdict on the request, then the group or the reason why there is none."""

    def aggregate_part(self, messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        """Reads a sender's parts in order and yields their averages in the same order.

        It asks for a second message only after a round has accepted the sender. The transport relies on that: until
        then it bounds what the sender can make it hold.
        """

    def download_state(self, resume: Resume | None, caller: str) -> AsyncGenerator[DownloadData, None]:
        """Yields the last committed state in chunks; nothing if it is not shared.

        The part that the caller has already, `resume`, is skipped if the states agree. `caller` is the calling host.
        """

    def get_status(self, receipts: int = 0, after_round: int = 0, peers: bool = False) -> PeerStatus:
        """The identity and present activity of this peer, with its latest `receipts` of rounds after `after_round`.

        It names the known `peers` if it is asked to.
        """

    def get_schema(self) -> Schema:
        """Returns the schema of the tensors that this peer averages."""

    def watch_rounds(self, last: int) -> AsyncGenerator[Watched, None]:
        """Yields the `last` receipts of this peer, and each further one until it leaves."""


class GossipService(Protocol):
    """The calls about discovery that a peer serves.

    Raises:
        CallRefusedError: any method raises it if the caller belongs to another run.
        ProtocolViolationError: any method raises it if the caller violates the protocol.
    """

    def exchange(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        """Yields the records that the caller lacks, and last the ids of those that this peer lacks."""

    async def push(self, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        """Accepts fresh records and forwards them; returns the refused ones."""

    def subscribe(self, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        """Yields the records that the caller lacks, then every fresh record, without end."""

    def list_records(self, key: str) -> tuple[Record, ...]:
        """Returns the records under `key`, or all records if it is empty."""


class Transport(Protocol):
    """One peer's access to the network. All calls name the other peer by its endpoint.

    Raises:
        PeerUnreachableError: any call: there is no answer, or the connection was lost.
        CallRefusedError: any call: the peer answered with an error.
        ProtocolViolationError: any call: the answer is malformed.
    """

    async def bind(self) -> str:
        """Binds the address to listen on, or raises a ListenError; returns this peer's endpoint. Serves nothing yet."""

    async def serve(self, averaging: AveragingService, gossip: GossipService | None) -> None:
        """Starts to serve calls and returns at once."""

    async def close(self, grace: float = 0.0) -> None:
        """Stops serving, after at most `grace` seconds for calls in progress, and closes all connections."""

    def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        """Asks `endpoint` to lead this peer, and yields its answers."""

    def aggregate_part(
        self, endpoint: str, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        """Sends parts to their reducer `endpoint` with the network's backpressure, and yields the replies."""

    def prepare_lane(self, endpoint: str) -> None:
        """Called when this peer may soon send parts to `endpoint`. It returns at once."""

    def lane(self, endpoint: str) -> Lane | None:
        """Returns how the last stream of parts to `endpoint` travelled; None if there is only one way."""

    def download_state(self, endpoint: str, resume: Resume | None = None) -> AsyncGenerator[DownloadData, None]:
        """Downloads the state of `endpoint`. Bytes named by `resume` are skipped if `endpoint` has the same."""

    async def get_schema(self, endpoint: str) -> Schema:
        """Returns the schema of the tensors that `endpoint` averages."""

    def exchange(self, endpoint: str, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        """Synchronizes records with `endpoint`."""

    async def push(self, endpoint: str, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        """Sends fresh records to `endpoint`; returns the refused ones."""

    def subscribe(self, endpoint: str, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        """Yields the fresh records that `endpoint` receives."""


async def is_alive(transport: Transport, endpoint: str) -> bool:
    """Whether a peer answers a call, also with an error. It has no timeout of its own."""
    try:
        await transport.get_schema(endpoint)
    except PeerUnreachableError:
        return False
    except (CallRefusedError, ProtocolViolationError):
        return True  # perhaps other software, but alive
    return True


class CompactedError(AveragingError):
    """A watch cannot go on, because the store has forgotten the changes since its revision: read all keys again."""


class LeaseEndedError(AveragingError):
    """The lease has ended, and with it all that was written under it."""


@dataclass(frozen=True, slots=True)
class StoredValue:
    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class StoredValues:
    """What a range of keys held at one revision."""

    values: tuple[StoredValue, ...]
    revision: int
    complete: bool = True  # whether these are all; False if there are more than the limit


@dataclass(frozen=True, slots=True)
class StoredChanges:
    """Changes under a prefix, in their order."""

    changes: tuple[StoredValue | bytes, ...]  # for each change the new value, or the key alone if it was deleted
    revision: int  # revision of the store; a watch that goes on begins after it


class KeyValueStore(Protocol):
    """One client's access to the store. Reads are linearizable.

    Raises:
        PeerUnreachableError: any method: nobody answers; a write may have taken effect.
        CallRefusedError: any method: the store refuses the call.
    """

    async def grant(self, seconds: float) -> int:
        """Returns a new lease, which ends this long after its last renewal; the store may make it longer."""

    async def keep_alive(self, lease: int) -> bool:
        """Renews a lease; returns False if it has ended."""

    async def revoke(self, lease: int) -> None:
        """Ends a lease, with all that was written under it."""

    async def change(self, changes: Mapping[bytes, bytes | None], lease: int) -> int:
        """Writes values under a lease, and deletes the keys whose value is None, in one step; returns its revision.

        A LeaseEndedError says that there is no such lease any more, and that nothing was changed.
        """

    async def list_values(self, prefix: bytes, limit: int, start: bytes = b"") -> StoredValues:
        """Returns at most `limit` values whose keys begin with `prefix`, in their order, from the key `start` on."""

    def watch(self, prefix: bytes, after: int) -> AsyncGenerator[StoredChanges, None]:
        """Yields each change under `prefix` since the revision `after`, without end. May yield no changes at times."""

    async def close(self) -> None:
        """Ends the connections to the store."""


LINGER_SECONDS = 0.5
"""Seconds for which a stream is read that was refused: some callers lose the reply if one of their writes fails."""

Request = TypeVar("Request")


MESSAGES_AT_ONCE = 16
"""Messages that are sent before other tasks of the event loop get a chance: small ones may never have to wait."""


class Upload(Generic[Request]):
    """Sends messages with the network's backpressure, in a task that runs `run`, until they or the call end.

    `encode` returns the arguments of `send` for a message; `finish` is called after the last one, and `abort` if
    `messages` raises. An error in `lost` means that the call has ended: the reader of the replies gets the reason.
    """

    def __init__(
        self,
        messages: AsyncIterator[Request],
        encode: Callable[[Request], tuple[Any, ...]],
        send: Callable[..., Awaitable[object]],
        finish: Callable[[], Awaitable[object]],
        abort: Callable[[], object],
        lost: tuple[type[Exception], ...],
    ) -> None:
        self.task: asyncio.Task[None] | None = None  # that of `run`
        self.ended = False  # whether all messages were sent
        self.failure: Exception | None = None  # of `messages`
        self._messages, self._encode, self._send = messages, encode, send
        self._finish, self._abort, self._lost = finish, abort, lost

    async def run(self) -> None:
        sent = 0
        try:
            async for message in self._messages:
                content = self._encode(message)
                try:
                    await self._send(*content)
                except self._lost:
                    return
                sent += 1
                if sent % MESSAGES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            with suppress(*self._lost):
                await self._finish()
                self.ended = True
        except Exception as error:
            self.failure = error
            self._abort()
        finally:
            await close(self._messages)

    def cancel(self, _: object = None) -> None:
        if self.task is not None:
            self.task.cancel()

    async def close(self) -> None:
        """Ends the upload and drops its exception.

        The task keeps its exception, whose frames keep this object and the call. That reference cycle would keep the
        call alive until a garbage collection, and gRPC keeps the connection of a closed channel while a call exists.
        """
        self.cancel()
        task, self.task = self.task, None
        if task is not None:
            await asyncio.wait({task})
        self.failure = None


async def close(iterator: AsyncIterator[object]) -> None:
    if isinstance(iterator, AsyncGenerator):
        await iterator.aclose()


async def linger(read: Callable[[], Awaitable[bool]]) -> None:
    """Discards what a refused caller still sends, while `read` returns that more may follow, for a limited time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while await read():
                pass
