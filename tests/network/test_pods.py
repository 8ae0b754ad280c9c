"""torchrun in pods: names that the DNS learns late, and a pod that comes back with another address under its name."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.wan.links import inside, run
from tests.elastic.jobs import PATIENCE, Job, Node
from tests.network.namespaces import HOME, TwoSites, namespace

pytestmark = [pytest.mark.network, pytest.mark.timeout(400)]

PODS = {"a": "site-node-0-0", "b": "site-node-0-1"}
ENDPOINT = "site-node-0-0.site:29400"


class Pods:
    """Two pods with host names and the file /etc/hosts as the kubelet writes it; what the DNS has is added there."""

    def __init__(self, sites: TwoSites, stack: ExitStack, directory: Path) -> None:
        self.addresses = {pod: sites.addresses(pod)[0] for pod in PODS}
        self._sites = sites
        self._job = Job(stack, directory, "1:2", endpoint=ENDPOINT, conf={"insecure": "true", "join_timeout": 300})
        self.known: set[str] = set()
        self.write()
        for pod in PODS:  # other names are unknown at once
            (HOME / namespace(pod) / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")

    def write(self) -> None:
        names = [f"{self.addresses[pod]} {PODS[pod]}.site" for pod in self.known]
        full = [f"{self.addresses[pod]} {PODS[pod]}.site.default.svc.cluster.local" for pod in self.known]
        for pod, name in PODS.items():
            own = f"{self.addresses[pod]} {name}.site.default.svc.cluster.local {name}"
            others = [line for line in full if not line.startswith(self.addresses[pod])]
            self._sites.write_hosts(pod, "\n".join(["127.0.0.1 localhost", own, *names, *others]))

    def dns(self, *pods: str) -> None:
        """From now on these names are found."""
        self.known = set(pods)
        self.write()

    def moves(self, pod: str, address: str) -> None:
        """The pod is replaced at another machine."""
        space = ("ip", "-n", namespace(pod))
        run(*space, "address", "delete", f"{self.addresses[pod]}/24", "dev", "eth0")
        run(*space, "address", "add", f"{address}/24", "dev", "eth0")
        gateway = self.addresses[pod].rpartition(".")[0] + ".1"
        run(*space, "route", "replace", "default", "via", gateway)
        self.addresses[pod] = address

    def node(self, pod: str) -> Node:
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', PODS[pod])
        launcher = (*inside(namespace(pod)), *named, sys.executable, "-m", "torch.distributed.run")
        cluster: dict[str, Any] = {"GLOO_SOCKET_IFNAME": "eth0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        return self._job.node(launcher, **cluster)

    def finish(self, *nodes: Node) -> None:
        self._job.finish(*nodes)


def told(node: Node, text: str) -> None:
    end = time.monotonic() + PATIENCE
    while text not in node.stderr:
        assert time.monotonic() < end, node.stderr
        time.sleep(0.1)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with TwoSites(ipv6=False) as sites, ExitStack() as stack:
        yield Pods(sites, stack, tmp_path)


def test_pods_meet_in_any_order_and_find_the_first_one_at_its_new_address(pods: Pods) -> None:
    second = pods.node("b")
    told(second, f"no register answers at {ENDPOINT}")
    first = pods.node("a")  # it hosts the register before the DNS has its name
    pods.dns("a", "b")
    second.until_step(3, world=2)
    first.signal_all(signal.SIGKILL)
    pods.dns("b")
    pods.moves("a", pods.addresses["a"].rpartition(".")[0] + ".77")
    first = pods.node("a")
    pods.dns("a", "b")
    step = first.until_step(1, world=2)["step"]
    second.until_step(step + 2, world=2)
    pods.finish(first, second)
    assert second.wait(PATIENCE) == 0
