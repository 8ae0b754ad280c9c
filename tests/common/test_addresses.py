"""Which hosts a peer may dial if another peer supplied the address, and which hosts a certificate covers."""

import ipaddress

import pytest
from hypothesis import given, strategies as st

from averaging.common.addresses import (
    apart,
    covers,
    format_address,
    in_zone,
    is_loopback,
    member_of,
    objection,
    parse_address,
    zone_of,
)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("169.254.169.254", "link-local"),
        ("[fe80::1]", "link-local"),
        ("[::ffff:169.254.169.254]", "link-local"),
        ("[2002:a9fe:a9fe::1]", "link-local"),
        ("[fd00:ec2::254]", "metadata"),
        ("100.100.100.200", "metadata"),
        ("0.0.0.0", "unspecified"),
        ("224.0.0.1", "multicast"),
    ],
)
@pytest.mark.parametrize("loopback", [True, False])
def test_some_addresses_are_never_dialled(host: str, words: str, loopback: bool) -> None:
    assert words in (objection(host, loopback=loopback) or "")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "[::1]", "::ffff:127.0.0.1", "localhost", "LocalHost.", "a.localhost"]
)
def test_loopback_is_dialled_only_where_it_is_allowed(host: str) -> None:
    assert is_loopback(host)
    assert objection(host, loopback=True) is None
    assert "loopback" in (objection(host, loopback=False) or "")


@pytest.mark.parametrize(
    "host",
    ["192.0.2.7", "10.0.0.1", "192.168.1.1", "172.16.0.1", "100.64.0.1", "[2001:db8::7]", "[fd00::1]", "a.example.org"],
)
def test_other_addresses_are_dialled_including_private_ones(host: str) -> None:
    assert not is_loopback(host)
    assert objection(host, loopback=False) is None


@given(st.ip_addresses())
def test_random_addresses_are_refused_by_their_kind(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    refused = objection(str(address), loopback=True)
    # For an IPv4-mapped IPv6 address the IPv4 address counts, since the kernel dials it.
    judged = (address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None) or address
    if judged.is_link_local or judged.is_multicast or judged.is_unspecified:
        assert refused
    elif judged.is_global and not str(judged).startswith(("2002:", "64:ff9b:", "168.63.129.16", "192.0.0.")):
        assert refused is None
    assert objection(f"[{address}]", loopback=True) == refused


@pytest.mark.parametrize(
    ("hosts", "host", "covered"),
    [
        (["a.example.org"], "a.example.org", True),
        (["a.example.org"], "A.Example.ORG.", True),
        (["*.example.org"], "a.example.org", True),
        (["*.example.org"], "a.b.example.org", False),
        (["*.example.org"], "example.org", False),
        (["192.0.2.7"], "192.0.2.7", True),
        (["2001:db8::7"], "[2001:0db8:0::7]", True),
        (["2001:db8::7"], "[2001:db8::8]", False),
        (["192.0.2.7"], "[::ffff:192.0.2.7]", False),
        (["fe80::7"], "[fe80::7%eth0]", True),
        ([], "a.example.org", False),
    ],
)
def test_hosts_that_a_certificate_covers(hosts: list[str], host: str, covered: bool) -> None:
    assert covers(hosts, host) is covered


@pytest.mark.parametrize(
    ("own", "other", "given", "words"),
    [
        ("192.0.2.1:1", "127.0.0.1:2", (), "advertise an address that others can reach"),
        ("127.0.0.1:2", "192.0.2.1:1", ("192.0.2.1:1",), "is elsewhere and does not call 127.0.0.1:2"),
        ("192.0.2.1:1", "169.254.0.9:2", (), "link-local"),
        ("192.0.2.1:1", "127.0.0.1:2", ("127.0.0.1:2",), ""),
        ("[fe80::1%eth0]:1", "[fe80::2%en1]:1", (), ""),
        ("client::1", "[fe80::2%en1]:1", ("[fe80::1%eth0]:1",), ""),
        ("127.0.0.1:1", "localhost:2", (), ""),
        ("127.0.0.1:1", "machine:2", (), ""),  # it may lead here
        ("client::1", "127.0.0.1:2", ("localhost:1",), ""),
        ("127.0.0.1:1", "client::1", (), ""),
    ],
)
def test_peers_whose_addresses_keep_them_apart(own: str, other: str, given: tuple[str, ...], words: str) -> None:
    reason = apart(own, other, given)
    assert (words in reason) if words else not reason


@pytest.mark.parametrize(
    ("endpoint", "member"),
    [
        ("192.0.2.1:1", "192.0.2.1"),
        ("A.Example.:1", "a.example"),
        ("127.0.0.1:1", "localhost"),
        ("[::1]:1", "localhost"),
        ("[::ffff:192.0.2.1]:1", "192.0.2.1"),
        ("[2001:db8::1]:1", "2001:db8::/64"),
        ("client::0", ""),
    ],
)
def test_peers_count_by_host(endpoint: str, member: str) -> None:
    assert member_of(endpoint) == member


@pytest.mark.parametrize("address", ["a.example:1", "192.0.2.7:65535", "[2001:db8::7]:4222", "[fe80::7%eth0]:4222"])
def test_an_address_is_written_as_it_is_read(address: str) -> None:
    host, port = parse_address(address)
    assert format_address(host, port) == format_address(host.strip("[]"), port) == address


def test_link_local_addresses_are_called_by_peers_with_one() -> None:
    """The metadata service of OpenStack has one too."""
    assert objection("[fe80::7%eth0]", loopback=False, link_local=True) is None
    for host in ("fe80::a9fe:a9fe", "fe80::a9fe:a9fe%eth0", "169.254.169.254", "[::ffff:169.254.169.254]"):
        assert "metadata" in (objection(host, loopback=False, link_local=True) or "")


def test_the_interface_of_another_machine_is_replaced() -> None:
    assert zone_of("[fe80::7%eth0]") == "eth0"
    assert zone_of("[fe80::7]") is zone_of("[fd00::7]") is zone_of("eth0") is None
    assert in_zone("[fe80::7%en1]:1", "eth0") == in_zone("[fe80::7]:1", "eth0") == "[fe80::7%eth0]:1"
    for endpoint in ("[fd00::7]:1", "192.0.2.7:1", "a.example:1"):
        assert in_zone(endpoint, "eth0") == endpoint
    assert in_zone("[fe80::7%en1]:1", None) == "[fe80::7%en1]:1"


def test_link_local_addresses_are_each_a_host() -> None:
    """All networks of links have the same 64 bits."""
    assert member_of("[fe80::7%eth0]:1") == member_of("[fe80::7%en1]:2") != member_of("[fe80::8%eth0]:1")
