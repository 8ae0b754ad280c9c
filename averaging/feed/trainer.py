"""`BatchFeed`: the trainer's side."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from averaging.errors import ConfigError, FeedBusyError, FeedError
from averaging.feed.client import Backoff, Connection, decode_reply
from averaging.feed.messages import BatchReply, Registration
from averaging.feed.ranks import Outcome, Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BEAT = 5.0
"""Seconds after which the ranks meet although there is no batch, so that a rank that died is noticed."""


class _Status(msgspec.Struct, frozen=True):
    current_step: int


class _Info(msgspec.Struct, frozen=True):
    batch_size: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What to train in one step.

    Attributes:
        step: from starting_step + 1 on.
        groups: as they were posted, with all fields of ScoredData; a field that was not posted is None.
    """

    step: int
    groups: list[dict[str, Any]]

    @property
    def sequences(self) -> int:
        """How many there are, in all groups."""
        return sum(len(group["tokens"]) for group in self.groups)


class BatchFeed:
    """Iterates over the batches of a feed, on one process or on all ranks of a process group alike.

    Rank 0 registers and fetches, the others follow the server's step, and rank 0 broadcasts the batch: all ranks get
    the same one for the same step. The iteration ends with step `registration.num_steps`.

    Give a resumed trainer's checkpointed step as `registration.starting_step`. A server of this library then hands out
    the batches after that step again, so that the trainer sees each exactly once. It keeps them until the checkpoint is
    saved: that of the last multiple of `registration.save_checkpoint_interval` counts as saved when the batch after it
    is asked for, unless you call `saved`.

    Args:
        url: of the server, "http://HOST:PORT" or "https://HOST:PORT".
        registration: the same on all ranks.
        process_group: None means torch's default group if torch.distributed is initialized, else this process alone.
        poll: seconds between two questions whether there is a batch.
        rank_timeout: seconds for which a rank waits for another one, which may still be training.
        patience: seconds without a usable answer after which the iteration raises. There is no limit for data to come.
        options: `token_file`, `tls_ca`, `tls_cert`, `tls_key`, `timeout` and `max_bytes`, see `Connection`.

    Attributes:
        step: of the last batch; `registration.starting_step` before the first one.

    Raises:
        ConfigError: an argument cannot work, or the ranks were given different registrations.
        FeedRefusedError: the server refuses, for example because the batch is forgotten; at all ranks.
        FeedUnreachableError: the server gave no usable answer for `patience`; at all ranks.
        FeedError: a rank has died or raised, at all ranks that are left.
    """

    def __init__(
        self,
        url: str,
        registration: Registration,
        process_group: ProcessGroup | None = None,
        *,
        poll: float = 0.5,
        rank_timeout: float = 1800.0,
        patience: float = 300.0,
        **options: Any,
    ) -> None:
        if not poll > 0 or not rank_timeout > 0:
            raise ConfigError("poll and rank_timeout must be above 0 s")
        self._connection = Connection(url, patience=patience, **options)
        self._registration, self._poll = registration, poll
        self._group, self._rank_timeout = process_group, rank_timeout
        self._ranks: Ranks | None = None
        self._backoff = Backoff(patience, random.Random())
        self._registered = self._closed = False
        self._saved: int | None = None
        self.step = registration.starting_step

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if 0 <= self._registration.num_steps <= self.step:
            self.close()
            raise StopIteration
        if self._closed:
            raise FeedError("this feed is closed; make another one, with the step to go on from as starting_step")
        try:
            batch = self._next()
        except BaseException:
            self.close()  # whatever it is, it reaches the other ranks
            raise
        self.step = batch.step
        return batch

    def saved(self, step: int) -> None:
        """Tells that the checkpoint of `step` is saved: the server may forget the batches up to it. Rank 0's counts."""
        self._saved = max(step, self._saved or 0)

    def close(self) -> None:
        """Leaves; ranks that wait for this one raise. Twice is fine."""
        self._closed = True
        self._connection.close()
        if self._ranks is not None:
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> Batch:
        if self._ranks is None:
            self._ranks = Ranks(self._group, self._rank_timeout)
            told = blake2b(msgspec.json.encode(self._registration), digest_size=7).digest()
            if not self._ranks.agree(int.from_bytes(told)):
                raise ConfigError("the ranks were given different registrations; give all of them the same")
        while True:
            outcome, content, error = Outcome.NOTHING_YET, b"", None
            until = time.monotonic() + BEAT
            if self._ranks.rank:
                self._follow(until)
            else:
                try:
                    content = self._fetch(until)
                    outcome = Outcome.BATCH if content else Outcome.NOTHING_YET
                except FeedError as failed:
                    outcome, content, error = Outcome.FAILED, str(failed).encode(), failed
            outcome, content = self._ranks.share(outcome, content)
            if outcome is Outcome.FAILED:
                raise error or FeedError(f"rank 0 has failed: {content.decode()}")
            if outcome is Outcome.BATCH:
                return Batch(self.step + 1, decode_reply(content, BatchReply).batch or [])

    def _fetch(self, until: float) -> bytes:
        """What the server answers with a batch in it; empty if there is none until then."""
        while True:
            pause = self._poll
            try:
                if not self._registered:
                    self._register()
                if content := self._ask():
                    return content
                self._backoff.succeeded()
            except FeedBusyError as error:
                # The server of atroposlib fails like this after a reset, until somebody registers.
                self._registered = self._registered and error.status != 500
                pause = self._backoff.failed(error, time.monotonic())
            left = until - time.monotonic()
            time.sleep(max(0.0, min(pause, left)))
            if pause >= left:
                return b""

    def _register(self) -> None:
        registration = msgspec.structs.replace(self._registration, starting_step=self.step)
        self._connection.raw("POST", "/register", told=registration)
        size = self._connection.once("GET", "/info", _Info).batch_size
        if size == -1:
            raise FeedError(
                f"{self._connection.url} took data before a trainer registered, and cannot begin a run; call GET "
                "/reset_data there, which drops that data"
            )
        if size != registration.batch_size:
            raise FeedError(
                f"{self._connection.url} serves a run with batch_size {size}, not {registration.batch_size}; register "
                "the same, give this run its own server, or end the other run with GET /reset_data"
            )
        self._registered = True

    def _ask(self) -> bytes:
        step = self.step + 1
        content = self._connection.raw("GET", "/batch", params={"step": step, "saved": self._saved_step()})
        reply = decode_reply(content, BatchReply)
        if reply.status == "error":  # it has been restarted without its state, or reset
            self._registered = False
            raise FeedBusyError(0, f"{self._connection.url} answers: {reply.message}")
        if reply.batch and reply.step not in (None, step):
            raise FeedError(f"{self._connection.url} answers with step {reply.step} instead of {step}")
        return content if reply.batch else b""

    def _saved_step(self) -> int:
        if self._saved is not None:
            return self._saved
        interval = self._registration.save_checkpoint_interval
        return max(self._registration.starting_step, self.step // interval * interval if interval > 0 else self.step)

    def _follow(self, until: float) -> None:
        """Waits until the server has the next step, at most until then. Whether it answers is for rank 0 to judge."""
        while True:
            try:
                if self._connection.once("GET", "/status", _Status).current_step > self.step:
                    return
            except FeedError:
                pass
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(self._poll, left))
