"""Calls an etcd 3 cluster over etcd's own gRPC API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from averaging.errors import AveragingError, PeerUnreachableError, ProtocolViolationError
from averaging.transport import RpcMethod
from averaging.transport.grpc.rpc_channel import RpcChannel
from averaging.wire.etcd_pb2 import (
    KeyValue,
    LeaseGrantRequest,
    LeaseGrantResponse,
    LeaseKeepAliveRequest,
    LeaseKeepAliveResponse,
    LeaseRevokeRequest,
    LeaseRevokeResponse,
    PutRequest,
    PutResponse,
    RangeRequest,
    RangeResponse,
    TxnRequest,
    TxnResponse,
)

MESSAGE_BYTES = 4 << 20

RANGE = RpcMethod("/etcdserverpb.KV/Range", RangeRequest, RangeResponse)
PUT = RpcMethod("/etcdserverpb.KV/Put", PutRequest, PutResponse, max_request_bytes=MESSAGE_BYTES)
TXN = RpcMethod("/etcdserverpb.KV/Txn", TxnRequest, TxnResponse, max_request_bytes=MESSAGE_BYTES)
GRANT = RpcMethod("/etcdserverpb.Lease/LeaseGrant", LeaseGrantRequest, LeaseGrantResponse)
REVOKE = RpcMethod("/etcdserverpb.Lease/LeaseRevoke", LeaseRevokeRequest, LeaseRevokeResponse)
KEEP_ALIVE = RpcMethod(
    "/etcdserverpb.Lease/LeaseKeepAlive",
    LeaseKeepAliveRequest,
    LeaseKeepAliveResponse,
    requests_stream=True,
    replies_stream=True,
)

Reply = TypeVar("Reply")


class EtcdCluster:
    """The members of a cluster; the one that answered last is called first.

    All methods raise an AveragingError if no member answers, or if one refuses.

    Args:
        channels: one channel per member.
        timeout: seconds for one call.
    """

    def __init__(self, channels: Sequence[RpcChannel], timeout: float) -> None:
        self._channels = list(channels)
        self._timeout = timeout

    async def read(self, key: bytes) -> KeyValue | None:
        """Returns the value of a key; None if there is none. Reads of etcd are linearizable by default."""
        request = RangeRequest(key=key)
        pairs = (await self._ask(lambda channel: channel.call(RANGE, request, self._timeout))).kvs
        return pairs[0] if pairs else None

    async def read_all(self, prefix: bytes, limit: int) -> Sequence[KeyValue]:
        """Returns at most `limit` values whose keys begin with `prefix`, which ends with a byte below 255."""
        end = prefix[:-1] + bytes([prefix[-1] + 1])
        request = RangeRequest(key=prefix, range_end=end, limit=limit)
        return (await self._ask(lambda channel: channel.call(RANGE, request, self._timeout))).kvs

    async def write(self, key: bytes, value: bytes, lease: int) -> None:
        """Writes a value that goes with its lease."""
        request = PutRequest(key=key, value=value, lease=lease)
        await self._ask(lambda channel: channel.call(PUT, request, self._timeout))

    async def transact(self, request: TxnRequest) -> TxnResponse:
        """Calls one member only: a write with an unknown result must not be repeated without a check."""
        reply = await self._once(lambda channel: channel.call(TXN, request, self._timeout))
        if not reply.succeeded and not reply.responses:
            raise ProtocolViolationError(f"{self._channels[0].endpoint} answered a transaction with nothing")
        return reply

    async def grant(self, seconds: float) -> int:
        """Returns a new lease that lasts for this time."""
        request = LeaseGrantRequest(TTL=max(1, round(seconds)))
        return (await self._ask(lambda channel: channel.call(GRANT, request, self._timeout))).ID

    async def keep_alive(self, lease: int) -> bool:
        """Renews a lease; returns False if it has ended."""
        return (await self._ask(lambda channel: self._renew(channel, lease))).TTL > 0

    async def revoke(self, lease: int) -> None:
        """Ends a lease, with all that was written under it."""
        request = LeaseRevokeRequest(ID=lease)
        await self._ask(lambda channel: channel.call(REVOKE, request, self._timeout))

    async def _renew(self, channel: RpcChannel, lease: int) -> LeaseKeepAliveResponse:
        async def request() -> AsyncIterator[LeaseKeepAliveRequest]:
            yield LeaseKeepAliveRequest(ID=lease)

        try:
            async with asyncio.timeout(self._timeout), aclosing(channel.stream(KEEP_ALIVE, request())) as replies:
                async for reply in replies:
                    return reply
        except TimeoutError:
            raise PeerUnreachableError(channel.endpoint, f"no answer within {self._timeout:g} s") from None
        raise ProtocolViolationError("answered a renewal with nothing", channel.endpoint)

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
