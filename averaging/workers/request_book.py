"""What a worker remembers of the requests of its master. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from averaging.workers.payload import BLOCKING, Handle, Payload

MAX_QUEUED = 1 << 16
"""Maximum number of requests that wait for ack or flush."""


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
    """Refuse it: too many wait."""


@dataclass
class RequestBook:
    """Requests that wait, and replies that the master has not received yet.

    A master that has lost its connection sends requests again. Each is carried out once.
    """

    _unacked: dict[str, Payload] = field(default_factory=dict)  # by the id of their ack
    _queued: dict[str, Payload] = field(default_factory=dict)
    _running: dict[str, bool] = field(default_factory=dict)  # whether the reply is wanted
    _replies: dict[str, Payload] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._unacked) + len(self._queued) + len(self._running) + len(self._replies)

    def receive(self, request: Payload) -> Next:
        """Takes a request or an ack; for an ack the answer is `NOTHING` and `acked` returns what follows."""
        if self.knows(request.request_id):
            return Next.NOTHING
        if len(self) >= MAX_QUEUED:
            return Next.TOO_MANY
        if not request.no_syn:
            self._unacked[request.ack_reply_id] = request
            return Next.SYN
        return self.begin(request)

    def begin(self, request: Payload) -> Next:
        """Takes a request that needs no ack any more."""
        if request.handle_name in BLOCKING:
            self._queued[request.request_id] = request
            return Next.QUEUED
        self._running[request.request_id] = True
        return Next.FLUSH if request.handle_name == Handle.FLUSH else Next.RUN

    def acked(self, ack_id: str) -> Payload | None:
        """Returns the request that waited for this ack."""
        return self._unacked.pop(ack_id, None)

    def flushed(self) -> list[Payload]:
        """Returns the requests that waited for a flush; they are running from now on."""
        found = list(self._queued.values())
        self._running |= dict.fromkeys(self._queued, True)
        self._queued.clear()
        return found

    def finish(self, reply: Payload, *, keep: bool = True) -> bool:
        """Ends a request. Returns whether the reply is to be sent; it is kept until `forget`."""
        wanted = self._running.pop(reply.request_id, False)
        if wanted and keep:
            self._replies[reply.request_id] = reply
        return wanted

    def forget(self, ids: Collection[str]) -> None:
        """Forgets requests whose replies the master has received, or wants no longer."""
        for request_id in ids:
            self._replies.pop(request_id, None)
            self._queued.pop(request_id, None)
            if request_id in self._running:
                self._running[request_id] = False

    def knows(self, request_id: str) -> bool:
        """Whether this request has arrived before and is not forgotten."""
        return (
            request_id in self._queued
            or request_id in self._running
            or request_id in self._replies
            or any(request.request_id == request_id for request in self._unacked.values())
        )

    def attach(self, outstanding: Collection[str]) -> tuple[list[str], list[Payload]]:
        """A master attaches, again or for the first time, and waits for the replies to these requests only.

        Returns:
            Those of `outstanding` that are known, and the replies to send again.
        """
        outstanding = set(outstanding)
        for waiting in (self._queued, self._replies):
            for request_id in waiting.keys() - outstanding:
                del waiting[request_id]
        self._unacked = {ack: one for ack, one in self._unacked.items() if one.request_id in outstanding}
        self._running = {request_id: request_id in outstanding for request_id in self._running}
        known = [request_id for request_id in outstanding if self.knows(request_id)]
        syns = [self.syn(request) for request in self._unacked.values()]
        return known, [*syns, *self._replies.values()]

    @staticmethod
    def syn(request: Payload) -> Payload:
        """The syn of a request."""
        return Payload(request.handler, Handle.SYN, request.syn_reply_id)
