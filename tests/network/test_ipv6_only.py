"""Machines without any IPv4: every part listens, is called, and names its address; also link-local ones with a zone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.wan.links import run
from tests.network.ipv6_worker import VALUE
from tests.network.namespaces import TwoSites, namespace
from tests.support.processes import JsonProcess

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

SLOW = 180.0
"""Seconds for a process that imports torch while other tests do."""

PART = ("python", "-m", "tests.network.ipv6_worker")
CLI = ("python", "-m", "averaging")
A, B = "fd18:1::2", "fd18:2::2"
PEER = ("--run-id", "demo", "--group-size", "2", "--round-timeout", "90", "--json", "--rounds", "4")


@pytest.fixture
def sites() -> Iterator[TwoSites]:
    """Two sites of which no machine has an address of IPv4, not even 127.0.0.1."""
    with TwoSites(ipv4=False) as two:
        for place in ("a", "b", "gateway-a"):
            run("ip", "-n", namespace(place), "addr", "del", "127.0.0.1/8", "dev", "lo")
            two.write_hosts(place, f"::1 localhost\n{A} a.site\n{B} b.site")
        yield two


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = []
    for name, value in (("a", 1.0), ("b", 3.0)):
        paths.append(tmp_path / f"{name}.safetensors")
        save_file({"w": torch.full((4,), value)}, paths[-1])
    return paths


def issued(directory: Path, *hosts: str) -> list[str]:
    """Options of a peer with a certificate for these hosts from `averaging ca`."""
    ca = directory / "ca"
    averaging = (sys.executable, "-m", "averaging", "ca")
    if not ca.exists():
        subprocess.run([*averaging, "init", "--directory", ca], check=True, capture_output=True)
    name = hosts[0].replace(":", "-").replace("%", "-")
    given = [word for host in hosts for word in ("--host", host)]
    subprocess.run([*averaging, "issue", name, *given, "--directory", ca], check=True, capture_output=True)
    options = (("--tls-ca", "ca.pem"), ("--tls-cert", f"{name}.pem"), ("--tls-key", f"{name}.key"))
    return [word for option, file in options for word in (option, os.fspath(ca / file))]


def lanes(directory: Path) -> set[str]:
    """How parts travelled, in the first rounds also over gRPC; a member that sends none knows nothing of it."""
    receipts = [json.loads(line) for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]
    return {str(account["lane"]) for receipt in receipts for account in receipt["accounts"]}


def ended(process: JsonProcess, event: str) -> dict[str, object]:
    found = process.expect(event, SLOW)
    assert process.wait(SLOW) == 0, process.stderr
    return found


def test_peers_with_certificates_for_addresses_and_names(sites: TwoSites, files: list[Path], tmp_path: Path) -> None:
    """One is called by its address, the other by its name; one listens on all addresses. Parts go the direct way."""
    first = sites.start(
        *("a", *CLI, "peer", str(files[0]), *PEER, "--listen", f"[{A}]:4222"),
        *("--receipts", str(tmp_path / "a.jsonl")),
        *issued(tmp_path, A),
    )
    assert first.expect("ready", SLOW)["endpoint"] == f"[{A}]:4222"
    second = sites.start(
        *("b", *CLI, "peer", str(files[1]), *PEER, "--listen", "[::]:4222", "--advertise", "b.site:4222"),
        *(
            "--join",
            f"[{A}]:4222",
            "--receipts",
            str(tmp_path / "b.jsonl"),
            "--output",
            str(tmp_path / "mean.safetensors"),
        ),
        *issued(tmp_path, "b.site"),
    )
    assert second.expect("ready", SLOW)["endpoint"] == "b.site:4222"
    ended(first, "done")
    ended(second, "done")
    assert load_file(tmp_path / "mean.safetensors")["w"].tolist() == [2.0] * 4
    assert "sealed" in lanes(tmp_path)


def test_what_listens_without_an_option_does_so_on_loopback(sites: TwoSites) -> None:
    process = sites.start("a", *PART, "defaults")
    assert str(process.expect("listens", SLOW)["endpoint"]).startswith("[::1]:")
    ended(process, "joined")


def test_a_state_is_downloaded_and_weights_are_followed(sites: TwoSites, files: list[Path], tmp_path: Path) -> None:
    peer = sites.start("a", *CLI, "peer", str(files[0]), *PEER, "--listen", f"[{A}]:4222", "--insecure", "--serve")
    publisher = sites.start("a", *PART, "publish", f"[{A}]:4300")
    publisher.expect("ready", SLOW)
    out = tmp_path / "followed.safetensors"
    options = ("--listen", f"[{B}]:4300", "--insecure", "--once", "--json", "--output", str(out))
    follower = sites.start("b", *CLI, "follow", f"[{A}]:4300", *options)
    assert follower.expect("ready", SLOW)["endpoint"] == f"[{B}]:4300"
    ended(follower, "written")
    assert load_file(out)["w"].tolist() == [VALUE] * 3
    peer.expect("ready", SLOW)
    downloaded = sites.start(
        "b", *CLI, "state", "dns:a.site:4222", "--json", "--output", str(tmp_path / "state.safetensors")
    )
    ended(downloaded, "done")


def test_the_nodes_of_a_torchrun_job_meet_at_a_register(sites: TwoSites, tmp_path: Path) -> None:
    """Also the ranks of both sites sum over gloo, which looks up the name of its machine."""
    for place, own in (("a", A), ("b", B)):
        sites.write_hosts(place, f"::1 localhost\n{own} {gethostname()}\n{A} a.site\n{B} b.site")
    register = sites.start("a", *CLI, "register", "--listen", f"[{A}]:29400", "--insecure", "--json")
    register.expect("ready", SLOW)
    options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=averaging", "--rdzv-id=job")
    where = (f"--rdzv-endpoint=[{A}]:29400", "--rdzv-conf=insecure=true")
    nodes = []
    for place in ("a", "b"):
        step = str(tmp_path / f"{place}.step")
        command = ("python", "-m", "torch.distributed.run", *options, *where, "tests/elastic/worker.py", step)
        nodes.append(sites.start(place, *command, "3", "0.01"))
    for node in nodes:
        assert node.expect("start", SLOW)["world"] == 2
        assert node.expect("end", SLOW)["step"] == 3


def test_a_weight_sync_group(sites: TwoSites) -> None:
    trainer = sites.start("a", *PART, "send", A)
    meets = trainer.expect("meets", SLOW)
    explorer = sites.start("b", *PART, "receive", A, str(meets["port"]), json.dumps(meets["meta"]))
    assert ended(explorer, "received")["w"] == [VALUE] * 3
    ended(trainer, "done")


def link_local(place: str, device: str) -> str:
    shown = subprocess.run(
        ["ip", "-n", namespace(place), "-j", "-6", "addr", "show", device], capture_output=True, check=True
    ).stdout
    (link,) = json.loads(shown)
    return next(str(each["local"]) for each in link["addr_info"] if each["scope"] == "link")


def test_peers_with_link_local_addresses(sites: TwoSites, files: list[Path], tmp_path: Path) -> None:
    """Their interfaces have other names: the first calls the second at an address with a name that it does not have."""
    here, there = link_local("a", "eth0"), link_local("gateway-a", "lan")
    first = sites.start(
        *("a", *CLI, "peer", str(files[0]), *PEER, "--listen", f"[{here}%eth0]:4222"),
        *("--receipts", str(tmp_path / "a.jsonl")),
        *issued(tmp_path, here),
    )
    first.expect("ready", SLOW)
    second = sites.start(
        *("gateway-a", *CLI, "peer", str(files[1]), *PEER, "--listen", f"[{there}%lan]:4222"),
        *("--join", f"[{here}%lan]:4222", "--receipts", str(tmp_path / "b.jsonl")),
        *issued(tmp_path, there),
    )
    second.expect("ready", SLOW)
    ended(first, "done")
    ended(second, "done")
    assert "sealed" in lanes(tmp_path)
