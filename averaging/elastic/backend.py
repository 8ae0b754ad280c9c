"""A rendezvous backend for torch, with its state in a register."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from averaging.elastic.options import RDZV_ENDPOINT
from averaging.elastic.rendezvous_state import Fenced, ReplicatedValue, decode_state, encode_state
from averaging.errors import (
    AveragingError,
    CallRefusedError,
    ConfigError,
    PeerUnreachableError,
    ProtocolViolationError,
    TransportError,
)
from averaging.rpc import EventLoopThread

logger = logging.getLogger("averaging.elastic")

Result = TypeVar("Result")

NAME = "averaging"

PAUSE = 0.5  # seconds between two calls to a register that does not answer
LOG_INTERVAL = 15.0  # seconds between two log lines about it, at least
REFUSED_FOR = 10.0  # seconds for which a node retries while the register holds unauthentic bytes


class AveragingBackend(RendezvousBackend):
    """Keeps the state of one job's rendezvous.

    torch passes and takes pickles. They are made and read in this process only; the register holds what
    `rendezvous_state` encodes.

    A name that is not found is waited for, as a register that does not answer, if `awaits_name`, and in any case once
    the register has answered: a pod that is replaced has no address for a while. `endpoint` and `origin` are for error
    texts.
    """

    def __init__(
        self,
        thread: EventLoopThread,
        value: ReplicatedValue,
        endpoint: str,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        origin: str = RDZV_ENDPOINT,
        awaits_name: bool = False,
    ) -> None:
        self._thread, self._value, self._endpoint = thread, value, endpoint
        self._origin, self._awaits_name = origin, awaits_name
        self._monotonic = monotonic
        self._retry = threading.local()  # the thread of the heartbeats never retries
        self._logged = -LOG_INTERVAL

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, Any] | None:
        fenced, state = self.run(self._read)
        return (state, fenced) if fenced else None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        base = token if isinstance(token, Fenced) else None
        own = pickle.loads(state)  # noqa: S301 - torch has made it in this process
        payload = encode_state(own)

        async def write() -> tuple[Fenced | None, bytes, bool]:
            fenced, done = await self._value.write(payload, base, ended=own.closed)
            return fenced, _pickled(fenced), done

        fenced, present, done = self.run(write)
        return (present, fenced, done) if fenced else None

    async def _read(self) -> tuple[Fenced | None, bytes]:
        fenced = await self._value.read()
        return fenced, _pickled(fenced)

    @contextmanager
    def retrying(self, seconds: float) -> Iterator[None]:
        """Inside this block, calls of this thread wait for a register that does not answer."""
        self._retry.until = self._monotonic() + seconds
        try:
            yield
        finally:
            del self._retry.until

    def run(self, call: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Runs `call`, and repeats it after transient failures.

        Raises:
            RendezvousConnectionError: The register does not answer.
            RendezvousStateError: The register answers with an unusable value.
        """
        refused_since: float | None = None
        until: float | None = getattr(self._retry, "until", None)
        while True:
            try:
                result = self._thread.run(call())
                self._awaits_name = True
                return result
            except ConfigError as error:
                raise RendezvousStateError(str(error)) from error
            except AveragingError as error:
                now = self._monotonic()
                if isinstance(error, ProtocolViolationError):
                    refused_since = now if refused_since is None else refused_since
                    if now - refused_since > REFUSED_FOR or until is None:
                        raise RendezvousStateError(str(error)) from error
                definite = isinstance(error, TransportError) and error.definite
                definite |= isinstance(error, PeerUnreachableError) and error.unknown_host and not self._awaits_name
                if definite or until is None or now >= until:
                    raise RendezvousConnectionError(self._explain(error)) from error
                if now - self._logged >= LOG_INTERVAL:
                    self._logged = now
                    logger.warning("%s This node tries for another %.0f s.", self._explain(error), until - now)
            time.sleep(PAUSE)

    def _explain(self, error: AveragingError) -> str:
        reason = str(error).rstrip(".")
        if isinstance(error, TransportError) and error.definite:
            return f"the register refuses this node: {reason}."
        if isinstance(error, CallRefusedError | ProtocolViolationError):
            return f"{reason}."
        return (
            f"no register answers at {self._endpoint} ({reason}). The node with that address hosts it, or `averaging "
            f"register --listen` does: start it, or correct {self._origin}."
        )


def _pickled(fenced: Fenced | None) -> bytes:  # the state as torch reads it
    return pickle.dumps(decode_state(fenced.payload)) if fenced else b""
