"""Which addresses are this machine's, and at which of them other machines can call it."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import NamedTuple

from averaging.common.addresses import is_loopback, parse_address


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


def is_name_of(host: str, hostname: str, fqdn: str) -> bool:
    """Whether `host` names the machine with these names, also if no DNS has it yet. Pure.

    A pod's own names are `pod` and, from /etc/hosts, `pod.subdomain.namespace.svc.cluster.local`; it is called
    `pod.subdomain` and longer beginnings of that. `pod` alone does not count for `pod.other`.
    """
    name, own, full = (text.lower().rstrip(".") for text in (host, hostname, fqdn))
    return bool(name) and (name == own or f"{full}.".startswith(f"{name}."))


def every_address(host: str) -> str:
    """The address to listen on for calls to `host`; in a pod whose name is not known yet, for calls to its own name."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        host = socket.gethostname()
    return "0.0.0.0" if _has_ipv4(host) else "[::]"  # noqa: S104 - with TLS, or where the user says so


def are_same(host: str, other: str) -> bool:
    """Whether two names or addresses without brackets are the same machine's."""
    return host == other or not _resolved(host).isdisjoint(_resolved(other))


def _has_ipv4(host: str) -> bool:
    return any(address.family is socket.AF_INET for address in _resolved(host))


def loopback_here(address: str) -> str:
    """Returns `address`, HOST:PORT, with ::1 instead of 127.0.0.1 if this machine has no IPv4.

    So the defaults of options that listen on loopback work on such machines too.
    """
    host, port = parse_address(address)
    if host != "127.0.0.1" or _can_bind(_Address(socket.AF_INET, host)):
        return address
    return f"[::1]:{port}" if _can_bind(_Address(socket.AF_INET6, "::1")) else address


def address_for_others(register: str) -> str | None:
    """At which address other nodes can call this machine; None for its name.

    It is the name if the register is given by name too, and if the name is not that of a loopback address, as 127.0.1.1
    on Debian. Otherwise it is the address from which this machine calls the register.
    """
    if is_loopback(register):
        # All nodes are on this machine, and may not resolve its name.
        return parse_address(loopback_here("127.0.0.1:0"))[0].strip("[]")
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
