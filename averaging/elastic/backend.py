"""torch's contract of a rendezvous backend, kept with a cell of a register."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from averaging.elastic.cell import Cell, Fenced
from averaging.errors import AveragingError, ConfigError, ProtocolViolationError, TransportError
from averaging.rpc import EventLoopThread

logger = logging.getLogger("averaging.elastic")

Result = TypeVar("Result")

NAME = "averaging"

PAUSE = 0.5
"""Seconds between two attempts to reach the register."""

TELL_EVERY = 15.0
"""Seconds between two lines that say for what a node waits."""

REFUSED_FOR = 10.0
"""Seconds for which unauthentic bytes are read again before a node that needs the state gives up."""


class AveragingBackend(RendezvousBackend):
    """Keeps the state of one job's rendezvous.

    Args:
        thread: Runs the calls.
        cell: Where the state is.
        endpoint: Of the register, for people.
        monotonic: Seconds from any beginning.
    """

    def __init__(
        self, thread: EventLoopThread, cell: Cell, endpoint: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._thread, self._cell, self._endpoint = thread, cell, endpoint
        self._monotonic = monotonic
        self._patience = threading.local()  # heartbeats, in a thread of their own, are never patient
        self._told = -TELL_EVERY

    @property
    def name(self) -> str:
        """See torch's `RendezvousBackend`."""
        return NAME

    def get_state(self) -> tuple[bytes, Any] | None:
        """See torch's `RendezvousBackend`."""
        fenced = self.run(self._cell.read)
        return (fenced.payload, fenced) if fenced else None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """See torch's `RendezvousBackend`."""
        base = token if isinstance(token, Fenced) else None
        fenced, done = self.run(lambda: self._cell.write(state, base))
        return (fenced.payload, fenced, done) if fenced else None

    @contextmanager
    def patiently(self, seconds: float) -> Iterator[None]:
        """Within this block of the calling thread's, a register that does not answer is waited for."""
        self._patience.until = self._monotonic() + seconds
        try:
            yield
        finally:
            del self._patience.until

    def run(self, attempt: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Runs `attempt`, and again if it fails in a way that may pass.

        Raises:
            RendezvousConnectionError: The register does not answer.
            RendezvousStateError: The register answers, and what is there cannot be used.
        """
        refused_since: float | None = None
        until: float | None = getattr(self._patience, "until", None)
        while True:
            try:
                return self._thread.run(attempt())
            except ConfigError as error:
                raise RendezvousStateError(str(error)) from error
            except AveragingError as error:
                now = self._monotonic()
                if isinstance(error, ProtocolViolationError):
                    refused_since = now if refused_since is None else refused_since
                    if now - refused_since > REFUSED_FOR or until is None:
                        raise RendezvousStateError(str(error)) from error
                definite = isinstance(error, TransportError) and (error.definite or "unknown host" in error.reason)
                if definite or until is None or now >= until:
                    raise RendezvousConnectionError(self._explain(error)) from error
                if now - self._told >= TELL_EVERY:
                    self._told = now
                    logger.warning("%s This node tries for another %.0f s.", self._explain(error), until - now)
            time.sleep(PAUSE)

    def _explain(self, error: AveragingError) -> str:
        told = str(error).rstrip(".")
        if isinstance(error, TransportError) and error.definite:
            return f"the register refuses this node: {told}."
        if isinstance(error, ProtocolViolationError):
            return f"{told}."
        return (
            f"no register answers at {self._endpoint} ({told}). The node with that address hosts it, or `averaging "
            "register --listen` does: start it, or correct --rdzv-endpoint."
        )
