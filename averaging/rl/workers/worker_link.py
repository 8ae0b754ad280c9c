"""A master's side of the stream to one worker: attaches, attaches again after a break, and finds out if it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from averaging.errors import (
    AveragingError,
    CallRefusedError,
    PeerUnreachableError,
    RefusalCause,
    WorkerError,
)
from averaging.rl.workers.payload import (
    BATCH_BYTES,
    NO_REPLY,
    REQUEST_REPLY_STREAM,
    Channel,
    Connect,
    Handle,
    Inventory,
    pack,
    unpack,
)
from averaging.rl.workers.plan import Placement
from averaging.rpc import Deadline, Deadlines, FairTimeout, Phase
from averaging.wire.workers_pb2 import Attach, Attached, MasterMessage
from averaging.wire.workers_pb2 import Payload as PayloadMessage

logger = logging.getLogger("averaging.rl.workers")

RETRY_SECONDS = 0.5
"""Seconds between two attempts to attach to a worker that does not answer."""

FIRST_PINGS = 3
"""Pings right after attaching, so that the deadline of a worker is learned at once."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What all links of a master share.

    Attributes:
        master: Random name of the master's process.
        connect: Function that opens channels.
        deadlines: Learned times until workers answer.
        ping_seconds: Interval of the pings.
    """

    master: str
    connect: Connect
    deadlines: Deadlines
    ping_seconds: float


class WorkerLink:
    """The stream to one worker.

    The worker is lost if nothing listens at its endpoint any more, if it is silent beyond its learned deadline, or if
    it has restarted. The link goes on trying, so that a worker can come back.

    Args:
        worker: Name of the worker.
        endpoint: `host:port` of the worker.
        placement: The worker's part of the plan.
        options: Options that all links share.
        on_reply: Function that gets each reply that is awaited.
        on_lost: Function that gets the error when the worker is lost, which answers no posted request then.

    Attributes:
        inventory: Models and samples of the worker when it attached; None while it is not attached.
        lost: Error that says why the worker is lost; None while it is attached, and before it has attached at all.
        refused: Error of a worker that refused this master at the last attempt.
        reason: Text that says why the last attempt to attach has failed; empty if no attempt has.
        hopeless: Whether further attempts would fail as well, for example for want of a token.
        changed: Event that is set, and replaced, when an attribute above has changed.
        outstanding: Requests whose replies are awaited, by id. They are sent again after a break.
        unsent: Requests to send as soon as the worker is attached, in order.
    """

    def __init__(
        self,
        worker: str,
        endpoint: str,
        placement: Placement,
        options: LinkOptions,
        on_reply: Callable[[PayloadMessage], None],
        on_lost: Callable[[WorkerError], None],
    ) -> None:
        self.worker, self.endpoint = worker, endpoint
        self.inventory: Inventory | None = None
        self.lost: WorkerError | None = None
        self.refused: WorkerError | None = None
        self.reason, self.hopeless = "", False
        self.changed = asyncio.Event()
        self.outstanding: dict[str, PayloadMessage] = {}
        self.unsent: asyncio.Queue[PayloadMessage] = asyncio.Queue()
        self._placement, self._options = placement, options
        self._on_reply, self._on_lost = on_reply, on_lost
        self._incarnation = ""
        self._received: list[str] = []
        self._pinged: dict[int, float] = {}
        self._pings = 0
        self._ended = False

    def forget(self, request_id: str) -> None:
        """Waits for a reply no longer."""
        if self.outstanding.pop(request_id, None) is not None:
            self._received.append(request_id)

    def end(self) -> None:
        """Lets `run` end after the present attempt, since an attempt that fails at the same time may hide a cancel."""
        self._ended = True

    async def run(self) -> None:
        """Keeps the stream open until it is cancelled, or `end` was called."""
        channel = self._options.connect(self.endpoint)
        loop = asyncio.get_running_loop()
        broken = loop.time()
        try:
            while not self._ended:
                began = loop.time()
                reason, final = await self._attempt(channel)
                self.reason = reason
                was_attached, self.inventory = self.inventory is not None, None
                if was_attached:
                    broken = loop.time()
                    logger.info("the stream to %s has ended: %s", self.worker, reason)
                if self._incarnation and self.lost is None and (final or loop.time() - broken > self._deadline.seconds):
                    self._lose(reason)
                self._notify()
                soon = loop.time() - began < RETRY_SECONDS  # a worker that ends each stream at once makes no busy loop
                if (not was_attached or final or soon) and not self._ended:
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            await channel.close()

    async def _attempt(self, channel: Channel) -> tuple[str, bool]:
        """Attaches and serves the stream until it ends.

        Returns:
            Why it has ended, and whether the worker is lost at once.
        """
        self.refused, self.hopeless = None, False
        try:
            await self._serve(channel)
        except WorkerError as error:
            self.refused = error
            return str(error), True
        except PeerUnreachableError as error:
            self.hopeless = error.definite
            return str(error), error.refused
        except CallRefusedError as error:
            self.hopeless = error.definite
            unauthenticated = error.cause is RefusalCause.UNAUTHENTICATED
            return f"{error}; give the master the credentials of its workers" if unauthenticated else str(error), True
        except (AveragingError, TimeoutError) as error:
            return str(error), True
        return "the worker has ended it", False

    async def _serve(self, channel: Channel) -> None:
        self._pinged.clear()
        replies = channel.stream(REQUEST_REPLY_STREAM, self._messages())
        async with aclosing(replies), FairTimeout(self._deadline, self._options.deadlines.lower) as limit:
            async for message in replies:
                limit.restart(self._deadline)
                if message.refused:
                    raise WorkerError(self.worker, f"{self.worker} refuses this master: {message.refused}")
                if message.HasField("attached"):
                    self._attach(message.attached)
                if (began := self._pinged.pop(message.pong, None)) is not None:
                    now = asyncio.get_running_loop().time()
                    self._options.deadlines.record(self.worker, Phase.ANSWER, 0, now - began, now)
                for reply in message.replies:
                    if self.outstanding.pop(reply.request_id, None) is not None:
                        self._received.append(reply.request_id)
                    elif reply.handle_name != Handle.SYN:
                        continue
                    self._on_reply(reply)

    async def _messages(self) -> AsyncGenerator[MasterMessage, None]:
        """What is sent: attach, then requests as they come, and pings."""
        options = self._options
        outstanding = list(self.outstanding)
        yield MasterMessage(
            attach=Attach(
                master=options.master, worker=self.worker, placement=pack(self._placement), outstanding=outstanding
            )
        )
        self._received.clear()  # the worker keeps the replies to `outstanding` only
        while self.inventory is None:  # requests follow when the worker has answered
            await self.changed.wait()
        loop = asyncio.get_running_loop()
        first, next_ping = FIRST_PINGS, loop.time()
        while True:
            message = None
            if first or loop.time() >= next_ping:
                first = max(0, first - 1)
                next_ping = loop.time() + options.ping_seconds
                self._pings += 1
                self._pinged[self._pings] = loop.time()
                message = MasterMessage(ping=self._pings)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_ping):
                        request = await self.unsent.get()
                    message = MasterMessage(requests=self._batch(request))
            if message is not None:
                message.received.extend(self._received)
                self._received.clear()
                yield message

    def _batch(self, request: PayloadMessage) -> list[PayloadMessage]:
        """The requests of one message: `request` and those that wait behind it, without those that nobody awaits."""
        batch, nbytes = [], 0
        while True:
            if request.handle_name in NO_REPLY or request.request_id in self.outstanding:
                batch.append(request)
                nbytes += request.ByteSize()
            if nbytes > BATCH_BYTES or self.unsent.empty():
                return batch
            request = self.unsent.get_nowait()

    def _attach(self, attached: Attached) -> None:
        if self._incarnation not in ("", attached.incarnation) and self.lost is None:
            self._lose("it has restarted, and lost what it held")
        self._incarnation = attached.incarnation
        self.lost = None
        # After a break the master does not know which requests have arrived. The worker names those that it has, and
        # the others are sent again; it carries each out once. Of requests without a reply only the unsent ones follow.
        self.inventory = unpack(attached.inventory, Inventory)
        known = set(attached.known)
        without_reply = [request for request in self._take_unsent() if request.handle_name in NO_REPLY]
        again = [request for request_id, request in self.outstanding.items() if request_id not in known]
        for request in [*without_reply, *again]:
            self.unsent.put_nowait(request)
        self._notify()

    def _take_unsent(self) -> list[PayloadMessage]:
        return [self.unsent.get_nowait() for _ in range(self.unsent.qsize())]

    def _lose(self, reason: str) -> None:
        self.lost = WorkerError(self.worker, f"{self.worker} at {self.endpoint} is lost: {reason}", lost=True)
        logger.warning("%s", self.lost)
        self.outstanding.clear()
        self._take_unsent()
        self._on_lost(self.lost)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def _deadline(self) -> Deadline:
        """Maximum silence of the worker: a ping is due by then, and should be answered."""
        now = asyncio.get_running_loop().time()
        learned = self._options.deadlines.of(self.worker, Phase.ANSWER, 0, now)
        return Deadline(self._options.ping_seconds + learned.seconds, learned.basis)
