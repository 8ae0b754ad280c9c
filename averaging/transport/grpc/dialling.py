"""Decides which addresses a transport dials: an address from discovery may be one at which no peer can be."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain

from averaging.common import in_zone, is_loopback, objection, parse_address, parse_ip, spelled, zone_of
from averaging.errors import ConfigError, ListenError, ProtocolViolationError

RESOLVE_SECONDS = 3.0
"""Timeout of the look-up of a host name before it is dialled. If it fails, gRPC tries itself and reports the error."""

NAME_IT = "; to dial it anyway, name it among the peers to join"


@dataclass(eq=False)
class Dialling:  # the rule for one transport
    given: Collection[str] = ()  # endpoints named by the user, which are always dialled. It may change.
    # whether peers of the run may be on this machine's loopback; None if the given endpoints show it
    loopback: bool | None = True
    # interface of this machine that leads to peers with link-local addresses; None for that of a given endpoint.
    # Without any, no peer may have such an address.
    zone: str | None = None
    # for a given endpoint, the host for which its certificate must be valid, if that is another than its own
    names: Mapping[str, str] = field(default_factory=dict)
    remedy: str = NAME_IT  # end of the message about an address that is not dialled

    def reachable(self, endpoint: str) -> str:
        return endpoint if endpoint in self.given else in_zone(endpoint, self._zone())

    async def check(self, endpoint: str) -> None:
        """Checks that `endpoint` may be dialled; the owner of a name can still change it before gRPC looks it up."""
        if endpoint not in self.given:
            await self.addresses(endpoint)

    async def addresses(self, endpoint: str) -> tuple[str, ...]:
        """Returns the addresses of `endpoint`, HOST:PORT, at which it may be dialled; none if its name is not found."""
        host = parse_address(self.reachable(endpoint))[0]
        addresses = await resolve(host)
        for address in () if endpoint in self.given else (host, *addresses):
            reason = objection(address, loopback=self._on_loopback(), link_local=self._zone() is not None)
            if reason is not None:
                where = host if address == host else f"{host} is {address}, and that"
                raise ProtocolViolationError(f"is not dialled: {where} is {reason}{self.remedy}", endpoint)
        return addresses or (() if parse_ip(host) is None else (host.strip("[]"),))

    def _on_loopback(self) -> bool:
        if self.loopback is None:
            return not self.given or any(is_loopback(parse_address(endpoint)[0]) for endpoint in self.given)
        return self.loopback

    def _zone(self) -> str | None:
        return self.zone or next(filter(None, (zone_of(parse_address(endpoint)[0]) for endpoint in self.given)), None)


async def resolve(host: str) -> tuple[str, ...]:
    if parse_ip(host) is not None:
        return ()
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            resolved = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # TimeoutError is an OSError
        return ()
    return tuple(dict.fromkeys(str(where[0]) for *_, where in resolved))


async def is_on_loopback(hosts: Collection[str]) -> bool:
    for host in hosts:
        if any(map(is_loopback, (host, *await resolve(host)))):
            return True
    return False


# Checks that a peer can listen on its address, because gRPC's own error has no reason.


logger = logging.getLogger("averaging.transport")

_REMEDIES = {
    errno.EADDRINUSE: "the port is taken; end the program that uses it, or choose another port (0 for a free one)",
    errno.EADDRNOTAVAIL: "this machine has no such address; listen on one that it has, or on 0.0.0.0 (of IPv6: [::]) "
    "with {advertise}",
    errno.EACCES: "this user may not use that port; choose one above 1023",
    errno.EINVAL: "the system refuses this address; a link-local one needs its interface, as in [fe80::7%eth0]:4222",
    errno.EAFNOSUPPORT: "this machine does not support that address family",
}


async def check_listen(address: str, advertise: str | None, *, exposed: bool = True) -> None:
    """Checks that this process can listen on `address` now, and that other peers can dial it or `advertise`.

    The ListenError or ConfigError has the reason and the remedy. Other machines may connect only if it is `exposed`.
    """
    host, port = parse_address(address)
    try:
        resolved = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ListenError(
            f"cannot listen on {address}: {host} is unknown ({error}); give one of this machine's addresses"
        ) from None
    hosts = [str(where[0]) for *_, where in resolved]
    if advertise is not None and _is_wildcard(parse_address(advertise)[0]):
        raise ConfigError(f"other peers cannot dial {advertise}; advertise HOST:PORT at which they reach this peer")
    if advertise is None and any(map(_is_wildcard, hosts)):
        raise ConfigError(
            f"{address} means all addresses of this machine, which other peers cannot dial; give "
            f"{spelled('advertise')} as well, HOST:PORT at which they reach this peer (port 0 for the one listened "
            "on)"
        )
    if not exposed and not all(map(is_loopback, hosts)):
        raise ConfigError(
            f"other machines can connect to {address}, and without TLS they can read and change all traffic: give "
            f"{spelled('tls_ca')}, {spelled('tls_cert')} and {spelled('tls_key')} (`averaging ca` makes them), or "
            f"{spelled('insecure', True)} if every machine that can connect is trusted"
        )
    failures = [failure for family, _, _, _, where in resolved if (failure := _try_to_bind(family, where))]
    taken = any(failure.errno == errno.EADDRINUSE for failure in failures)
    if taken or len(failures) == len(resolved):
        failure = failures[0]
        number = errno.EADDRINUSE if taken else failure.errno
        reason = _REMEDIES.get(number or 0, f"{failure.strerror}; choose another address")
        reason = reason.replace("{advertise}", spelled("advertise"))
        raise ListenError(f"cannot listen on {address}: {reason}")


async def warn_of_loopback(listen: str, join: Collection[str]) -> None:
    """Logs a warning if this peer listens on loopback only, and the peers that it joins are elsewhere.

    If it joins no peer, it is warned only if it listens under a name: on many machines /etc/hosts maps the machine's
    name to a loopback address.
    """
    host = parse_address(listen)[0]
    own = await resolve(host) or (host,)
    if not all(map(is_loopback, own)):
        return
    hosts = [parse_address(endpoint)[0] for endpoint in join]
    addresses = await asyncio.gather(*map(resolve, hosts))
    if any(map(is_loopback, chain(hosts, *addresses))) or (is_loopback(host) and not join):
        return
    logger.warning(
        "this peer listens on %s%s, where only peers on this machine can call it%s. Listen on an address that other "
        "peers can reach, advertise one that is forwarded to this peer, or use client mode, which needs none",
        *(listen, "" if is_loopback(host) else f", and {host} is {own[0]} here"),
        f", and {', '.join(join)} {'is' if len(join) == 1 else 'are'} elsewhere" if join else "",
    )


def _is_wildcard(host: str) -> bool:
    address = parse_ip(host)
    return address is not None and address.is_unspecified


def _try_to_bind(family: int, where: tuple[object, ...]) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does, so that recently closed connections do not block the port. The probe does not listen, so no
            # peer can connect to it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error
    return None
