"""Which addresses are this machine's, as its interfaces and names say."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from averaging.common import address_for_others, addresses as own_addresses, are_same, is_name_of, is_own, loopback_here


def interfaces(monkeypatch: pytest.MonkeyPatch, own: set[str], names: dict[str, list[str]], fqdn: str) -> None:
    """A machine with these addresses, in a network with these names."""

    def resolves(host: str, *_: Any, flags: int = 0, **__: Any) -> list[Any]:
        found = names.get(host, [host] if set(host) <= set("0123456789abcdef.:") else [])
        if not found or (flags and host in names):
            raise socket.gaierror
        return [(family(address), 0, 0, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolves)
    monkeypatch.setattr(socket, "getfqdn", lambda: fqdn)
    monkeypatch.setattr(own_addresses, "_can_bind", lambda address: address.host in own)


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def test_an_endpoint_is_own_if_an_interface_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a Debian machine is that of 127.0.1.1 there, and none of its names has its other addresses."""
    own = {"10.0.0.5", "fd00::5", "127.0.0.1", "127.0.1.1"}
    names = {"a.example": ["10.0.0.5"], "a": ["127.0.1.1"], "b.example": ["10.0.0.6", "fd00::6"]}
    interfaces(monkeypatch, own, names, "a")
    assert all(map(is_own, ("10.0.0.5", "fd00::5", "a.example", "127.0.0.1", "a")))
    assert not any(map(is_own, ("10.0.0.6", "fd00::6", "b.example", "unknown.example")))


def test_where_any_address_can_be_bound_none_is_own_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """net.ipv4.ip_nonlocal_bind: each node would host the register, and no two would meet."""
    interfaces(monkeypatch, {"10.0.0.5", "240.0.0.1"}, {}, "a")
    assert not is_own("10.0.0.5")


POD = "site-node-0-1", "site-node-0-1.site.default.svc.cluster.local"


@pytest.mark.parametrize(
    ("host", "names", "own"),
    [
        ("site-node-0-1", POD, True),
        ("Site-Node-0-1.site.default.svc.", POD, True),
        ("site-node-0-1.site.default.svc.cluster.local", POD, True),
        ("site-node-0-10.site", POD, False),
        ("site-node-0-1.site", (POD[0], POD[0]), False),
        ("site-node-0-1.site", (POD[1], POD[1]), True),
    ],
)
def test_a_pod_knows_its_own_name_without_a_dns(host: str, names: tuple[str, str], own: bool) -> None:
    assert is_name_of(host, *names) is own


def test_names_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch, set(), {"a": ["10.0.0.5"], "a.example": ["10.0.0.5", "fd00::5"], "b": ["10.0.0.6"]}, "a")
    assert are_same("a", "a.example")
    assert are_same("10.0.0.5", "a")
    assert are_same("unknown", "unknown")
    assert not are_same("a", "b")
    assert not are_same("unknown", "b")


@pytest.mark.parametrize(
    ("register", "names", "address"),
    [
        ("127.0.0.1", {}, "127.0.0.1"),
        ("localhost", {}, "127.0.0.1"),
        ("a.example", {"a.example": ["10.0.0.5"], "me": ["10.0.0.7"]}, None),
        ("a.example", {"a.example": ["10.0.0.5"], "me": ["127.0.1.1"]}, "10.0.0.7"),
        ("a.example", {"a.example": ["10.0.0.5"]}, "10.0.0.7"),
        ("10.0.0.5", {"me": ["10.0.0.7"]}, "10.0.0.7"),
        ("fd00::5", {}, "fd00::7"),
        ("unknown.example", {}, None),
    ],
    ids=["loopback", "localhost", "names", "127.0.1.1", "a container", "an address", "IPv6", "unknown"],
)
def test_the_address_for_others(
    register: str, names: dict[str, list[str]], address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Probe:
        def __init__(self, family: socket.AddressFamily, _: int) -> None:
            self.own = "fd00::7" if family is socket.AF_INET6 else "10.0.0.7"

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, _: tuple[str | int, ...]) -> None:
            pass

        def getsockname(self) -> tuple[str, int]:
            return self.own, 1

    interfaces(monkeypatch, set(), names, "me")
    monkeypatch.setattr(socket, "socket", Probe)
    assert address_for_others(register) == address


def test_this_machine_is_recognised_by_its_interfaces() -> None:
    psutil = pytest.importorskip("psutil")
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                assert is_own(one.address), one
    assert is_own("localhost")
    assert not is_own("198.51.100.7")
    assert not is_own("2001:db8::7")


def test_loopback_is_that_of_ipv6_where_there_is_no_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_addresses, "_can_bind", lambda address: address.host in ("::1", "fd00::5"))
    assert loopback_here("127.0.0.1:4222") == "[::1]:4222"
    assert loopback_here("10.0.0.5:1") == "10.0.0.5:1"
    assert address_for_others("localhost") == "::1"
    monkeypatch.setattr(own_addresses, "_can_bind", lambda address: True)
    assert loopback_here("127.0.0.1:4222") == "127.0.0.1:4222"
