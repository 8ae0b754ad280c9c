"""The checks of this machine: each finds its fault, and says what to do."""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from typing import Any

import pytest

from averaging import PeerConfig
from averaging.doctor import Severity, memory_of_file, this_machine
from averaging.doctor.findings import Finding, exit_code, failure, ok, told, warning
from averaging.doctor.memory import check_memory, free_memory
from averaging.doctor.tls import check_certificate, check_token_file
from averaging.errors import ConfigError
from tests.support.certificates import NOW, write
from tests.support.ports import free_port


def config(**options: Any) -> PeerConfig:
    return PeerConfig(run_id="run", **options)


def severities(findings: list[Finding]) -> list[str]:
    return [each.severity.value for each in findings]


def test_versions_are_compared_with_what_the_package_requires() -> None:
    required = this_machine.requirements()
    assert required["grpcio"].startswith(">=1.8")
    assert required["python"] == ">=3.11"
    assert severities(this_machine.check_software()) == ["ok"] * 4
    [python, *_] = this_machine.check_software(version="3.10.14")
    assert "3.10.14 is installed, and >=3.11 is required" in python.text
    compare = this_machine.compare_version
    assert compare("torch", "2.4.0+cpu", ">=2.4").severity is Severity.OK
    assert compare("torch", "2.3.1", ">=2.4").severity is Severity.FAILURE
    assert compare("protobuf", "8.0.0", "<8,>=6.31.1").severity is Severity.FAILURE
    assert compare("protobuf", "", "<8").text == "it is not installed"


@pytest.mark.asyncio
async def test_a_port_that_is_taken_or_needs_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        [taken] = await this_machine.check_port(config(listen=listen), exposed=False)
    assert (taken.severity, taken.check) == (Severity.FAILURE, "port")
    assert "the port is taken" in taken.text
    assert "choose another port" in taken.remedy
    [free] = await this_machine.check_port(config(listen=listen), exposed=False)
    assert free.severity is Severity.OK
    everywhere = config(listen=f"0.0.0.0:{free_port()}", advertise="127.0.0.1:0")
    [exposed] = await this_machine.check_port(everywhere, exposed=False)
    assert "without TLS" in exposed.text
    assert severities(await this_machine.check_port(everywhere, exposed=True)) == ["ok"]


@pytest.mark.asyncio
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
    assert severities(await this_machine.check_listen_host(config(**options), options.get("join", ()))) == [severity]


@pytest.mark.asyncio
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
    found = (await this_machine.check_advertise(config(advertise=advertise)))[-1]
    assert found.severity.value == severity
    assert words in found.text


@pytest.mark.asyncio
async def test_a_family_on_which_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name has both addresses, and gRPC would listen on one of them."""

    def both(host: Any, *_: Any, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in ("127.0.0.1", "::1")]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    found = await this_machine.check_advertise(config(listen="127.0.0.1:0", advertise="both.example:4222"))
    assert severities(found) == ["warning", "ok"]
    assert "IPv6" in found[0].text


def test_proxies_are_named_and_whether_they_are_used() -> None:
    check = this_machine.check_proxies
    assert severities(check(environ={})) == ["ok"]
    [found] = check(environ={"HTTPS_PROXY": "http://proxy:3128", "grpc_proxy": "http://proxy:3128", "NO_PROXY": "a"})
    assert found.severity is Severity.WARNING
    assert "HTTPS_PROXY, grpc_proxy are set and not used" in found.text
    [used] = check(environ={"HTTPS_PROXY": "http://other:1", "AVERAGING_PROXY": "http://user:secret@proxy:3128"})
    assert used.severity is Severity.OK
    assert "proxy:3128" in used.text
    assert "secret" not in used.text
    [chosen] = check("http://mine:1", {"AVERAGING_PROXY": "http://proxy:3128"})
    assert "mine:1" in chosen.text
    [wrong] = check(environ={"AVERAGING_PROXY": "socks5h://proxy:3128"})
    assert wrong.severity is Severity.FAILURE


def test_few_file_descriptors() -> None:
    [few] = this_machine.check_open_files(256)
    assert (few.severity, few.remedy[:9]) == (Severity.WARNING, "ulimit -n")
    assert severities(this_machine.check_open_files(4096)) == ["ok"]
    assert severities(this_machine.check_open_files(resource.RLIM_INFINITY)) == ["ok"]


def test_the_systems_that_are_supported_are_named() -> None:
    assert severities(this_machine.check_system("Linux", "6.18")) == ["ok"]
    assert "WSL 2" in this_machine.check_system("Linux", "5.15.90.1-microsoft-standard-WSL2")[0].text
    assert severities(this_machine.check_system("Darwin", "24.0")) == ["warning"]
    [windows] = this_machine.check_system("Windows", "11")
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
    [many] = this_machine.check_processors(8, 2.5)
    assert many.severity is Severity.WARNING
    assert "8 threads" in many.text
    assert "2.5 processors" in many.text
    assert many.remedy == "OMP_NUM_THREADS=2"
    assert this_machine.check_processors(8, 0.5)[0].remedy == "OMP_NUM_THREADS=1"
    assert severities(this_machine.check_processors(2, 2.0)) == ["ok"]
    assert severities(this_machine.check_processors(1, 0.5)) == ["ok"]
    assert severities(this_machine.check_processors(8, float("inf"))) == ["ok"]


def test_forks_beside_grpc() -> None:
    [crashing] = this_machine.check_fork({"GRPC_ENABLE_FORK_SUPPORT": "1"}, "fork")
    assert crashing.severity is Severity.WARNING
    assert "unset" in crashing.remedy
    assert severities(this_machine.check_fork({}, "fork")) == ["ok"]
    assert "forkserver" in this_machine.check_fork({}, "forkserver")[0].text


def test_the_kernel_s_word_about_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for known, severity in (((True, 0.02), "ok"), ((False, 16.0), "warning"), (None, "warning")):
        monkeypatch.setattr(this_machine, "clock_discipline", lambda known=known: known)
        assert severities(this_machine.check_clock()) == [severity]


def test_what_the_kernel_is_asked_has_a_plausible_answer() -> None:
    known = this_machine.clock_discipline()
    assert known is not None
    assert 0 <= known[1] <= 3600


def test_certificates_are_checked_before_a_peer_uses_them(tmp_path: Path) -> None:
    files: Any = write(tmp_path, "127.0.0.1")
    own, found = check_certificate(config(**files), NOW.timestamp())
    assert own is not None
    assert {each.check: each.severity.value for each in found} == {
        "certificate": "ok",
        "expiry": "warning",  # it is for one day
        "coverage": "ok",
    }
    own, [late] = check_certificate(config(**files), NOW.timestamp() + 3 * 86400)
    assert own is None
    assert "expired on" in late.text
    _, found = check_certificate(config(**files, advertise="a.example:4222"), NOW.timestamp())
    assert "other peers reach this one at a.example" in found[-1].text
    files["tls_key"].chmod(0o644)
    _, found = check_certificate(config(**files), NOW.timestamp())
    assert found[-1].remedy.startswith("chmod 600")


def test_the_mode_of_a_token_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o640)
    [open_to_others] = check_token_file(config(token_file=path))
    assert open_to_others.severity is Severity.WARNING
    assert "mode 640" in open_to_others.text
    path.chmod(0o600)
    assert severities(check_token_file(config(token_file=path))) == ["ok"]
    path.write_text("short\n")
    assert severities(check_token_file(config(token_file=path))) == ["failure"]
    assert severities(check_token_file(config(token_file=tmp_path / "none"))) == ["failure"]


def test_memory_is_compared_where_the_tensors_are(tmp_path: Path) -> None:
    held = {"parameters": 60, "gradients": 30, "outer momentum": 50}
    assert severities(check_memory(held, 1000, None)) == ["ok"]
    assert severities(check_memory(held, 150, None)) == ["warning"]  # activations are not reckoned
    assert severities(check_memory(held, 139, None)) == ["failure"]
    assert severities(check_memory(held, 100, 1000)) == ["ok", "ok"]
    assert severities(check_memory(held, 100, 80)) == ["ok", "failure"]
    assert severities(check_memory(held, None, None)) == ["warning"]
    assert sum(memory_of_file(100, share_state=True).values()) == 300
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:  8 kB\n")
    assert free_memory(meminfo, tmp_path) == 8192
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    assert free_memory(meminfo, tmp_path) == 1000
    assert free_memory(tmp_path / "none", tmp_path / "none") is None


def test_findings() -> None:
    assert exit_code([ok("a", "fine"), warning("b", "perhaps")]) == 0
    assert exit_code([ok("a", "fine"), failure("b", "broken")]) == 1
    found = told("port", ConfigError("cannot listen: taken; choose another"))
    assert (found.text, found.remedy) == ("cannot listen: taken", "choose another")
    assert str(failure("b", "broken\x1b[2J", "mend it")) == "✗ b: broken?[2J → mend it"
