"""Decides which addresses a transport dials: an address from discovery may be one at which no peer can be."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection

from averaging.common.addresses import is_loopback, objection, parse_address, parse_ip
from averaging.errors import ProtocolViolationError

RESOLVE_SECONDS = 3.0
"""Timeout of the look-up of a host name before it is dialled. If it fails, gRPC tries itself and reports the error."""


class Dialling:
    """The rule for one transport.

    Args:
        given: endpoints named by the user, which are always dialled.

    Attributes:
        loopback: whether peers of the run may be on this machine's loopback.
    """

    def __init__(self, given: Collection[str] = (), *, loopback: bool = True) -> None:
        self._given = frozenset(given)
        self.loopback = loopback

    async def check(self, endpoint: str) -> None:
        """Checks that `endpoint`, HOST:PORT, may be dialled.

        The owner of a name can still change its addresses between this look-up and gRPC's.

        Raises:
            ProtocolViolationError: it must not be dialled.
        """
        if endpoint not in self._given:
            await self.addresses(endpoint)

    async def addresses(self, endpoint: str) -> tuple[str, ...]:
        """Returns the addresses of `endpoint`, HOST:PORT, at which it may be dialled; none if its name is not found.

        Raises:
            ProtocolViolationError: it must not be dialled.
        """
        host = parse_address(endpoint)[0]
        found = await resolve(host)
        for address in () if endpoint in self._given else (host, *found):
            reason = objection(address, loopback=self.loopback)
            if reason is not None:
                where = host if address == host else f"{host} is {address}, and that"
                raise ProtocolViolationError(
                    f"{endpoint} is not dialled: {where} is {reason}; to dial it anyway, name it in `join`"
                )
        return found or (() if parse_ip(host) is None else (host.strip("[]"),))


async def resolve(host: str) -> tuple[str, ...]:
    """Returns the addresses of a host name; none if `host` is an address or is not found."""
    if parse_ip(host) is not None:
        return ()
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # TimeoutError is an OSError
        return ()
    return tuple(dict.fromkeys(str(where[0]) for *_, where in found))


async def is_on_loopback(hosts: Collection[str]) -> bool:
    """Whether a peer with these hosts can be reached through this machine's loopback."""
    for host in hosts:
        if any(map(is_loopback, (host, *await resolve(host)))):
            return True
    return False
