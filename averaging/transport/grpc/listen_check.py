"""Whether a peer can listen where it is told to, asked before gRPC is, whose own answer names no reason."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Sequence
from itertools import chain

from averaging.common.addresses import is_loopback, parse_address, parse_ip
from averaging.errors import ConfigError, ListenError
from averaging.transport.grpc.dialling import resolve

logger = logging.getLogger("averaging.transport")

_REMEDIES = {
    errno.EADDRINUSE: "the port is taken; end the program that holds it, or choose another port (0 takes a free one)",
    errno.EADDRNOTAVAIL: "this machine has no such address; listen on one that it has, or on 0.0.0.0 with `advertise`",
    errno.EACCES: "this user may not take that port; choose one above 1023",
    errno.EINVAL: "the system takes no such address; a link-local one needs its interface, as in [fe80::7%eth0]:4222",
    errno.EAFNOSUPPORT: "this machine does not speak that address family",
}


async def check_listen(address: str, advertise: str | None, *, exposed: bool = True) -> None:
    """Returns if `address` can be listened on at this moment.

    Args:
        address: `host:port` to listen on.
        advertise: at which others reach this peer, if that differs.
        exposed: whether other machines may connect.

    Raises:
        ListenError: it cannot; the error says why and what to do.
        ConfigError: others cannot dial it, or not the address that is advertised instead; or they can and may not.
    """
    host, port = parse_address(address)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ListenError(
            f"cannot listen on {address}: {host} is unknown ({error}); give one of this machine's addresses"
        ) from None
    hosts = [str(where[0]) for *_, where in found]
    if advertise is not None and _is_wildcard(parse_address(advertise)[0]):
        raise ConfigError(f"others cannot dial {advertise}; advertise HOST:PORT at which they reach this peer")
    if advertise is None and any(map(_is_wildcard, hosts)):
        raise ConfigError(
            f"{address} means all addresses of this machine, which others cannot dial; "
            "give `advertise` as well, HOST:PORT at which they reach this peer (port 0 for the one listened on)"
        )
    if not exposed and not all(map(is_loopback, hosts)):
        raise ConfigError(
            f"other machines can connect to {address}, and nothing would keep them from reading and changing what the "
            "peers say: give tls_ca, tls_cert and tls_key (`averaging ca` makes them), or insecure=True where every "
            "machine that can connect is to be trusted"
        )
    failures = [failure for family, _, _, _, where in found if (failure := _try_to_bind(family, where))]
    taken = any(failure.errno == errno.EADDRINUSE for failure in failures)
    if taken or len(failures) == len(found):
        failure = failures[0]
        number = errno.EADDRINUSE if taken else failure.errno
        reason = _REMEDIES.get(number or 0, f"{failure.strerror}; choose another address")
        raise ListenError(f"cannot listen on {address}: {reason}")


async def warn_of_loopback(listen: str, join: Sequence[str]) -> None:
    """Says so if this peer, which advertises no other address, listens where those whom it joins never call it.

    Of somebody who joins nobody that can be said only if it listens under a name: many machines have their own as a
    loopback address in /etc/hosts.
    """
    host = parse_address(listen)[0]
    own = await resolve(host) or (host,)
    if not all(map(is_loopback, own)):
        return
    places = [parse_address(endpoint)[0] for endpoint in join]
    found = await asyncio.gather(*map(resolve, places))
    if any(map(is_loopback, chain(places, *found))) or (is_loopback(host) and not join):
        return
    logger.warning(
        "this peer listens on %s%s, where only peers on loopback addresses call it%s. Listen on an address that others "
        "reach, advertise one that leads here, or take part in client mode, which needs none",
        *(listen, "" if is_loopback(host) else f", and {host} is {own[0]} here"),
        f", and {', '.join(join)} {'is' if len(join) == 1 else 'are'} on none" if join else "",
    )


def _is_wildcard(host: str) -> bool:
    address = parse_ip(host)
    return address is not None and address.is_unspecified


def _try_to_bind(family: int, where: tuple[object, ...]) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: connections that ended a moment ago do not hold the port. It does not listen, so that
            # nobody is connected to it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error
    return None


def endpoint_of(listen: str, advertise: str | None, port: int) -> str:
    """The name under which others reach a peer that has taken `port`."""
    host, told = parse_address(advertise or listen)
    return f"{host}:{told if advertise and told else port}"
