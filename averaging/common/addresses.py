"""Parses addresses, and decides which a peer may dial and which a certificate covers. Pure."""

from __future__ import annotations

import ipaddress
import uuid
from collections.abc import Collection, Iterable

from averaging.errors import ConfigError

CLIENT_PREFIX = "client::"
"""Prefix of the endpoint of a client, which is never dialled."""

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
