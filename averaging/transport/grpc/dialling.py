"""Whom a transport dials: not every address that a stranger puts into discovery is one where a peer can be."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection

from averaging.common.addresses import is_loopback, objection, parse_address, parse_ip
from averaging.errors import ProtocolViolationError

RESOLVE_SECONDS = 3.0
"""For the look-up of a name before it is dialled; if that fails, gRPC tries itself and says why it cannot."""


class Dialling:
    """The rule of one transport.

    Args:
        given: endpoints that the user named; those are dialled whatever they are.

    Attributes:
        loopback: whether peers of the run may be on this machine's loopback.
    """

    def __init__(self, given: Collection[str] = (), *, loopback: bool = True) -> None:
        self._given = frozenset(given)
        self.loopback = loopback

    async def check(self, endpoint: str) -> None:
        """Returns if `endpoint`, which is HOST:PORT, may be dialled.

        Between this look-up of a name and gRPC's own its owner can change its addresses.

        Raises:
            ProtocolViolationError: it may not.
        """
        if endpoint in self._given:
            return
        host = parse_address(endpoint)[0]
        for address in (host, *await resolve(host)):
            reason = objection(address, loopback=self.loopback)
            if reason is not None:
                where = host if address == host else f"{host} is {address}, and that"
                raise ProtocolViolationError(
                    f"{endpoint} is not dialled: {where} is {reason}; where that is wanted, name it in `join`"
                )


async def resolve(host: str) -> tuple[str, ...]:
    """The addresses of a name; none if `host` is an address itself, or is not found."""
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
