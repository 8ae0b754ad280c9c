"""Where the processes run: two hosts in network namespaces, a disk that can be full, and a cluster of etcd.

    home ── far

Without root there is one host, this machine, and the faults that need another one are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.wan.links import LinkError, remove, remove_left_over, run
from tests.support.ports import free_port

PREFIX = "endurance"
HOME_ADDRESS, FAR_ADDRESSES = "198.18.9.1", ("198.18.9.2", "198.18.9.3")
LONGEST = 600
"""Bytes of a packet that still passes an MTU hole."""

DISK_BYTES = 192 << 20


def lacks() -> str:
    """Why this machine or user cannot have two hosts; empty if it can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces and mount a disk"
    missing = [tool for tool in ("ip", "nft", "mount") if shutil.which(tool) is None]
    return f"{', '.join(missing)} is missing (apt-get install iproute2 nftables mount)" if missing else ""


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """The namespaces, and the prefix of a command that runs at home. They are removed at the end."""
    remove_left_over(PREFIX)
    home, far = (f"{PREFIX}-{os.getpid()}-{name}" for name in ("home", "far"))
    with ExitStack() as stack:
        for name in (home, far):
            stack.callback(remove, name)
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", home, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", far)
        for name, address in ((home, HOME_ADDRESS), (far, FAR_ADDRESSES[0])):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        yield ["ip", "netns", "exec", home, "env", f"{PREFIX.upper()}_FAR={far}"]


class Hosts:
    """The hosts as they are seen from home.

    Attributes:
        home: address of the home host.
        far: name of the other one's namespace; empty if there is none.
    """

    def __init__(self) -> None:
        self.far = os.environ.get(f"{PREFIX.upper()}_FAR", "")
        self.home = HOME_ADDRESS if self.far else "127.0.0.1"

    @property
    def far_address(self) -> str:
        return FAR_ADDRESSES[0] if self.far else self.home

    def command(self, *, far: bool) -> list[str]:
        """The prefix of a command that runs at a host."""
        return ["ip", "netns", "exec", self.far] if far and self.far else []

    def open_hole(self) -> None:
        """Long packets to and from the far host are lost from now on."""
        rules = (f"meta length > {LONGEST} drop",)
        chains = "".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; {' '.join(rules)}; }}\n"
            for hook in ("input", "output")
        )
        subprocess.run(
            [*self.command(far=True), "nft", "-f", "-"],
            input=f"table inet hole {{\n{chains}}}\n",
            text=True,
            check=True,
        )

    def close_hole(self) -> None:
        """Ends `open_hole`."""
        with suppress(LinkError):
            run(*self.command(far=True), "nft", "delete", "table", "inet", "hole")

    def change_address(self, *, back: bool) -> None:
        """Gives the far host its other address, or its first one again."""
        gone, here = FAR_ADDRESSES if not back else FAR_ADDRESSES[::-1]
        with suppress(LinkError):
            run("ip", "-n", self.far, "addr", "del", f"{gone}/24", "dev", "eth0")
        with suppress(LinkError):
            run("ip", "-n", self.far, "addr", "add", f"{here}/24", "dev", "eth0")


class Disk:
    """A folder that can be full: a file system of its own, if this user may mount one.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path, *, mounted: bool) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self._mounted = mounted
        if mounted:
            run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path))

    def fill(self) -> None:
        """Takes all of its space."""
        with suppress(OSError), (self.path / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(1 << 16))

    def free(self) -> None:
        """Ends `fill`."""
        (self.path / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        if self._mounted:
            with suppress(LinkError):
                run("umount", "--lazy", str(self.path))


class EtcdCluster:
    """Three servers of etcd with mutual TLS. One can be killed, and started again with what it has written.

    Args:
        folder: for their files.
        host: where they listen.
        files: of a certificate for `host`.
    """

    COUNT = 3

    def __init__(self, folder: Path, host: str, files: dict[str, Path]) -> None:
        self._folder, self._host, self._files = folder, host, files
        self._ports = [free_port() for _ in range(self.COUNT)]
        self._peer_ports = [free_port() for _ in range(self.COUNT)]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * self.COUNT
        self._context = ssl.create_default_context(cafile=str(files["tls_ca"]))
        self._context.load_cert_chain(files["tls_cert"], files["tls_key"])

    @property
    def url(self) -> str:
        """Value of the option `discovery`."""
        return "etcd://" + ",".join(f"{self._host}:{port}" for port in self._ports)

    def __enter__(self) -> Self:
        for number in range(self.COUNT):
            self.start(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in range(self.COUNT):
            self._kill(number)

    def start(self, number: int) -> None:
        """Starts a server."""
        files, host = self._files, self._host
        cluster = ",".join(f"e{each}=http://{host}:{port}" for each, port in enumerate(self._peer_ports))
        with (self._folder / f"etcd{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [
                    "etcd",
                    f"--name=e{number}",
                    f"--data-dir={self._folder / f'etcd{number}'}",
                    f"--listen-client-urls=https://{host}:{self._ports[number]}",
                    f"--advertise-client-urls=https://{host}:{self._ports[number]}",
                    f"--listen-peer-urls=http://{host}:{self._peer_ports[number]}",
                    f"--initial-advertise-peer-urls=http://{host}:{self._peer_ports[number]}",
                    f"--initial-cluster={cluster}",
                    f"--trusted-ca-file={files['tls_ca']}",
                    f"--cert-file={files['tls_cert']}",
                    f"--key-file={files['tls_key']}",
                    "--client-cert-auth",
                    "--unsafe-no-fsync",
                ],
                stdout=log,
                stderr=log,
            )

    def kill_leader(self) -> int | None:
        """Kills the leader, and returns its number; None if none is known."""
        for number, process in enumerate(self._processes):
            if process is None:
                continue
            status = self._status(number)
            if status.get("leader", "") == status.get("header", {}).get("member_id", "unknown"):
                self._kill(number)
                return number
        return None

    def _status(self, number: int) -> dict[str, Any]:
        url = f"https://{self._host}:{self._ports[number]}/v3/maintenance/status"
        request = urllib.request.Request(url, data=b"{}", headers={"Content-Type": "application/json"})
        with suppress(OSError, ValueError), urllib.request.urlopen(request, context=self._context, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
        return {}

    def _kill(self, number: int) -> None:
        process = self._processes[number]
        if process is not None:
            process.kill()
            process.wait()
        self._processes[number] = None
