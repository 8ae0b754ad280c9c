"""The contract of a register, and the implementations in memory and over gRPC.

A register holds small values by key. `get` and `compare_and_set` are linearizable: each takes effect at one moment
between its call and its return. A call that fails with a `PeerUnreachableError` may or may not have taken effect.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from averaging.errors import BusyError, ProtocolViolationError
from averaging.metrics import CERTIFICATE_METRICS, Samples, counter, gauge
from averaging.rpc import RpcChannel, RpcHandler, RpcMethod
from averaging.wire import register_pb2 as wire

MAX_KEY_BYTES, MAX_VALUE_BYTES = 256, 1 << 20
MAX_ENTRIES, MAX_TOTAL_BYTES = 1024, 64 << 20

# Seconds for which an entry is kept after its last write. A running job writes every few seconds, and its nodes restore
# what is gone. What an ended job leaves is void after 120 s (`rendezvous_state.FORGOTTEN`).
LIFETIME = 180.0


@dataclass(frozen=True, slots=True)
class RegisterEntry:
    value: bytes
    token: bytes  # opaque, for the next write. It becomes invalid when the entry is written again


@dataclass(frozen=True, slots=True)
class SwapResult:
    entry: RegisterEntry | None  # the present entry; None if there is none
    done: bool  # whether the caller set it


class Register(Protocol):
    """Small values that several callers read and change.

    Raises:
        PeerUnreachableError: From both methods: there is no answer, or the connection broke.
        CallRefusedError: From both methods: the caller has no permission, or the register is full.
        ProtocolViolationError: From both methods: the answer is malformed.
    """

    async def get(self, key: str) -> RegisterEntry | None: ...

    async def compare_and_set(self, key: str, value: bytes, token: bytes | None) -> SwapResult: ...


class MemoryRegister:
    """A register in this process, for one event loop. Its entries end with the process.

    `incarnation` is part of every token, so that tokens of an earlier process are invalid.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, incarnation: bytes | None = None) -> None:
        self._clock = clock
        self._incarnation = os.urandom(8) if incarnation is None else incarnation
        self._writes = 0
        self._entries: dict[str, tuple[RegisterEntry, float]] = {}  # with the time of the write, earliest first
        self._total = 0

    async def get(self, key: str) -> RegisterEntry | None:
        _check(key)
        self._forget()
        entry, _ = self._entries.get(key, (None, 0.0))
        return entry

    async def compare_and_set(self, key: str, value: bytes, token: bytes | None) -> SwapResult:
        """See `Register`. Raises BusyError without room for another entry."""
        _check(key, value)
        self._forget()
        entry, _ = self._entries.get(key, (None, 0.0))
        if token != (entry.token if entry else None):
            return SwapResult(entry, done=False)
        self._make_room(key, entry, len(value))
        self._writes += 1
        new = RegisterEntry(value, self._incarnation + self._writes.to_bytes(8, "big"))
        self._entries.pop(key, None)
        self._entries[key] = new, self._clock()
        self._total += len(value) - (len(entry.value) if entry else 0)
        return SwapResult(new, done=True)

    def size(self) -> tuple[int, int]:
        """The number of entries, and the bytes of their values."""
        self._forget()
        return len(self._entries), self._total

    def _forget(self) -> None:
        end = self._clock() - LIFETIME
        while self._entries:
            key, (entry, written) = next(iter(self._entries.items()))
            if written >= end:
                return
            del self._entries[key]
            self._total -= len(entry.value)

    def _make_room(self, key: str, entry: RegisterEntry | None, nbytes: int) -> None:
        total = self._total + nbytes - (len(entry.value) if entry else 0)
        if key not in self._entries and len(self._entries) >= MAX_ENTRIES:
            full = f"it has {MAX_ENTRIES} entries, the maximum; a job has two"
        elif total > MAX_TOTAL_BYTES:
            full = f"its {len(self._entries)} entries have {self._total} bytes, and at most {MAX_TOTAL_BYTES} are kept"
        else:
            return
        raise BusyError(
            f"the register is full: {full}. Those of ended jobs go {LIFETIME:g} s after their last write; wait, or "
            "start another register"
        )


def _check(key: str, value: bytes = b"") -> None:
    if not key or len(key.encode()) > MAX_KEY_BYTES:
        raise ProtocolViolationError(f"a key of {len(key.encode())} bytes; it must have 1 to {MAX_KEY_BYTES}")
    if len(value) > MAX_VALUE_BYTES:
        raise ProtocolViolationError(f"a value of {len(value)} bytes; at most {MAX_VALUE_BYTES} are accepted")


# The register over gRPC, on the port of a peer or on its own port.

MESSAGE_BYTES = MAX_VALUE_BYTES + 4096
_PATH = "/averaging.register.v1.Register"
GET = RpcMethod(f"{_PATH}/Get", wire.GetRequest, wire.Entry, max_request_bytes=4096, max_reply_bytes=MESSAGE_BYTES)
COMPARE_AND_SET = RpcMethod(
    f"{_PATH}/CompareAndSet",
    wire.SetRequest,
    wire.SetReply,
    max_request_bytes=MESSAGE_BYTES,
    max_reply_bytes=MESSAGE_BYTES,
)

CALL_SECONDS = 3.0  # for one call: less than the 5 s that torch allows for a heartbeat

REGISTER_METRICS = (
    gauge("register_entries", f"Entries in the register, two for each job; at most {MAX_ENTRIES}."),
    gauge("register_bytes", f"Bytes of the values in the register; at most {MAX_TOTAL_BYTES}."),
    counter("register_calls", "Calls of nodes.", "method", known=(("get",), ("compare_and_set",))),
    *CERTIFICATE_METRICS,
)
"""What `averaging register` tells Prometheus."""


class RegisterService:
    """Serves a register, a new one in memory if none is given; for `RpcServer` or `Peer(services=…)`."""

    def __init__(self, register: Register | None = None) -> None:
        self.register = register or MemoryRegister()
        self._calls: Counter[str] = Counter()

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        return [GET.answers(self._get), COMPARE_AND_SET.answers(self._compare_and_set)]

    def samples(self) -> Samples:
        entries, nbytes = self.register.size() if isinstance(self.register, MemoryRegister) else (0, 0)
        return {
            "averaging_register_entries": entries,
            "averaging_register_bytes": nbytes,
            "averaging_register_calls_total": {(method,): count for method, count in self._calls.items()},
        }

    async def _get(self, request: wire.GetRequest) -> wire.Entry:
        self._calls["get"] += 1
        return _message(await self.register.get(request.key))

    async def _compare_and_set(self, request: wire.SetRequest) -> wire.SetReply:
        self._calls["compare_and_set"] += 1
        written = await self.register.compare_and_set(request.key, request.value, request.token or None)
        return wire.SetReply(entry=_message(written.entry), done=written.done)


class GrpcRegister:
    """The register at the other end of a channel."""

    def __init__(self, channel: RpcChannel, timeout: float = CALL_SECONDS) -> None:
        self._channel = channel
        self._timeout = timeout

    async def get(self, key: str) -> RegisterEntry | None:
        return _entry(await self._channel.call(GET, wire.GetRequest(key=key), self._timeout))

    async def compare_and_set(self, key: str, value: bytes, token: bytes | None) -> SwapResult:
        request = wire.SetRequest(key=key, value=value, token=token or b"")
        reply = await self._channel.call(COMPARE_AND_SET, request, self._timeout)
        return SwapResult(_entry(reply.entry), reply.done)


def _message(entry: RegisterEntry | None) -> wire.Entry:
    return wire.Entry(token=entry.token, value=entry.value) if entry else wire.Entry()


def _entry(message: wire.Entry) -> RegisterEntry | None:
    return RegisterEntry(message.value, message.token) if message.token else None
