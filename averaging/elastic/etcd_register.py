"""A register in etcd 3."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from averaging.elastic.register import CALL_SECONDS, LIFETIME, RegisterEntry, SwapResult
from averaging.errors import AveragingError
from averaging.rpc import RpcChannel
from averaging.transport.grpc import EtcdCluster
from averaging.wire.etcd_pb2 import Compare, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest

PREFIX = b"averaging/"


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
        self._cluster = EtcdCluster(channels, timeout)
        self._lifetime, self._monotonic = lifetime, monotonic
        self._lease: tuple[int, float] | None = None  # and when it is replaced

    async def get(self, key: str) -> RegisterEntry | None:
        return _entry(await self._cluster.read(_name(key)))

    async def compare_and_set(self, key: str, value: bytes, token: bytes | None) -> SwapResult:
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
        try:
            reply = await self._cluster.transact(request)
        except AveragingError:
            self._lease = None  # it may have ended while this machine slept
            raise
        if reply.succeeded:
            return SwapResult(RegisterEntry(value, reply.header.revision.to_bytes(8, "big")), done=True)
        present = reply.responses[0].response_range.kvs
        return SwapResult(_entry(present[0] if present else None), done=False)

    async def _present_lease(self) -> int:
        now = self._monotonic()
        if self._lease is None or now >= self._lease[1]:
            self._lease = await self._cluster.grant(2 * self._lifetime), now + self._lifetime
        return self._lease[0]


def _name(key: str) -> bytes:
    return PREFIX + key.encode()


def _entry(pair: KeyValue | None) -> RegisterEntry | None:
    return None if pair is None else RegisterEntry(pair.value, pair.mod_revision.to_bytes(8, "big"))
