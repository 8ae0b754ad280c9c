"""What is concluded from measurements of a path. The measurements themselves are tested in tests/network."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
import torch

from averaging import Peer
from averaging.config import PeerConfig
from averaging.doctor import Examination, Finding, examine
from averaging.doctor import path as paths
from averaging.doctor.deep import (
    interface_of,
    judge_bandwidth,
    judge_idle,
    judge_packets,
    judge_round_trips,
    judge_sealing,
)
from averaging.doctor.findings import Severity
from averaging.doctor.path import (
    KNOWN_SIZES,
    TRIED_AT_ONCE,
    Direction,
    Idle,
    Packets,
    PathTo,
    Trial,
    headers_of,
    idle_steps,
    next_sizes,
    try_packet,
)
from averaging.doctor.transfer import MeasuredTransfer
from averaging.security import Credentials

MBIT = 125_000.0

SETTINGS = b"\0\0\0\4\0\0\0\0\0"
"""An empty frame SETTINGS of HTTP/2."""


def search(largest: int, usual: int) -> tuple[int, int]:
    """Searches for the largest packet of a path; returns it and the number of times that something was tried."""
    passed: list[int] = []
    failed, rounds = usual, 0
    while sizes := next_sizes(passed, failed):
        assert len(sizes) <= max(TRIED_AT_ONCE, len(KNOWN_SIZES))
        rounds += 1
        passed += [size for size in sizes if size <= largest]
        failed = min([failed, *(size for size in sizes if size > largest)])
    return max(passed), rounds


@pytest.mark.parametrize("largest", [*range(1270, 1290), *range(576, 1500, 13), 1499])
def test_the_search_finds_the_largest_packet_in_a_few_steps(largest: int) -> None:
    found, rounds = search(largest, 1500)
    assert found == largest
    assert rounds <= 4
    assert search(largest, 9000)[0] == largest


def test_a_path_on_which_nothing_passes_is_not_searched() -> None:
    assert next_sizes([], 576) == []


def test_packets_that_vanish_are_told_with_the_size_and_the_remedy() -> None:
    usual, failed = Trial(1500, Direction.BACK), Trial(1281, Direction.THERE)
    finding = judge_packets(Packets(usual, 1280, failed), "192.0.2.7", "b:1")
    assert finding.severity is Severity.FAILURE
    assert "1,280 bytes pass" in finding.text
    assert "those of 1,500 bytes are lost on the way from the peer" in finding.text
    assert "mtu 1280" in finding.remedy
    assert "MSS of TCP to 1240" in finding.remedy
    assert "MSS of TCP to 1220" in judge_packets(Packets(usual, 1280, failed), "2001:db8::7", "b:1").remedy
    nothing = judge_packets(Packets(usual, 0, failed), "192.0.2.7", "b:1")
    assert nothing.severity is Severity.FAILURE
    assert "packets of any size" in nothing.text
    assert judge_packets(Packets(Trial(1500), 1500), "192.0.2.7", "b:1").severity is Severity.OK


def test_headers_and_the_interface_of_an_address() -> None:
    assert (headers_of("192.0.2.7"), headers_of("2001:db8::7"), headers_of("fe80::7%eth0")) == (40, 60, 60)
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("::ffff:192.0.2.7") in ("INTERFACE", interface_of("192.0.2.7"))


def test_steps_of_idle_connections_have_the_times_on_which_peers_rely() -> None:
    assert idle_steps(120) == [15, 21, 26, 30, 60, 120]
    assert idle_steps(20) == [2.5, 5, 10, 20]


@pytest.mark.parametrize(
    ("lived", "lost", "severity", "words"),
    [
        (120.0, None, Severity.OK, "120 s"),
        (30.0, 60.0, Severity.OK, "does not matter"),
        (21.0, 26.0, Severity.WARNING, "some calls will hang"),
        (15.0, 21.0, Severity.FAILURE, "15 to 21 s; the pings of peers every 20 s come too late"),
    ],
)
def test_idle_connections_are_judged_by_what_peers_do(
    lived: float, lost: float | None, severity: Severity, words: str
) -> None:
    finding = judge_idle(Idle(lived, lost), "b:1")
    assert finding.severity is severity
    assert words in finding.text
    assert bool(finding.remedy) is (severity is not Severity.OK)


def test_round_trips() -> None:
    finding = judge_round_trips([0.04, 0.05, 0.04, 0.05, 0.045], "b:1")
    assert finding.text == "45 ms (median of 5), jitter 8.75 ms"
    assert finding.severity is Severity.OK
    assert judge_round_trips([1.5], "b:1").severity is Severity.WARNING


def transfer(mbit: float) -> MeasuredTransfer:
    return MeasuredTransfer(round(10 * mbit * MBIT), 10.0, mbit * MBIT, interrupted=False)


def test_bandwidth_is_compared_with_what_the_options_need_and_state() -> None:
    config = PeerConfig(run_id="run")
    finding = judge_bandwidth(transfer(94), transfer(40), config, "b:1", tls=True)
    assert finding.severity is Severity.OK
    assert "94 Mbit/s (112.1 MiB in 10.0 s) to the peer, 40 Mbit/s" in finding.text
    slow = judge_bandwidth(transfer(94), transfer(0.1), config, "b:1", tls=False)
    assert slow.severity is Severity.FAILURE
    assert "part_size_bytes" in slow.remedy
    stated = PeerConfig(run_id="run", bandwidth=100 * MBIT)
    assert judge_bandwidth(transfer(94), transfer(94), stated, "b:1", tls=True).severity is Severity.OK
    wrong = judge_bandwidth(transfer(94), transfer(40), stated, "b:1", tls=True)
    assert wrong.severity is Severity.WARNING
    assert "5e+06" in wrong.remedy
    nothing = MeasuredTransfer(0, 0.0, 0.0, interrupted=True)
    assert judge_bandwidth(nothing, nothing, config, "b:1", tls=True).severity is Severity.WARNING


def test_sealing_is_compared_with_the_path() -> None:
    assert judge_sealing(1000 * MBIT, 100 * MBIT, "b:1", tls=True).text.endswith("10 times what the path carries")
    assert judge_sealing(100 * MBIT, 1000 * MBIT, "b:1", tls=True).severity is Severity.WARNING
    assert "nothing is sealed" in judge_sealing(100 * MBIT, 1000 * MBIT, "b:1", tls=False).text


@pytest.mark.asyncio
async def test_a_peer_cannot_prolong_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections, sends a byte now and then, and answers nothing."""
    monkeypatch.setattr(paths, "TRIAL_SECONDS", 1.0)

    async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while not writer.is_closing():
                writer.write(SETTINGS)
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    async with server, asyncio.timeout(30):
        port = server.sockets[0].getsockname()[1]
        path = PathTo(f"127.0.0.1:{port}", "127.0.0.1", "127.0.0.1", Credentials())
        trial = await try_packet(path, None)
    assert trial.stuck is not None


@pytest.mark.asyncio
@pytest.mark.parametrize("direct_listen", ["auto", "off"])
async def test_all_is_measured_at_a_real_peer_and_told_before(direct_listen: str) -> None:
    found: list[Finding] = []
    steps: list[str] = []
    async with Peer({"w": torch.ones(3)}, run_id="run", direct_listen=direct_listen) as peer, asyncio.timeout(60):
        config = PeerConfig(run_id="run", join=(peer.endpoint,))
        await examine(Examination(config=config, deep=True, idle=0.4), found.append, steps.append)
    checks = {each.check: each for each in found if each.peer in config.join}
    measured = ("packets", "round-trip", "bandwidth", "sealing", "idle")
    assert {check: checks[check].severity for check in measured} == dict.fromkeys(measured, Severity.OK)
    assert all(checks[check].figures for check in measured)
    assert checks["lane"].text.startswith(
        "direct" if direct_listen == "auto" else "gRPC, which costs more CPU: it has no"
    )
    assert [step.split(": ")[-1].split(",")[0] for step in steps] == [
        "which packets pass",
        "round trips",
        "bandwidth",
        "connections that are idle for up to 0.4 s",
    ]
