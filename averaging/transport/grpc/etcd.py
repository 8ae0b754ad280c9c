"""Calls an etcd 3 cluster over etcd's own gRPC API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

from averaging.errors import AveragingError, CallRefusedError, PeerUnreachableError, ProtocolViolationError, printable
from averaging.transport import (
    CompactedError,
    LeaseEndedError,
    RpcMethod,
    StoredChanges,
    StoredValue,
    StoredValues,
)
from averaging.transport.grpc.channels import RpcChannel
from averaging.wire.etcd_pb2 import (
    DeleteRangeRequest,
    Event,
    KeyValue,
    LeaseGrantRequest,
    LeaseGrantResponse,
    LeaseKeepAliveRequest,
    LeaseKeepAliveResponse,
    LeaseRevokeRequest,
    LeaseRevokeResponse,
    PutRequest,
    RangeRequest,
    RangeResponse,
    RequestOp,
    TxnRequest,
    TxnResponse,
    WatchCreateRequest,
    WatchRequest,
    WatchResponse,
)

MESSAGE_BYTES = 4 << 20

RANGE = RpcMethod("/etcdserverpb.KV/Range", RangeRequest, RangeResponse)
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
WATCH = RpcMethod("/etcdserverpb.Watch/Watch", WatchRequest, WatchResponse, requests_stream=True, replies_stream=True)

WATCH_HEADERS = (("hasleader", "true"),)
"""Ends a watch at a member that has lost the others: it would tell of no change any more."""

Reply = TypeVar("Reply")


class EtcdCluster:
    """The members of a cluster; the one that answered last is called first. Implements `KeyValueStore`.

    All methods raise an AveragingError if no member answers, or if one refuses.
    """

    def __init__(self, channels: Sequence[RpcChannel], timeout: float) -> None:
        self._channels = list(channels)
        self._timeout = timeout

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def read(self, key: bytes) -> KeyValue | None:
        """Returns the value of a key; None if there is none. Reads of etcd are linearizable by default."""
        request = RangeRequest(key=key)
        pairs = (await self._ask(lambda channel: channel.call(RANGE, request, self._timeout))).kvs
        return pairs[0] if pairs else None

    async def transact(self, request: TxnRequest) -> TxnResponse:
        """Calls one member only: a write with an unknown result must not be repeated without a check."""
        reply = await self._once(self._channels[0], lambda channel: channel.call(TXN, request, self._timeout))
        if not reply.succeeded and not reply.responses:
            raise ProtocolViolationError(f"{self._channels[0].endpoint} answered a transaction with nothing")
        return reply

    async def grant(self, seconds: float) -> int:
        request = LeaseGrantRequest(TTL=max(1, round(seconds)))
        return (await self._ask(lambda channel: channel.call(GRANT, request, self._timeout))).ID

    async def keep_alive(self, lease: int) -> bool:
        return (await self._ask(lambda channel: self._renew(channel, lease))).TTL > 0

    async def revoke(self, lease: int) -> None:
        request = LeaseRevokeRequest(ID=lease)
        await self._ask(lambda channel: channel.call(REVOKE, request, self._timeout))

    async def change(self, changes: Mapping[bytes, bytes | None], lease: int) -> int:
        operations = [
            RequestOp(request_delete_range=DeleteRangeRequest(key=key))
            if value is None
            else RequestOp(request_put=PutRequest(key=key, value=value, lease=lease))
            for key, value in changes.items()
        ]
        request = TxnRequest(success=operations)
        try:
            return (await self._ask(lambda channel: channel.call(TXN, request, self._timeout))).header.revision
        except CallRefusedError as error:
            if "lease not found" in error.reason:
                raise LeaseEndedError(str(error)) from None
            raise

    async def list_values(self, prefix: bytes, limit: int, start: bytes = b"") -> StoredValues:
        request = RangeRequest(key=max(prefix, start), range_end=_end(prefix), limit=limit)
        reply = await self._ask(lambda channel: channel.call(RANGE, request, self._timeout))
        return StoredValues(tuple(map(_stored, reply.kvs)), reply.header.revision, not reply.more)

    async def watch(self, prefix: bytes, after: int) -> AsyncGenerator[StoredChanges, None]:
        create = WatchCreateRequest(key=prefix, range_end=_end(prefix), start_revision=after + 1, progress_notify=True)

        async def request() -> AsyncIterator[WatchRequest]:
            yield WatchRequest(create_request=create)
            await asyncio.Event().wait()  # etcd ends a watch whose requests have ended

        channel = self._channels[0]
        try:
            async with aclosing(channel.stream(WATCH, request(), WATCH_HEADERS)) as replies:
                async for reply in replies:
                    if reply.compact_revision:
                        raise CompactedError(f"the changes before revision {reply.compact_revision} are forgotten")
                    if reply.canceled:
                        reason = printable(reply.cancel_reason, 200) or "no reason given"
                        raise PeerUnreachableError(channel.endpoint, f"it has ended a watch: {reason}")
                    if reply.created:
                        continue  # its revision may be later than that of changes that are still to come
                    changes = tuple(_change(event) for event in reply.events)
                    revision = reply.events[-1].kv.mod_revision if reply.events else reply.header.revision
                    yield StoredChanges(changes, revision)
        except PeerUnreachableError:
            self._put_last(channel)
            raise
        raise PeerUnreachableError(channel.endpoint, "it has ended a watch")

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
        for channel in tuple(self._channels):  # other calls may change their order meanwhile
            try:
                return await self._once(channel, call)
            except PeerUnreachableError as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        reasons = "; ".join(str(error) for error in failures)
        definite = all(error.definite for error in failures)
        unknown_host = any(error.unknown_host for error in failures)
        text = f"no member answers ({reasons})"
        raise PeerUnreachableError("etcd", text, unknown_host=unknown_host, definite=definite)

    async def _once(self, channel: RpcChannel, call: Callable[[RpcChannel], Awaitable[Reply]]) -> Reply:
        try:
            return await call(channel)
        except AveragingError:
            self._put_last(channel)
            raise

    def _put_last(self, channel: RpcChannel) -> None:
        if self._channels[0] is channel:
            self._channels.append(self._channels.pop(0))


def _end(prefix: bytes) -> bytes:
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _stored(pair: KeyValue) -> StoredValue:
    return StoredValue(pair.key, pair.value)


def _change(event: Event) -> StoredValue | bytes:
    return event.kv.key if event.type == Event.DELETE else _stored(event.kv)
