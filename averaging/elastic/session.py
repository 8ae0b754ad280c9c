"""The register of one node: its channels, and the register itself if the node hosts it."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from typing import Self

from averaging.common import every_address, is_loopback, parse_address
from averaging.elastic.etcd_register import EtcdRegister
from averaging.elastic.options import RendezvousOptions
from averaging.elastic.register import GrpcRegister, Register, RegisterEntry, RegisterService, SwapResult
from averaging.errors import ClosedError, ListenError, PeerUnreachableError
from averaging.rpc import Credentials, RpcChannel, RpcServer

logger = logging.getLogger("averaging.elastic")


class RegisterSession:
    """An async context manager, and the job's `Register`.

    Args:
        options: The address of the register.
        credentials: Certificates and tokens.
        may_host: Whether the endpoint is an address of this machine, so that this node can host the register.
    """

    def __init__(self, options: RendezvousOptions, credentials: Credentials, *, may_host: bool) -> None:
        self._options, self._credentials = options, credentials
        self._may_host = may_host
        self._stack = AsyncExitStack()
        self._register: Register | None = None
        self.hosted: str | None = None
        """The endpoint of the register if this node hosts it."""

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
        try:
            return await self._open.get(key)
        except PeerUnreachableError as error:
            await self._take_over(error)
            return await self._open.get(key)

    async def compare_and_set(self, key: str, value: bytes, token: bytes | None) -> SwapResult:
        try:
            return await self._open.compare_and_set(key, value, token)
        except PeerUnreachableError as error:
            await self._take_over(error)
            return await self._open.compare_and_set(key, value, token)

    @property
    def _open(self) -> Register:
        if self._register is None:
            raise ClosedError("the rendezvous has been shut down")
        return self._register

    async def _take_over(self, error: PeerUnreachableError) -> None:
        """Hosts the register after the loss of the process of this machine that hosted it.

        Raises:
            PeerUnreachableError: `error`, if this node cannot host it.
        """
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
