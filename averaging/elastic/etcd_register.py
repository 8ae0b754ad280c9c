"""A register in etcd 3, over etcd's own gRPC API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from averaging.elastic.grpc_register import CALL_SECONDS
from averaging.elastic.register import Entry, Written
from averaging.errors import AveragingError, PeerUnreachableError, ProtocolViolationError
from averaging.rpc import RpcChannel, RpcMethod
from averaging.wire.etcd_pb2 import (
    Compare,
    KeyValue,
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

PREFIX = b"averaging/"

Reply = TypeVar("Reply")


class EtcdRegister:
    """The register in an etcd cluster. A token is the revision in which the entry was written.

    Args:
        channels: One channel per member; the member that answered last is called first.
        timeout: Seconds for one call.
    """

    def __init__(self, channels: Sequence[RpcChannel], timeout: float = CALL_SECONDS) -> None:
        self._channels = list(channels)
        self._timeout = timeout

    async def get(self, key: str) -> Entry | None:
        """See `Register`. Reads of etcd are linearizable by default."""
        request = RangeRequest(key=_name(key))
        return _entry((await self._ask(lambda channel: channel.call(RANGE, request, self._timeout))).kvs)

    async def compare_and_set(self, key: str, value: bytes, token: bytes | None) -> Written:
        """See `Register`."""
        name = _name(key)
        if token is None:
            condition = Compare(target=Compare.CREATE, key=name, create_revision=0)
        else:
            condition = Compare(target=Compare.MOD, key=name, mod_revision=int.from_bytes(token, "big"))
        request = TxnRequest(
            compare=[condition],
            success=[RequestOp(request_put=PutRequest(key=name, value=value))],
            failure=[RequestOp(request_range=RangeRequest(key=name))],
        )
        # Only one member is called: a write with an unknown result must not be repeated without a check.
        reply = await self._once(lambda channel: channel.call(TXN, request, self._timeout))
        if reply.succeeded:
            return Written(Entry(value, reply.header.revision.to_bytes(8, "big")), done=True)
        if not reply.responses:
            raise ProtocolViolationError(f"{self._channels[0].endpoint} answered a transaction with nothing")
        return Written(_entry(reply.responses[0].response_range.kvs), done=False)

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
        raise PeerUnreachableError("etcd", f"no member answers ({reasons})", definite=definite)

    async def _once(self, call: Callable[[RpcChannel], Awaitable[Reply]]) -> Reply:
        try:
            return await call(self._channels[0])
        except AveragingError:
            self._channels.append(self._channels.pop(0))
            raise


def _name(key: str) -> bytes:
    return PREFIX + key.encode()


def _entry(found: Sequence[KeyValue]) -> Entry | None:
    return Entry(found[0].value, found[0].mod_revision.to_bytes(8, "big")) if found else None
