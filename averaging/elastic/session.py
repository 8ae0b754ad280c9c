"""The register of one node: its channels, the register itself if the node hosts it, and the addresses of the node."""

from __future__ import annotations

import logging
import socket
from contextlib import AsyncExitStack, suppress
from typing import NamedTuple, Self

from averaging.common import is_loopback, parse_address
from averaging.elastic.etcd_register import EtcdRegister
from averaging.elastic.options import RendezvousOptions
from averaging.elastic.register import GrpcRegister, Register, RegisterEntry, RegisterService, SwapResult
from averaging.errors import ClosedError, ListenError, PeerUnreachableError
from averaging.rpc import Credentials, RpcChannel, RpcServer

# Which addresses are this machine's, and which of them other nodes can call.


class _Address(NamedTuple):
    """An address; `zone` has the flow and the interface of an IPv6 address."""

    family: socket.AddressFamily
    host: str
    zone: tuple[int, ...] = ()


_NOBODYS = {
    socket.AF_INET: _Address(socket.AF_INET, "240.0.0.1"),
    socket.AF_INET6: _Address(socket.AF_INET6, "100::1"),
}
"""Addresses that no machine has (reserved, and for discarding). If a socket can be bound to them, it can be to any."""


def is_own(host: str) -> bool:
    """Whether `host`, a name or an address without brackets, is an address of one of this machine's interfaces."""
    return any(_can_bind(address) and not _can_bind(_NOBODYS[address.family]) for address in _resolved(host))


def are_same(host: str, other: str) -> bool:
    """Whether two names or addresses without brackets are the same machine's."""
    return host == other or not _resolved(host).isdisjoint(_resolved(other))


def has_ipv4(host: str) -> bool:
    """Whether `host` is an IPv4 address, or a name that has one."""
    return any(address.family is socket.AF_INET for address in _resolved(host))


def address_for_others(register: str) -> str | None:
    """At which address other nodes can call this machine; None for its name.

    It is the name if the register is given by name too, and if the name is not that of a loopback address, as 127.0.1.1
    on Debian. Otherwise it is the address from which this machine calls the register.

    Args:
        register: name or address of the register, without brackets.
    """
    if is_loopback(register):
        return "127.0.0.1"  # all nodes are on this machine, and may not resolve its name
    by_name = not _is_address(register)
    if by_name and any(not is_loopback(address.host) for address in _resolved(socket.getfqdn())):
        return None
    for address in _resolved(register):
        with suppress(OSError), socket.socket(address.family, socket.SOCK_DGRAM) as probe:
            probe.connect((address.host, 9, *address.zone))  # sends nothing
            own: str = probe.getsockname()[0]
            if not is_loopback(own):
                return own
    return None


def _resolved(host: str) -> frozenset[_Address]:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(
        _Address(family, str(where[0]), tuple(map(int, where[2:])))
        for family, _, _, _, where in addresses
        if family in _NOBODYS
    )


def _can_bind(address: _Address) -> bool:
    try:
        with socket.socket(address.family, socket.SOCK_STREAM) as probe:
            probe.bind((address.host, 0, *address.zone))
    except OSError:
        return False
    return True


def _is_address(host: str) -> bool:
    with suppress(OSError):
        return bool(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST))
    return False


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
        """See `Register`."""
        try:
            return await self._open.get(key)
        except PeerUnreachableError as error:
            await self._take_over(error)
            return await self._open.get(key)

    async def compare_and_set(self, key: str, value: bytes, token: bytes | None) -> SwapResult:
        """See `Register`."""
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
        everywhere = f"{'0.0.0.0' if has_ipv4(host.strip('[]')) else '[::]'}:{port}"  # noqa: S104 - with TLS, or where the user says so
        listen, advertise = (endpoint, None) if is_loopback(host) else (everywhere, endpoint)
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
