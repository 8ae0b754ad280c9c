"""What a worker knows of its master: its requests and the replies to them, and its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from averaging.errors import AveragingError, ProtocolViolationError, printable
from averaging.rl.workers.payload import BATCH_BYTES, BLOCKING, Handle, Payload, encode_reply
from averaging.wire.workers_pb2 import WorkerMessage

MAX_QUEUED = 1 << 16
"""Maximum number of requests that wait or run, and of replies that the master has not received."""

MAX_QUEUED_BYTES = 128 << 20
"""Maximum bytes of the data of all requests that wait or run."""


class Next(Enum):
    """What is to be done with a request."""

    NOTHING = auto()
    """It is known already, and its reply follows or was sent."""
    SYN = auto()
    """Send its syn."""
    RUN = auto()
    """Carry it out at once."""
    QUEUED = auto()
    """It waits for a flush."""
    FLUSH = auto()
    """Carry out what `flushed` returns."""
    TOO_MANY = auto()
    """Refuse it: too many wait, or too large ones."""


@dataclass
class RequestBook:
    """Requests that wait, and replies that the master has not received yet.

    A master that has lost its connection sends requests again. Each is carried out once.
    """

    _unacked: dict[str, Payload] = field(default_factory=dict)
    _acks: dict[str, str] = field(default_factory=dict)  # the unacked request of each ack
    _queued: dict[str, Payload] = field(default_factory=dict)
    _running: dict[str, bool] = field(default_factory=dict)  # whether the reply is wanted
    _replies: dict[str, Payload] = field(default_factory=dict)
    _nbytes: dict[str, int] = field(default_factory=dict)  # of the data of each request that waits or runs
    _total: int = 0  # their sum

    def __len__(self) -> int:
        return len(self._unacked) + len(self._queued) + len(self._running) + len(self._replies)

    @property
    def running(self) -> int:
        """Number of requests that are being carried out."""
        return len(self._running)

    def receive(self, request: Payload) -> Next:
        """Takes a request or an ack; for an ack the answer is `NOTHING` and `acked` returns what follows."""
        if self.knows(request.request_id):
            return Next.NOTHING
        nbytes = sum(len(data) for data in (request.data, *request.pre_hook_data, *request.post_hook_data) if data)
        if len(self) >= MAX_QUEUED or self._total + nbytes > MAX_QUEUED_BYTES:
            return Next.TOO_MANY
        self._nbytes[request.request_id] = nbytes
        self._total += nbytes
        if not request.no_syn:
            self._unacked[request.request_id] = request
            self._acks[request.ack_reply_id] = request.request_id
            return Next.SYN
        return self.begin(request)

    def begin(self, request: Payload) -> Next:
        """Takes a request that needs no ack any more."""
        if request.handle_name in BLOCKING:
            self._queued[request.request_id] = request
            return Next.QUEUED
        self._running[request.request_id] = True
        return Next.FLUSH if request.handle_name == Handle.FLUSH else Next.RUN

    def acked(self, ack_id: str, *, go_on: bool = True) -> Payload | None:
        """Returns the request that waited for this ack and is to be carried out; None if there is none."""
        request = self._unacked.pop(self._acks.pop(ack_id, ""), None)
        if request is not None and not go_on:
            self._release(request.request_id)
            return None
        return request

    def flushed(self) -> list[Payload]:
        """Returns the requests that waited for a flush; they are running from now on."""
        requests = list(self._queued.values())
        self._running |= dict.fromkeys(self._queued, True)
        self._queued.clear()
        return requests

    def finish(self, reply: Payload, *, keep: bool = True) -> bool:
        """Ends a request. Returns whether the reply is to be sent; it is kept until `forget`."""
        wanted = self._running.pop(reply.request_id, False)
        self._release(reply.request_id)
        if wanted and keep:
            self._replies[reply.request_id] = reply
        return wanted

    def forget(self, ids: Collection[str]) -> None:
        """Forgets requests whose replies the master has received, or wants no longer."""
        for request_id in ids:
            self._replies.pop(request_id, None)
            if self._queued.pop(request_id, None) is not None:
                self._release(request_id)
            if request_id in self._running:
                self._running[request_id] = False

    def knows(self, request_id: str) -> bool:
        """Whether this request has arrived before and is not forgotten."""
        return any(request_id in known for known in (self._queued, self._running, self._replies, self._unacked))

    def attach(self, outstanding: Collection[str]) -> tuple[list[str], list[Payload]]:
        """A master attaches, again or for the first time, and waits for the replies to these requests only.

        Returns:
            Those of `outstanding` that are known, and the replies to send again.
        """
        outstanding = set(outstanding)
        for waiting in (self._queued, self._replies, self._unacked):
            for request_id in waiting.keys() - outstanding:
                del waiting[request_id]
                self._release(request_id)
        self._acks = {ack: request_id for ack, request_id in self._acks.items() if request_id in self._unacked}
        self._running = {request_id: request_id in outstanding for request_id in self._running}
        everything = (*self._queued, *self._running, *self._replies, *self._unacked)
        known = [request_id for request_id in everything if request_id in outstanding]
        syns = [self.syn(request) for request in self._unacked.values()]
        return known, [*syns, *self._replies.values()]

    def _release(self, request_id: str) -> None:
        self._total -= self._nbytes.pop(request_id, 0)

    @staticmethod
    def syn(request: Payload) -> Payload:
        """The syn of a request."""
        return Payload(request.handler, Handle.SYN, request.syn_reply_id)


MAX_UNSENT = 1 << 17
"""Messages for a master that does not read them, after which its stream is closed."""


class MasterSession:
    """The stream of one master.

    Attributes:
        master: Random name of the master's process. Whoever knows it can take the place of that master.
        alias: First characters of `master`, which others may see.
        since: Time at which the master attached, of the running loop.
        heard: Time at which its last message came.
        failure: Error that closed the stream, if it is the master's fault.
        ends: Whether the master sends no further messages, and waits only for replies.
    """

    def __init__(self, master: str, now: float) -> None:
        self.master = master
        self.alias = printable(master[:8])
        self.since = self.heard = now
        self.failure: AveragingError | None = None
        self.ends = False
        self._closed = False
        self._unsent: asyncio.Queue[Payload | int | None] = asyncio.Queue()

    def lives(self, now: float, silence: float) -> bool:
        """Whether the stream is open in both directions and the master was heard within `silence` seconds."""
        return not self._closed and not self.ends and now - self.heard <= silence

    def send(self, message: Payload | int) -> None:
        """Sends a reply, or the answer to a ping."""
        if self._unsent.qsize() >= MAX_UNSENT:
            self.failure = ProtocolViolationError("the master does not read its replies")
            self.close()
        if not self._closed:
            self._unsent.put_nowait(message)

    def close(self) -> None:
        """Ends `next_message`."""
        if not self._closed:
            self._closed = True
            self._unsent.put_nowait(None)

    async def next_message(self) -> WorkerMessage | None:
        """The next message to send, with all replies that wait if they fit; None when the session is closed."""
        batch, nbytes = WorkerMessage(), 0
        unsent = await self._unsent.get()
        while unsent is not None:
            if isinstance(unsent, int):
                batch.pong = unsent
            else:
                batch.replies.append(encode_reply(unsent))
                nbytes += batch.replies[-1].ByteSize()
            # No two pongs share a message, since the master measures the time until each of them arrives.
            if batch.pong or nbytes > BATCH_BYTES or self._closed or self._unsent.empty():
                return batch
            unsent = self._unsent.get_nowait()
        return None
