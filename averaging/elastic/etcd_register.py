"""A register in etcd 3, over etcd's own gRPC API."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from averaging.elastic.register import CALL_SECONDS, LIFETIME, RegisterEntry, SwapResult
from averaging.errors import AveragingError, PeerUnreachableError, ProtocolViolationError
from averaging.rpc import RpcChannel, RpcMethod
from averaging.wire.etcd_pb2 import (
    Compare,
    KeyValue,
    LeaseGrantRequest,
    LeaseGrantResponse,
    PutRequest,
    RangeRequest,
    RangeResponse,
    RequestOp,
    TxnRequest,
    TxnResponse,
)

MESSAGE_BYTES = 4 << 20

RANGE = RpcMethod("/etcdserverpb.KV/Range", RangeRequest, RangeResponse)
TXN = RpcMethod("/etcdserverpb.KV/Txn", TxnRequest, TxnResponse, max_request_bytes=MESSAGE_BYTES)
LEASE = RpcMethod("/etcdserverpb.Lease/LeaseGrant", LeaseGrantRequest, LeaseGrantResponse)

PREFIX = b"averaging/"

Reply = TypeVar("Reply")


class EtcdRegister:
    """The register in an etcd cluster. A token is the revision in which the entry was written.

    An entry goes when `lifetime` to twice that has passed since its last write, with the lease that it was given then.

    Args:
        channels: One channel per member; the member that answered last is called first.
        timeout: Seconds for one call.
        lifetime: Seconds for which an entry is kept at least.
        monotonic: A monotonic clock in seconds.
    """

    def __init__(
        self,
        channels: Sequence[RpcChannel],
        timeout: float = CALL_SECONDS,
        *,
        lifetime: float = LIFETIME,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channels = list(channels)
        self._timeout, self._lifetime = timeout, lifetime
        self._monotonic = monotonic
        self._lease: tuple[int, float] | None = None  # and when it is replaced

    async def get(self, key: str) -> RegisterEntry | None:
        """See `Register`. Reads of etcd are linearizable by default."""
        request = RangeRequest(key=_name(key))
        return _entry((await self._ask(lambda channel: channel.call(RANGE, request, self._timeout))).kvs)

    async def compare_and_set(self, key: str, value: bytes, token: bytes | None) -> SwapResult:
        """See `Register`."""
        name, lease = _name(key), await self._present_lease()
        if token is None:
            condition = Compare(target=Compare.CREATE, key=name, create_revision=0)
        else:
            condition = Compare(target=Compare.MOD, key=name, mod_revision=int.from_bytes(token, "big"))
        request = TxnRequest(
            compare=[condition],
            success=[RequestOp(request_put=PutRequest(key=name, value=value, lease=lease))],
            failure=[RequestOp(request_range=RangeRequest(key=name))],
        )
        # Only one member is called: a write with an unknown result must not be repeated without a check.
        try:
            reply = await self._once(lambda channel: channel.call(TXN, request, self._timeout))
        except AveragingError:
            self._lease = None  # it may have ended while this machine slept
            raise
        if reply.succeeded:
            return SwapResult(RegisterEntry(value, reply.header.revision.to_bytes(8, "big")), done=True)
        if not reply.responses:
            raise ProtocolViolationError(f"{self._channels[0].endpoint} answered a transaction with nothing")
        return SwapResult(_entry(reply.responses[0].response_range.kvs), done=False)

    async def _present_lease(self) -> int:
        now = self._monotonic()
        if self._lease is None or now >= self._lease[1]:
            request = LeaseGrantRequest(TTL=round(2 * self._lifetime))
            granted = await self._ask(lambda channel: channel.call(LEASE, request, self._timeout))
            self._lease = granted.ID, now + self._lifetime
        return self._lease[0]

    async def _ask(self, call: Callable[[RpcChannel], Awaitable[Reply]]) -> Reply:
        """Calls one member after the other, until one answers."""
        failures: list[PeerUnreachableError] = []
        for _ in self._channels:
            try:
                return await self._once(call)
            except PeerUnreachableError as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        reasons = "; ".join(str(error) for error in failures)
        definite = all(error.definite for error in failures)
        unknown_host = any(error.unknown_host for error in failures)
        text = f"no member answers ({reasons})"
        raise PeerUnreachableError("etcd", text, unknown_host=unknown_host, definite=definite)

    async def _once(self, call: Callable[[RpcChannel], Awaitable[Reply]]) -> Reply:
        try:
            return await call(self._channels[0])
        except AveragingError:
            self._channels.append(self._channels.pop(0))
            raise


def _name(key: str) -> bytes:
    return PREFIX + key.encode()


def _entry(pairs: Sequence[KeyValue]) -> RegisterEntry | None:
    return RegisterEntry(pairs[0].value, pairs[0].mod_revision.to_bytes(8, "big")) if pairs else None
