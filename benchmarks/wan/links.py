"""Emulated links between peers, each in a network namespace: rate by the kernel's `tbf`, delay by our own relay.

Peer i is 198.18.i.2 (addresses reserved for benchmarks, RFC 2544) on a veth pair whose other end is in a hub. Its
upload is limited at its own end, like a machine's on its network card. The hub then routes everything through the
relay's device (`benchmarks.wan.relay`), which delays it by half a round trip. The download is limited at the hub's end.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.wan.limits import Setting, queue_bytes
from benchmarks.workers import ROOT

PREFIX = "wan-benchmark"
DELAYED = "100"
"""Number of the hub's routing table for packets that were not delayed yet."""


class LinkError(Exception):
    """The links cannot be set up here. The message has the reason and the remedy."""


def check_tools() -> None:
    """Checks that this machine and user can emulate links.

    Raises:
        LinkError: they cannot.
    """
    if not sys.platform.startswith("linux"):
        raise LinkError("network namespaces are Linux's; run this on Linux, a virtual machine will do")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"{' and '.join(missing)} not found; install iproute2 (Debian: apt install iproute2)")
    if os.geteuid() != 0:
        raise LinkError(
            "only root may make network namespaces; run this with sudo, or as root in a container of its own"
        )
    if not Path("/dev/net/tun").exists():
        raise LinkError("/dev/net/tun is missing; load it (modprobe tun), or hand it to the container (--device)")


class Links:
    """The namespaces of a setting, a context manager that removes them at its end.

    Raises:
        LinkError: they could not be set up.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._hub = f"{PREFIX}-{os.getpid()}-hub"
        self._peers = [f"{PREFIX}-{os.getpid()}-{rank}" for rank in range(len(setting.mbits))]
        self._stack = ExitStack()
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            remove_left_over(PREFIX)
            self._set_up(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def command(self, rank: int) -> list[str]:
        """Returns the prefix for a command that runs at that peer."""
        return inside(self._peers[rank])

    @staticmethod
    def host(rank: int) -> str:
        return f"198.18.{rank}.2"

    def relay(self) -> dict[str, float]:
        """Returns the relay's `cpu_seconds` so far, and its maximum delay `late_ms` since the last call."""
        assert self._relay is not None
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write("\n")
        self._relay.stdin.flush()
        answer: dict[str, float] = json.loads(self._relay.stdout.readline())
        return answer

    def tcp(self) -> dict[str, str]:
        """Returns the TCP settings of the peers."""
        names = ("tcp_congestion_control", "tcp_slow_start_after_idle", "tcp_rmem", "tcp_wmem")
        keys = [f"net.ipv4.{name}" for name in names]
        values = run(*self.command(0), "sysctl", "-n", *keys).splitlines()
        return dict(zip(names, (" ".join(value.split()) for value in values), strict=True))

    def _set_up(self, stack: ExitStack) -> None:
        for name in (self._hub, *self._peers):
            stack.callback(remove, name)
            run("ip", "netns", "add", name)
        run(*inside(self._hub), "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0")
        self._relay = stack.enter_context(delaying_relay(self._hub, self._setting.rtt / 2))
        # The relay's device must never drop packets.
        run("ip", "-n", self._hub, "link", "set", "delay0", "txqueuelen", "20000", "up")
        run("ip", "-n", self._hub, "route", "add", "default", "dev", "delay0", "table", DELAYED)
        for rank, (name, mbit) in enumerate(zip(self._peers, self._setting.mbits, strict=True)):
            self._connect(rank, name, mbit)

    def _connect(self, rank: int, name: str, mbit: float) -> None:
        device = f"peer{rank}"
        run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", device, "netns", self._hub)
        run("ip", "-n", name, "addr", "add", f"{self.host(rank)}/24", "dev", "eth0")
        run("ip", "-n", self._hub, "addr", "add", f"198.18.{rank}.1/24", "dev", device)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run("ip", "-n", self._hub, "link", "set", device, "up")
        run("ip", "-n", name, "route", "add", "default", "via", f"198.18.{rank}.1")
        run("ip", "-n", self._hub, "rule", "add", "iif", device, "lookup", DELAYED)
        burst, length = queue_bytes(mbit, self._setting.rtt)
        shape = ("root", "tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", f"{burst}b", "limit", f"{length}b")
        run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape)
        run("tc", "-n", self._hub, "qdisc", "add", "dev", device, *shape)


@contextmanager
def delaying_relay(name: str, delay: float) -> Iterator[subprocess.Popen[str]]:
    """Runs the relay in a namespace, where its device `delay0` then returns every packet after `delay` seconds."""
    command = [*inside(name), sys.executable, "-m", "benchmarks.wan.relay", "--delay", str(delay)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise LinkError(f"the relay did not start: {' '.join(command)}")
            yield process
        finally:
            process.kill()


def inside(name: str) -> list[str]:
    """Returns the prefix for a command that runs in a namespace."""
    return ["ip", "netns", "exec", name]


def run(*command: str, stdin: str = "") -> str:
    """Runs a command to its end and returns its output.

    Raises:
        LinkError: it failed.
    """
    # In its own session, so that Ctrl+C does not stop the clean-up.
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        raise LinkError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def remove(name: str) -> None:
    """Ends the processes in a namespace, and removes it with its links."""
    if not Path("/run/netns", name).exists():
        return
    for pid in run("ip", "netns", "pids", name).split():
        subprocess.run(["kill", "-KILL", pid], check=False, capture_output=True)
    run("ip", "netns", "del", name)


def remove_left_over(prefix: str) -> None:
    """Removes the namespaces `PREFIX-PID-NAME` of processes that were killed."""
    for name in run("ip", "netns", "list").splitlines():
        found = re.match(rf"({prefix}-(\d+)-[\w-]+)", name)
        if found and not Path("/proc", found[2]).exists():
            with suppress(LinkError):  # another process removes it too
                remove(found[1])
