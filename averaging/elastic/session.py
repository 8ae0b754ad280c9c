"""The register of one node: its channels, and the register itself if the node hosts it, or that in etcd."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Self, TypeVar

from averaging.common import every_address, is_loopback, parse_address
from averaging.elastic.options import RendezvousOptions
from averaging.elastic.register import (
    CALL_SECONDS,
    LIFETIME,
    GrpcRegister,
    Register,
    RegisterEntry,
    RegisterService,
    SwapResult,
)
from averaging.errors import AveragingError, ClosedError, ListenError, PeerUnreachableError
from averaging.rpc import Credentials, RpcChannel, RpcServer
from averaging.transport.grpc import EtcdCluster
from averaging.wire.etcd_pb2 import Compare, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest

PREFIX = b"averaging/"
Result = TypeVar("Result")

logger = logging.getLogger("averaging.elastic")


class EtcdRegister:
    """The register in an etcd cluster. A token is the revision in which the entry was written.

    An entry goes when `lifetime` to twice that has passed since its last write, with the lease that it was given then.
    Each member of the cluster has a channel; the one that answered last is called first.
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
        return _etcd_entry(await self._cluster.read(_name(key)))

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
        return SwapResult(_etcd_entry(present[0] if present else None), done=False)

    async def _present_lease(self) -> int:
        now = self._monotonic()
        if self._lease is None or now >= self._lease[1]:
            self._lease = await self._cluster.grant(2 * self._lifetime), now + self._lifetime
        return self._lease[0]


def _name(key: str) -> bytes:
    return PREFIX + key.encode()


def _etcd_entry(pair: KeyValue | None) -> RegisterEntry | None:
    return None if pair is None else RegisterEntry(pair.value, pair.mod_revision.to_bytes(8, "big"))


class RegisterSession:
    """An async context manager, and the job's `Register`, which this node can host if `may_host`."""

    def __init__(self, options: RendezvousOptions, credentials: Credentials, *, may_host: bool) -> None:
        self._options, self._credentials = options, credentials
        self._may_host = may_host
        self._stack = AsyncExitStack()
        self._register: Register | None = None
        self.hosted: str | None = None  # the endpoint of the register if this node hosts it

    async def __aenter__(self) -> Self:
        async with self._stack as stack:
            if self._options.etcd:
                # etcd does not use the run's token, which only authenticates the values.
                credentials = Credentials(tls=self._credentials.tls)
                channels = [
                    await stack.enter_async_context(RpcChannel(endpoint, credentials=credentials))
                    for endpoint in self._options.endpoints
                ]
                self._register = EtcdRegister(channels)
            else:
                await self._host(stack)
                channel = RpcChannel(self.hosted or self._options.endpoints[0], credentials=self._credentials)
                self._register = GrpcRegister(await stack.enter_async_context(channel))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._register = None
        await self._stack.aclose()

    async def get(self, key: str) -> RegisterEntry | None:
        return await self._call(lambda register: register.get(key))

    async def compare_and_set(self, key: str, value: bytes, token: bytes | None) -> SwapResult:
        return await self._call(lambda register: register.compare_and_set(key, value, token))

    async def _call(self, call: Callable[[Register], Awaitable[Result]]) -> Result:
        try:
            return await call(self._open)
        except PeerUnreachableError as error:
            await self._take_over(error)
            return await call(self._open)

    @property
    def _open(self) -> Register:
        if self._register is None:
            raise ClosedError("the rendezvous has been shut down")
        return self._register

    async def _take_over(self, error: PeerUnreachableError) -> None:
        """Hosts the register after the loss of the process of this machine that hosted it, or raises `error`."""
        if not error.refused or self.hosted or self._options.etcd or not await self._host(self._stack):
            raise error

    async def _host(self, stack: AsyncExitStack) -> bool:
        """Hosts the register if possible; returns whether this node hosts it now."""
        if not self._may_host:
            return False
        endpoint = self._options.endpoints[0]
        host, port = parse_address(endpoint)
        listen, advertise = endpoint, None
        if not is_loopback(host):
            listen, advertise = f"{every_address(host.strip('[]'))}:{port}", endpoint
        server = RpcServer(
            listen, [RegisterService()], advertise=advertise, credentials=self._credentials, max_message_bytes=8 << 20
        )
        try:
            await stack.enter_async_context(server)
        except ListenError as error:
            logger.debug("this node does not host the register: %s", error)
            return False
        self.hosted = server.endpoint
        logger.info("this node hosts the register at %s", self.hosted)
        return True
