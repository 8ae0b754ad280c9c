"""The checks of this machine: each finds its fault, and says what to do."""

import datetime
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from averaging import PeerConfig
from averaging.doctor import Finding, Severity, this_machine
from averaging.doctor.this_machine import CHECKS, Machine
from averaging.security.credentials import issue, make_authority
from tests.support.certificates import NOW, stored, write
from tests.support.ports import free_port

HERE = Machine(config=PeerConfig(run_id="run"))


async def made(name: str, seeds: Any = (), **options: Any) -> Finding:
    """The finding of one check of this machine, of a peer with these options."""
    machine = Machine(config=PeerConfig(run_id="run", **options), seeds=seeds)
    [check] = [each for each in CHECKS if each.name == name]
    found = await check.make(machine)
    assert found is not None
    assert (found.check, found.peer) == (name, "")
    return found


@pytest.mark.parametrize(
    ("name", "found", "required", "severity"),
    [
        ("python", "3.10.14", ">=3.11", Severity.FAILURE),
        ("torch", "2.4.0+cpu", ">=2.4", Severity.OK),
        ("torch", "2.3.1", ">=2.4", Severity.FAILURE),
        ("torch", "2.5.1", "~=2.4.0", Severity.FAILURE),
        ("torch", "2.5.1", "!=2.5.1", Severity.FAILURE),
        ("torch", "2.5.1", "==2.4", Severity.FAILURE),
        ("torch", "2.14.0a0+git1", ">=2.4", Severity.OK),
        ("protobuf", "8.0.0", "<8,>=6.31.1", Severity.FAILURE),
        ("protobuf", "", "<8", Severity.FAILURE),
    ],
)
def test_versions_are_compared_with_what_the_package_requires(
    name: str, found: str, required: str, severity: Severity, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"python", "torch", "grpcio", "protobuf"} < this_machine.requirements().keys()
    monkeypatch.setattr(this_machine, "requirements", lambda: {name: SpecifierSet(required)})
    judged = this_machine.judge_version(name, HERE, found)
    assert judged.severity is severity
    assert bool(judged.remedy) == (severity is Severity.FAILURE)


async def test_a_port_that_is_taken_or_needs_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        taken = await made("port", listen=listen)
    assert taken.severity is Severity.FAILURE
    assert "the port is taken" in taken.text
    assert "choose another port" in taken.text
    assert (await made("port", listen=listen)).severity is Severity.OK
    everywhere = {"listen": f"0.0.0.0:{free_port()}", "advertise": "127.0.0.1:0"}
    assert "without TLS" in (await made("port", **everywhere)).text
    assert (await made("port", **everywhere, insecure=True)).severity is Severity.OK


@pytest.mark.parametrize(
    ("options", "severity"),
    [
        ({}, "warning"),
        ({"join": ["127.0.0.1:4222"]}, "ok"),
        ({"join": ["192.0.2.7:4222"]}, "failure"),
        ({"join": ["192.0.2.7:4222"], "advertise": "203.0.113.5:4222"}, "warning"),
        ({"join": ["192.0.2.7:4222"], "advertise": "127.0.0.1:4222"}, "failure"),
        ({"listen": "192.0.2.9:0"}, "ok"),
    ],
)
async def test_a_peer_that_others_must_reach_and_cannot(options: Any, severity: str) -> None:
    assert (await made("listen", options.get("join", ()), **options)).severity == severity


@pytest.mark.parametrize(
    ("advertise", "severity", "words"),
    [
        ("127.0.0.1:4222", "ok", "is this machine"),
        ("localhost:4222", "ok", "is this machine"),
        ("203.0.113.5:4222", "warning", "NAT"),
        ("nobody.invalid:4222", "failure", "unknown host"),
    ],
)
async def test_whether_advertise_is_this_machine(advertise: str, severity: str, words: str) -> None:
    found = await made("advertise", advertise=advertise)
    assert found.severity == severity
    assert words in found.text


def test_few_file_descriptors() -> None:
    few = this_machine.judge_open_files(HERE, (256, 4096))
    assert (few.severity, few.remedy) == (Severity.WARNING, "ulimit -n 4096")
    for limit in (4096, resource.RLIM_INFINITY):
        assert this_machine.judge_open_files(HERE, (limit, limit)).severity is Severity.OK


def test_the_systems_that_are_supported_are_named() -> None:
    judge = this_machine.judge_system
    assert judge(HERE, ("Linux", "6.18")).severity is Severity.OK
    assert "WSL 2" in judge(HERE, ("Linux", "5.15.90.1-microsoft-standard-WSL2")).text
    assert judge(HERE, ("Darwin", "24.0")).severity is Severity.WARNING
    windows = judge(HERE, ("Windows", "11"))
    assert windows.severity is Severity.FAILURE
    assert "WSL 2" in windows.remedy


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/../of-the-host", {"cpu.max": "200000 100000"}, 2.0),
        (
            "4:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ("4:cpuacct,cpu:/host", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3.0),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, float("inf")),
        ("8:pids:/a", {"pids/a/cpu.max": "100000 100000"}, float("inf")),
        ("0::/", {"cpu.max": "garbage"}, float("inf")),
        ("0::/", {}, float("inf")),
    ],
)
def test_the_quota_of_processors_is_that_of_the_cgroup(
    tmp_path: Path, cgroup: str, files: dict[str, str], quota: float
) -> None:
    for name, text in {
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert this_machine.processor_quota(tmp_path) == quota


def test_threads_beyond_the_quota_are_named() -> None:
    judge = this_machine.judge_processors
    many = judge(HERE, (8, 2.5))
    assert many.severity is Severity.WARNING
    assert "8 threads" in many.text
    assert "2.5 processors" in many.text
    assert many.remedy == "OMP_NUM_THREADS=2"
    assert judge(HERE, (8, 0.5)).remedy == "OMP_NUM_THREADS=1"
    for fits in ((2, 2.0), (1, 0.5), (8, float("inf"))):
        assert judge(HERE, fits).severity is Severity.OK


def test_the_kernel_s_word_about_the_clock() -> None:
    assert this_machine.judge_clock(HERE, (True, 0.02)).severity is Severity.OK
    assert this_machine.judge_clock(HERE, (False, 16.0)).severity is Severity.WARNING
    known = this_machine.clock_discipline()
    assert known is not None
    assert 0 <= known[1] <= 3600


async def test_certificates_are_checked_before_a_peer_uses_them(tmp_path: Path) -> None:
    authority = make_authority("run", NOW, 60)
    files: Any = stored(tmp_path / "new", authority, issue(authority, "peer", ["127.0.0.1"], NOW, 30))
    assert "covers 127.0.0.1, and was issued by CN=run" in (await made("certificate", **files)).text
    other = await made("certificate", **files, advertise="a.example:4222")
    assert other.severity is Severity.FAILURE
    assert "other peers reach this one at a.example" in other.text
    files["tls_key"].chmod(0o644)
    assert (await made("certificate", **files)).remedy.startswith("chmod 600")
    soon: Any = write(tmp_path / "soon", "127.0.0.1")  # for one day
    assert "issue another one" in (await made("certificate", **soon)).remedy
    begun = NOW - datetime.timedelta(days=3)
    old = make_authority("run", begun, 10)
    expired: Any = stored(tmp_path / "old", old, issue(old, "peer", ["127.0.0.1"], begun, 1))
    late = await made("certificate", **expired)
    assert late.severity is Severity.FAILURE
    assert "expired on" in late.text


@pytest.mark.parametrize(
    ("held", "free", "severity"), [(0, 1, "ok"), (140, 1000, "ok"), (140, 150, "warning"), (140, 139, "failure")]
)
def test_what_a_peer_holds_is_compared_with_free_memory(held: int, free: int, severity: str) -> None:
    machine = Machine(config=HERE.config, held_bytes=held)
    assert this_machine.judge_memory(machine, free).severity == severity


def test_free_memory_is_that_of_the_system_within_the_container(tmp_path: Path) -> None:
    assert this_machine.free_memory(tmp_path) is None
    for name, text in {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  8 kB\n",
        "sys/fs/cgroup/memory.max": "max",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert this_machine.free_memory(tmp_path) == 8192
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("5000\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("4000\n")
    assert this_machine.free_memory(tmp_path) == 1000
