"""Addresses: how they are read, which a peer may dial, which are this machine's, and the proxy for outgoing calls.

Variables such as HTTPS_PROXY are set on many machines for web browsing, and their proxies let no calls between peers
through. So they are not used, and errors and the log say so.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from averaging.errors import ConfigError

CLIENT_PREFIX = "client::"  # prefix of the endpoint of a client, which is never dialled
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

OPENSTACK_METADATA = ipaddress.IPv6Address("fe80::a9fe:a9fe")
"""The metadata service of OpenStack: the only one at a link-local address of IPv6."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        (
            "100.100.100.200",  # Alibaba
            "168.63.129.16",  # Azure
            "192.0.0.192",  # Oracle
            "fd00:ec2::254",  # Amazon
            "fd20:ce::254",  # Google
        ),
    )
)
"""Metadata services of clouds, which hand out credentials, besides the link-local 169.254.169.254."""


def parse_address(address: str) -> tuple[str, int]:
    """Splits `host:port`, or raises a ConfigError; an IPv6 host must be in brackets, which the result keeps."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    valid_host = bool(name) and host.isprintable() and not set(name) & set(" /[]@" if bracketed else " :/[]@")
    # isdecimal() alone would accept digits of other scripts.
    valid_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not colon or not valid_host or not valid_port:
        raise ConfigError(
            f"{address[:100]!r} is not an address; give HOST:PORT, for example 192.0.2.7:4222 or [2001:db8::7]:4222"
        )
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Writes `host:port`, with brackets around an IPv6 address; the inverse of `parse_address`."""
    bare = host.removeprefix("[").removesuffix("]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def client_name(random_bytes: bytes) -> str:
    """The endpoint of a client: a UUID of version 4 from 16 random bytes."""
    return f"{CLIENT_PREFIX}{uuid.UUID(bytes=random_bytes, version=4)}"


def is_endpoint(name: str) -> bool:
    """Whether `name` is a valid endpoint: an address with a port above 0, or the name of a client."""
    if len(name) > 256 or not name.isprintable():
        return False
    if name.startswith(CLIENT_PREFIX):
        return True
    try:
        return parse_address(name)[1] > 0
    except ConfigError:
        return False


def parse_ip(host: str) -> Address | None:
    """The IP address in `host`, with or without brackets; None if `host` is a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def zone_of(host: str) -> str | None:
    """The interface of a link-local IPv6 address, such as eth0 in `fe80::7%eth0`; None for any other host."""
    address = parse_ip(host)
    if isinstance(address, ipaddress.IPv6Address) and address.is_link_local:
        return address.scope_id
    return None


def in_zone(endpoint: str, zone: str | None) -> str:
    """Replaces the interface in a link-local endpoint, a name of the other peer's machine, by `zone` of this one."""
    host, port = parse_address(endpoint)
    address = parse_ip(host)
    if zone is None or not isinstance(address, ipaddress.IPv6Address) or not address.is_link_local:
        return endpoint
    return f"[{_without_zone(address)}%{zone}]:{port}"


def _without_zone(address: Address) -> Address:
    return ipaddress.IPv6Address(int(address)) if isinstance(address, ipaddress.IPv6Address) else address


def _destination(host: str) -> Address | None:
    """The IP address that packets to `host` reach: some IPv6 addresses embed an IPv4 address."""
    address = parse_ip(host)
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address or a localhost name."""
    address = _destination(host)
    name = _normal(host)
    return address.is_loopback if address else name == "localhost" or name.endswith(".localhost")


def member_of(endpoint: str) -> str:
    """The host of a peer, where members are counted; empty for a client, whose host is unknown, which does not count.

    All loopback addresses are one host, and so is an IPv6 network of 64 bits that is not link-local.
    """
    if not is_endpoint(endpoint) or endpoint.startswith(CLIENT_PREFIX):
        return ""
    host = parse_address(endpoint)[0]
    if is_loopback(host):
        return "localhost"
    address = _destination(host)
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_link_local:
            return str(_without_zone(address))
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return _normal(host) if address is None else str(address)


def objection(host: str, *, loopback: bool, link_local: bool = False) -> str | None:
    """Why this peer must not dial `host` if another peer supplied the address; None if it may.

    Args:
        host: an address. A name must be resolved first, see `transport.grpc.dialling`.
        loopback: whether peers of this run may be on this machine's loopback interface.
        link_local: whether they may have link-local IPv6 addresses, because this peer has one itself.
    """
    address = _destination(host)
    if is_loopback(host):
        return None if loopback else "a loopback address, which is this machine"
    if address is None:
        return None
    if address.is_unspecified:
        return "the unspecified address"
    if address.is_multicast or address == ipaddress.IPv4Address("255.255.255.255"):
        return "a multicast address"
    if address.is_link_local:
        if link_local and address.version == 6 and _without_zone(address) != OPENSTACK_METADATA:
            return None
        return "a link-local address, used by the metadata services of clouds"
    return "the address of a cloud's metadata service" if address in _METADATA else None


def apart(own: str, other: str, given: Collection[str]) -> str:
    """Why two peers cannot average together, as far as their endpoints show; empty if they may.

    A name may lead to any address, so it is no reason, unless it is that of the loopback interface.
    """
    if not is_endpoint(other) or other.startswith(CLIENT_PREFIX):
        return ""
    there = parse_address(other)[0]
    if own.startswith(CLIENT_PREFIX):
        hosts = [parse_address(address)[0] for address in given]
    else:
        hosts = [parse_address(own)[0]]
    here, link_local = any(map(is_loopback, hosts)), any(zone_of(host) is not None for host in hosts)
    if here and parse_ip(there) is not None and not is_loopback(there) and not own.startswith(CLIENT_PREFIX):
        return (
            f"{other} is elsewhere and does not call {own}, a loopback address. Listen on an address that other peers "
            "can reach, advertise one that is forwarded to this peer, or use client mode"
        )
    reason = None if other in given else objection(there, loopback=here, link_local=link_local)
    return "" if reason is None else f"{other} is {reason}. Let that peer advertise an address that others can reach"


def covers(hosts: Iterable[str], host: str) -> bool:
    """Whether a certificate for `hosts` covers `host`. `*.example.org` covers exactly one label before the dot.

    The interface in a link-local address is that of one machine, so certificates have none.
    """
    address = parse_ip(host)
    if address is not None:
        addresses = (known for known in map(parse_ip, hosts) if known is not None)
        return any(_without_zone(known) == _without_zone(address) for known in addresses)
    name = _normal(host)
    _, dot, parent = name.partition(".")
    return any(_normal(known) in ({name, f"*.{parent}"} if dot else {name}) for known in hosts)


def _normal(name: str) -> str:
    return name.lower().rstrip(".")


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


PROXY_VARIABLE = "AVERAGING_PROXY"

IGNORED = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
"""Variables of other programs, in lower or upper case."""


def chosen_proxy(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the URL of the proxy in `AVERAGING_PROXY`, if there is one.

    Raises:
        ConfigError: it is none; the message does not repeat the password in it.
    """
    url = environ.get(PROXY_VARIABLE)
    if not url:
        return None
    try:
        parts = urlsplit(url)
        valid = parts.scheme == "http" and bool(parts.hostname) and bool(parts.port) and not parts.path.strip("/")
    except ValueError:
        valid = False
    if not valid or not url.isprintable() or len(url) > 1024:
        scheme, separator, _ = url.rpartition("@")[0].partition("://")
        shown = f"{scheme}{separator}{url.rpartition('@')[2]}"[:100] if separator else url.rpartition("@")[2][:100]
        form = "give http://HOST:PORT or http://USER:PASSWORD@HOST:PORT of one that allows CONNECT"
        raise ConfigError(f"{PROXY_VARIABLE}: {shown!r} is not an HTTP proxy; {form}")
    return url


def proxy_for(host: str, proxy: str | None) -> str | None:
    """Returns `proxy`, or None for the hosts that are always called directly: loopback, and those in NO_PROXY."""
    if proxy is None or is_loopback(host):
        return None
    from urllib.request import proxy_bypass  # it takes 20 ms to import, and few need it

    return None if proxy_bypass(host.strip("[]")) else proxy


def shown_proxy(proxy: str) -> str:
    return proxy.rpartition("@")[2].removeprefix("http://").rstrip("/")


def ignored_proxies(environ: Mapping[str, str] = os.environ) -> str:
    """A sentence about the proxy variables that are set and not used; empty if there are none, or one was asked for."""
    names = sorted(name for name, value in environ.items() if value and name.lower() in IGNORED)
    if not names or environ.get(PROXY_VARIABLE):
        return ""
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names)} {verb} set and not used; {PROXY_VARIABLE}=http://HOST:PORT would call through a proxy"
