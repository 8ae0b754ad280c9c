"""`averaging doctor` finds what is wrong on the way to a peer, and says so: real processes, real faults."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.network.namespaces import NAMES, TwoSites
from tests.support.certificates import token_file, write
from tests.support.processes import JsonProcess

pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]  # most wait for what does not arrive

PORT, DIRECT = 4222, 4223
PEER = f"{NAMES['b']}:{PORT}"


@dataclass
class Report:
    """What a doctor has found, by check."""

    code: int
    lines: list[dict[str, Any]] = field(default_factory=list)

    def severity(self, check: str) -> str:
        """The worst of a check about the peer, empty without one."""
        found = {line["severity"] for line in self.about(check)}
        return next((each for each in ("failure", "warning", "ok") if each in found), "")

    def about(self, check: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["check"] == check and line["peer"]]

    def text(self, check: str) -> str:
        return " | ".join(f"{line['text']} → {line['remedy']}" for line in self.about(check))

    def figure(self, check: str, name: str) -> float:
        return float(self.about(check)[0]["figures"][name])

    @property
    def failures(self) -> set[str]:
        return {line["check"] for line in self.lines if line["severity"] == "failure"}


class TwoPeers:
    """A peer at b with a token and certificates, and a doctor at a."""

    def __init__(self, sites: TwoSites, folder: Path) -> None:
        self.sites, self._folder = sites, folder
        token_file(folder)
        save_file({"w": torch.ones(1000)}, folder / "w.safetensors")

    def start(self, listen: str = "0.0.0.0") -> JsonProcess:
        """Starts the peer at b."""
        process = self.sites.start(
            *("b", "python", "-m", "averaging", "peer", str(self._folder / "w.safetensors"), "--run-id", "run"),
            *("--listen", f"{listen}:{PORT}", "--advertise", f"{NAMES['b']}:{PORT}"),
            *("--direct-listen", f"{listen}:{DIRECT}", "--serve", "--json"),
            *("--token-file", str(self._folder / "token"), *_flags(write(self._folder / "b", NAMES["b"]))),
        )
        process.expect("ready")
        return process

    def examine(self, *options: str, advertise: str = NAMES["a"], listen: str = "0.0.0.0") -> Report:
        """Runs the doctor at a."""
        done = self.sites.run(
            *("a", "python", "-m", "averaging", "doctor", "--run-id", "run", "--join", PEER, "--json"),
            *("--listen", f"{listen}:{PORT}", "--advertise", f"{advertise}:{PORT}"),
            *("--token-file", str(self._folder / "token"), *_flags(write(self._folder / "a", advertise))),
            *options,
            timeout=100.0,
        )
        assert done.returncode in (0, 1), done.stderr
        events = [json.loads(line) for line in done.stdout.splitlines()]
        report = Report(done.returncode, [event for event in events if event["event"] == "finding"])
        assert report.code == bool(report.failures)
        return report


def _flags(files: dict[str, Path]) -> list[str]:
    return [word for name, path in files.items() for word in (f"--{name.replace('_', '-')}", str(path))]


@pytest.fixture
def peers(sites: TwoSites, tmp_path: Path) -> TwoPeers:
    return TwoPeers(sites, tmp_path)


@pytest.fixture
def peers_of_ipv6(tmp_path: Path) -> Iterator[TwoPeers]:
    with TwoSites(ipv4=False) as sites:
        yield TwoPeers(sites, tmp_path)


def test_nothing_is_wrong_with_a_good_path(peers: TwoPeers) -> None:
    peers.sites.slow(200)
    peers.sites.delay(0.02)
    peers.start()
    report = peers.examine("--deep", "--stall-timeout", "30")
    assert report.failures == set()
    checks = ("tcp", "tls", "call", "run", "call-back", "round-trip", "bandwidth")
    assert {check: report.severity(check) for check in checks} == dict.fromkeys(checks, "ok")
    # A busy machine makes a path slower than 200 Mbit/s and 40 ms, and never faster.
    assert report.figure("round-trip", "median_seconds") >= 0.040
    for direction in ("to_peer", "from_peer"):
        assert 5e6 < report.figure("bandwidth", f"{direction}_bytes_per_second") < 26e6


def test_a_filtered_port(peers: TwoPeers) -> None:
    peers.sites.filter_port(PORT)
    peers.start()
    report = peers.examine("--deep")
    assert report.failures == {"tcp"}
    assert "no answer within 5 s" in report.text("tcp")
    assert f"let TCP port {PORT} in" in report.text("tcp")
    assert not report.about("bandwidth")


@pytest.mark.parametrize("known", ["own", "public"])
def test_nat_that_works_in_one_direction(peers: TwoPeers, known: str) -> None:
    """It is found whether the peer advertises its own address, or that of the router, which lets nobody in."""
    peers.sites.masquerade()
    peers.start()
    report = peers.examine(advertise=NAMES["a"] if known == "own" else "198.18.0.1")
    told = report.text("call-back")
    assert "call-back" in report.failures, told
    assert ("so a NAT is between" if known == "own" else f"198.18.0.1:{PORT}") in told
    assert "orward" in told
    assert "client" in told


def test_packets_that_vanish_without_a_word(peers: TwoPeers) -> None:
    peers.sites.narrow(1280)
    peers.start()
    report = peers.examine()
    assert report.failures == {"tls"}
    assert "packets of 1,280 bytes pass, and larger ones vanish" in report.text("tls")
    assert "mtu 1280` here" in report.text("tls")
    assert peers.sites.run("a", "ip", "link", "set", "dev", "eth0", "mtu", "1280").returncode == 0  # the remedy
    assert peers.examine("--deep").failures == set()


def test_a_path_that_says_how_large_packets_may_be(peers: TwoPeers) -> None:
    peers.sites.narrow(1280, icmp=True)
    peers.start()
    assert peers.examine("--deep").failures == set()


def test_ipv6_only(peers_of_ipv6: TwoPeers) -> None:
    peers_of_ipv6.start(listen="[::]")
    report = peers_of_ipv6.examine("--deep", listen="[::]")
    assert report.failures == set()
    assert "fd18:2::2" in report.text("tcp")
    checks = ("call-back", "bandwidth")
    assert {check: report.severity(check) for check in checks} == dict.fromkeys(checks, "ok")
