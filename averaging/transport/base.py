"""The contract between a peer and the network: what a peer serves, and how it calls another one.

Two implementations keep it: `transport.grpc` on real sockets and `transport.memory` in one process, on virtual time if
wanted. Nothing above knows which one it runs on.

On both sides a stream is an async generator. The caller closes it (`contextlib.aclosing`) to end the call; if the
caller goes away, the transport closes the callee's generator, which sees a `GeneratorExit` or a `CancelledError` where
it waits.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from averaging.errors import CallRefusedError, PeerUnreachableError, ProtocolViolationError
from averaging.observe.receipt_book import Watched
from averaging.observe.status import PeerStatus
from averaging.protocol.messages import (
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
from averaging.protocol.schema import Schema


class AveragingService(Protocol):
    """What a peer answers to other peers' averaging calls."""

    def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        """The verdict, then what became of the group."""
        ...

    def aggregate_part(self, messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        """Takes a sender's parts in order and yields their averages in the same order.

        It asks for a second message only after a round has accepted the sender. The transport relies on that: until
        then it bounds what the sender can make it hold.
        """
        ...

    def download_state(self, resume: Resume | None, caller: str) -> AsyncGenerator[DownloadData, None]:
        """The last committed state, in chunks, without what the caller has of it; nothing if it is not shared.

        `caller` is the host that asks, in words that are the same for all its connections.
        """
        ...

    def get_status(self) -> PeerStatus:
        """Who this peer is and what it is doing."""
        ...

    def get_schema(self) -> Schema:
        """What this peer averages."""
        ...

    def watch_rounds(self, last: int) -> AsyncGenerator[Watched, None]:
        """The receipts of this peer's attempts: the last few, and each further one until it leaves."""
        ...


class GossipService(Protocol):
    """What a peer answers to other peers' discovery calls.

    Raises:
        WrongRunError: from any of them, if the caller belongs to another run.
        ProtocolViolationError: from any of them, if the caller breaks the rules.
    """

    def exchange(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        """What the caller lacks, and last what this peer lacks."""
        ...

    async def push(self, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        """Takes fresh records and passes them on; returns those that were refused."""
        ...

    def subscribe(self, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        """What the caller lacks, then every fresh record, without end."""
        ...

    def list_records(self, key: str) -> tuple[Record, ...]:
        """The records under `key`, or all of them if it is empty."""
        ...


class Transport(Protocol):
    """One peer's place on the network. All calls name the other peer by its endpoint.

    Raises:
        PeerUnreachableError: from any call: nobody answers, or the connection broke.
        CallRefusedError: from any call: the peer answered with an error of its own.
        ProtocolViolationError: from any call: the peer answered with something malformed.
    """

    async def bind(self) -> str:
        """Takes the address to listen on and returns this peer's endpoint; nothing is served yet.

        Raises:
            ListenError: the address cannot be had.
        """
        ...

    async def serve(self, averaging: AveragingService, gossip: GossipService | None) -> None:
        """Starts to answer calls; returns at once."""
        ...

    async def close(self, grace: float = 0.0) -> None:
        """Stops serving, giving calls in progress `grace` seconds to end, and closes all connections."""
        ...

    def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        """Asks `endpoint` to lead this peer."""
        ...

    def aggregate_part(
        self, endpoint: str, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        """Sends parts to their reducer as the network takes them, and yields the replies."""
        ...

    def download_state(self, endpoint: str, resume: Resume | None = None) -> AsyncGenerator[DownloadData, None]:
        """Reads the state of `endpoint`, without what is here if `endpoint` has the same and can leave it out."""
        ...

    async def get_schema(self, endpoint: str) -> Schema:
        """Asks what `endpoint` averages."""
        ...

    def exchange(self, endpoint: str, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        """Compares records with `endpoint`."""
        ...

    async def push(self, endpoint: str, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        """Tells `endpoint` fresh records."""
        ...

    def subscribe(self, endpoint: str, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        """Listens to what `endpoint` hears."""
        ...


async def is_alive(transport: Transport, endpoint: str) -> bool:
    """Whether a peer answers anything; the caller says how long it may take."""
    try:
        await transport.get_schema(endpoint)
    except PeerUnreachableError:
        return False
    except (CallRefusedError, ProtocolViolationError):
        return True  # other software perhaps, but alive
    return True
