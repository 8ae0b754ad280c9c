"""Two sites with a bad path between them: network namespaces, for tests of what goes wrong between real machines.

    host a ── gateway-a ══ gateway-b ── host b

Each host is behind a gateway of its own, and the gateways are connected as over the internet. Faults are made where
they occur in reality: at a gateway, on the link between the gateways, or in a host's /etc/hosts. Nothing of this
machine's own network is touched. It needs root, `ip`, `tc`, `nft` and the kernel's conntrack.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.wan.links import delaying_relay, inside, remove, remove_left_over, run
from tests.support.processes import JsonProcess

PREFIX = "deep-sites"

HOSTS, GATEWAYS = ("a", "b"), ("gateway-a", "gateway-b")

NUMBERS = {"a": 1, "b": 2}
"""Third number of a site's network 198.18.N.0/24 (reserved for benchmarks, RFC 2544), and its fd18:N::/64."""

NAMES = {"a": "a.site", "b": "b.site"}
"""Names of the hosts, which both know from /etc/hosts."""

HOME = Path("/etc/netns")
"""`ip netns exec` mounts the files of `HOME/NAMESPACE` over those of /etc."""


class TwoSites:
    """The namespaces of two sites, a context manager that removes them with all processes in them at its end.

    Args:
        ipv4: Whether the sites have IPv4.
        ipv6: Whether the sites have IPv6.
    """

    def __init__(self, *, ipv4: bool = True, ipv6: bool = True) -> None:
        self._ipv4, self._ipv6 = ipv4, ipv6
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        remove_left_over(PREFIX)
        with ExitStack() as stack:
            for place in (*HOSTS, *GATEWAYS):
                stack.callback(remove, namespace(place))
                run("ip", "netns", "add", namespace(place))
                run("ip", "-n", namespace(place), "link", "set", "lo", "up")
                # Addresses can be used at once: nobody else can have them.
                self.sysctl(place, {"net.ipv6.conf.default.accept_dad": 0, "net.ipv6.conf.all.accept_dad": 0})
            for place in GATEWAYS:
                self.sysctl(place, {"net.ipv4.ip_forward": 1, "net.ipv6.conf.all.forwarding": 1})
                self.sysctl(place, {f"net.ipv4.conf.{which}.rp_filter": 0 for which in ("all", "default")})
            self._connect("gateway-a", "wan", "gateway-b", "wan", 0)
            for host, gateway in zip(HOSTS, GATEWAYS, strict=True):
                self._connect(gateway, "lan", host, "eth0", NUMBERS[host])
            for place, hop in (("a", 1), ("b", 1), ("gateway-a", 2), ("gateway-b", 1)):
                number = NUMBERS.get(place, 0)
                for route in self._addresses(number, hop, mask=False):
                    run("ip", "-n", namespace(place), "route", "add", "default", "via", route)
            lines = [f"{address} {NAMES[host]}" for host in HOSTS for address in self.addresses(host)]
            for host in HOSTS:
                stack.callback(shutil.rmtree, HOME / namespace(host), ignore_errors=True)
                self.write_hosts(host, "\n".join(("127.0.0.1 localhost", "::1 localhost", *lines)))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def addresses(self, host: str) -> list[str]:
        return self._addresses(NUMBERS[host], 2, mask=False)

    def start(self, place: str, *arguments: str, env: Mapping[str, str] | None = None) -> JsonProcess:
        """Starts a process at a host or gateway; a leading "python" stands for the running interpreter."""
        command = [sys.executable if arguments[0] == "python" else arguments[0], *arguments[1:]]
        process = JsonProcess(*inside(namespace(place)), *command, env=env)
        return self._stack.enter_context(process)

    def run(self, place: str, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a process to its end."""
        command = [sys.executable if arguments[0] == "python" else arguments[0], *arguments[1:]]
        return subprocess.run(
            [*inside(namespace(place)), *command], capture_output=True, text=True, check=False, timeout=timeout
        )

    @staticmethod
    def write_hosts(host: str, content: str) -> None:
        """Writes a host's /etc/hosts, for processes that start afterwards."""
        folder = HOME / namespace(host)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(content + "\n")

    # Faults

    @staticmethod
    def sysctl(place: str, settings: Mapping[str, object]) -> None:
        run(*inside(namespace(place)), "sysctl", "-qw", *(f"{key}={value}" for key, value in settings.items()))

    @staticmethod
    def rules(place: str, chain: str, *rules: str) -> None:
        """Adds a chain of nftables, such as `filter hook forward priority 0`, with rules for IPv4 and IPv6."""
        lines = "\n".join(f"  {rule}" for rule in (f"type {chain};", *rules))
        name = f"test{abs(hash((chain, rules)))}"
        text = f"table inet {name} {{\n chain only {{\n{lines}\n }}\n}}\n"
        run(*inside(namespace(place)), "nft", "-f", "-", stdin=text)

    def filter_port(self, port: int) -> None:
        """Gateway b drops what is sent to a port of its site, without an answer."""
        self.rules("gateway-b", "filter hook forward priority 0", f"iifname wan tcp dport {port} drop")

    def masquerade(self) -> None:
        """Gateway a gives all of its site its own address, and lets nobody in: NAT that works in one direction."""
        self.rules("gateway-a", "nat hook postrouting priority 100", "oifname wan masquerade")
        inward = ("ct state established,related accept", "iifname wan drop")
        self.rules("gateway-a", "filter hook forward priority 0", *inward)

    def narrow(self, mtu: int, *, icmp: bool = False) -> None:
        """The link between the gateways carries packets of at most `mtu` bytes.

        Args:
            mtu: Largest packet with its header in bytes.
            icmp: Whether the gateways say so to the senders.
        """
        for place in GATEWAYS:
            run("ip", "-n", namespace(place), "link", "set", "wan", "mtu", str(mtu))
            if not icmp:
                dropped = ("icmp type destination-unreachable drop", "icmpv6 type packet-too-big drop")
                self.rules(place, "filter hook output priority 0", *dropped)

    def slow(self, mbit: float) -> None:
        """The link between the gateways carries `mbit` Mbit/s in each direction."""
        shape = ("root", "tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", "72000b", "limit", "150000b")
        for place in GATEWAYS:
            run("tc", "-n", namespace(place), "qdisc", "add", "dev", "wan", *shape)

    def delay(self, seconds: float) -> None:
        """Packets between the sites take so long, in each direction."""
        place = namespace("gateway-a")
        self._stack.enter_context(delaying_relay(place, seconds))
        run("ip", "-n", place, "link", "set", "delay0", "txqueuelen", "20000", "up")
        for family in ("-4", "-6"):
            run("ip", "-n", place, family, "route", "add", "default", "dev", "delay0", "table", "100")
            for device in ("lan", "wan"):
                run("ip", "-n", place, family, "rule", "add", "iif", device, "lookup", "100")

    def _connect(self, first: str, device: str, second: str, other: str, network: int) -> None:
        """Connects two namespaces by a cable; their addresses in the network are .1 and .2."""
        ends = ((first, device), (second, other))
        run(
            *("ip", "-n", namespace(first), "link", "add", device, "type", "veth"),
            *("peer", "name", other, "netns", namespace(second)),
        )
        for number, (place, end) in enumerate(ends, start=1):
            for address in self._addresses(network, number):
                run("ip", "-n", namespace(place), "addr", "add", address, "dev", end)
            run("ip", "-n", namespace(place), "link", "set", end, "up")

    def _addresses(self, network: int, number: int, *, mask: bool = True) -> list[str]:
        v4, v6 = f"198.18.{network}.{number}", f"fd18:{network}::{number}"
        return [f"{v4}/24" if mask else v4] * self._ipv4 + [f"{v6}/64" if mask else v6] * self._ipv6


def namespace(place: str) -> str:
    return f"{PREFIX}-{os.getpid()}-{place}"
