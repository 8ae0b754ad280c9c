"""The checks of this machine that need no other peer: software, addresses, certificate, limits, clock."""

from __future__ import annotations

import ctypes
import math
import platform
import resource
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from averaging.common import Address, counted, is_loopback, is_own, parse_address, size, spelled
from averaging.config import PeerConfig
from averaging.doctor.checks import Check, Finding, failure, ok, warning
from averaging.errors import SUPPORTED_SYSTEMS, AveragingError, ConfigError, ListenError
from averaging.probe import DESCRIBE, look_up
from averaging.protocol import Mode
from averaging.security import (
    EXPIRES_SOON,
    Credentials,
    Tls,
    is_open_to_others,
    read_tls,
    read_tokens,
    validity_problem,
)
from averaging.transport.grpc import RpcChannel, check_listen
from averaging.wire import probe_pb2

PACKAGES = ("torch", "grpcio", "protobuf")

FEW_FILES = 1024  # that a peer should be able to open. It needs a few for each other peer that it knows
HEADROOM = 0.8  # part of the free memory above which data loaders and the process itself may not fit any more
ANSWER_SECONDS = 5.0  # for a peer that is up on this machine already


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is known before the checks of this machine."""

    config: PeerConfig  # of the peer that will be started
    credentials: Credentials | None = None  # None if the files cannot be used
    seeds: Collection[str] = ()  # addresses of the peers to join
    held_bytes: int = 0  # what the peer will hold in memory; 0 if that is not known


@cache
def requirements() -> dict[str, SpecifierSet]:
    """What the installed package requires of Python and of other packages, without extras, by name."""
    required = {"python": SpecifierSet(metadata.metadata("averaging")["Requires-Python"] or "")}
    for requirement in map(Requirement, metadata.requires("averaging") or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required[requirement.name.lower()] = requirement.specifier
    return required


def ask_version(name: str, _: Machine) -> str:
    if name == "python":
        return platform.python_version()
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return ""


def judge_version(name: str, _: Machine, found: str) -> Finding:
    required = requirements().get(name, SpecifierSet())
    install = f"install {name}{required} (pip install '{name}{required}')"
    if name == "python":
        install = f"make an environment with Python {required}"
    if not found:
        return failure("it is not installed", install)
    if not required.contains(found, prereleases=True):
        return failure(f"{found} is installed, and {required} is required", install)
    return ok(f"{found} ({required} is required)")


def judge_system(_: Machine, system: tuple[str, str]) -> Finding:
    name, release = system
    if name == "Linux":  # WSL 2 is a Linux whose kernel names Microsoft
        which = "WSL 2, whose own network needs forwarding of ports" if "microsoft" in release.lower() else "tested"
        return ok(f"Linux {release} ({which})")
    if name == "Darwin":
        return warning("macOS is supported for peers, and not tested", "use Linux for servers and engines")
    return failure(f"{name} is not supported", SUPPORTED_SYSTEMS)


# Addresses.


async def ask_port(this: Machine) -> str | None:
    """Checks that a peer can listen on `listen` now. Returns the endpoint of a peer of the run that does already."""
    config = this.config
    if config.mode is Mode.CLIENT:
        return None
    try:
        await check_listen(config.listen, config.advertise, exposed=config.tls_cert is not None or config.insecure)
    except (ListenError, ConfigError):
        endpoint = config.advertise or config.listen
        if not await _is_up(endpoint, this):
            raise
        return endpoint
    return ""


async def _is_up(endpoint: str, this: Machine) -> bool:
    with suppress(AveragingError):
        async with RpcChannel(endpoint, credentials=this.credentials) as channel:
            described = await channel.call(DESCRIBE, probe_pb2.DescribeRequest(), ANSWER_SECONDS)
        return described.run_id == this.config.run_id
    return False


def judge_port(this: Machine, running: str) -> Finding:
    listen = this.config.listen
    if running:
        text = f"a peer of run {this.config.run_id!r} is up at {running} already"
        return warning(text, "nothing has to be done if it is the one that you examine")
    return ok(f"{listen} is free" if parse_address(listen)[1] else f"a free port of {listen} will be taken")


async def ask_listen(this: Machine) -> tuple[bool, list[str]] | None:
    """Whether others reach `listen`, and the peers to join that are not on this machine."""
    own = await look_up(parse_address(this.config.listen)[0])
    if this.config.mode is Mode.CLIENT or not own:  # `port` says that the host is unknown
        return None
    hosts = {seed: parse_address(seed)[0] for seed in this.seeds}
    elsewhere = [seed for seed, host in hosts.items() if not (is_loopback(host) or await _is_loopback(host))]
    return not all(is_loopback(str(address)) for address in own), elsewhere


async def _is_loopback(host: str) -> bool:
    return any(is_loopback(str(address)) for address in await look_up(host))


def judge_listen(this: Machine, answer: tuple[bool, list[str]]) -> Finding:
    reached, elsewhere = answer
    listen, advertise = this.config.listen, this.config.advertise
    if reached:
        return ok(f"{listen} is no loopback address")
    text = f"{listen} is reached from this machine only"
    remedy = f"listen on an address that other peers reach, such as 0.0.0.0:PORT with {spelled('advertise')}, or use "
    remedy += spelled("mode", "client")
    if advertise is not None and not is_loopback(parse_address(advertise)[0]):
        return warning(f"{text}, so something here must forward {advertise} to it", remedy)
    if elsewhere:
        return failure(f"{text}, and {elsewhere[0]} is not here", remedy)
    if this.seeds:
        return ok(f"{text}, as the peers to join are")
    return warning(f"{text}; no peer elsewhere can join it", remedy)


async def ask_advertise(this: Machine) -> tuple[Address, ...] | None:
    if this.config.mode is Mode.CLIENT:
        return None
    return await look_up(parse_address(this.config.advertise or this.config.listen)[0])


def judge_advertise(this: Machine, addresses: tuple[Address, ...]) -> Finding | None:
    host, port = parse_address(this.config.advertise or this.config.listen)
    if not addresses:
        remedy = "correct the name, or give an IP address; all peers of the run must know the name"
        return failure(f"{host} is an unknown host here", remedy)
    if any(address.is_unspecified for address in addresses):
        return None  # `port` says so
    foreign = [str(address) for address in addresses if not is_own(str(address))]
    if not foreign:
        return ok(f"{host} ({', '.join(map(str, addresses))}) is this machine")
    text = f"{', '.join(foreign)} of {host} is no address of this machine, so a router must forward port {port} to it"
    return warning(f"{text} (NAT)", f"check the forwarding: with {spelled('join')} a peer of the run calls back")


# Certificate and token.


def ask_certificate(this: Machine) -> Tls | str:
    # Checked; a word about TLS if it has none.
    config = this.config
    own = read_tls(config.tls_ca, config.tls_cert, config.tls_key, time.time)
    return own or ("insecure" if config.insecure else "none")


def judge_certificate(this: Machine, own: Tls | str) -> Finding:
    config, issue = this.config, "issue another one (averaging ca issue)"
    if own == "insecure":
        text = "no TLS files, and --insecure: every machine that can connect reads and changes the traffic"
        return warning(text, "`averaging ca init` makes certificates")
    if not isinstance(own, Tls):
        return ok("no TLS files; only this machine may connect")
    host = parse_address(config.advertise or config.listen)[0]
    if config.mode is not Mode.CLIENT:
        own.check_host(host)
    if config.tls_key is not None and (open_to_others := _open_to_others(Path(config.tls_key))):
        return open_to_others
    end = own.certificate.not_valid_after_utc
    text = f"{own.source} is valid until {end:%Y-%m-%d %H:%M} UTC"
    if validity_problem(own.certificate, time.time() + EXPIRES_SOON):
        return warning(text, issue)
    covered = "" if config.mode is Mode.CLIENT else f", covers {host}"
    return ok(f"{text}{covered}, and was issued by {own.certificate.issuer.rfc4514_string()}; the key fits")


def judge_token(this: Machine, tokens: tuple[str, ...]) -> Finding:
    file = this.config.token_file
    if file is None:
        return ok("none is given; a run with a token will refuse this peer")
    text = f"{file}: the first of {len(tokens)} is sent" if len(tokens) > 1 else str(file)
    return _open_to_others(Path(file)) or ok(f"{text}; only its owner can read it")


def _open_to_others(file: Path) -> Finding | None:
    """A warning if other users can read a secret."""
    if not is_open_to_others(file):
        return None
    mode = stat.S_IMODE(file.stat().st_mode)
    return warning(f"{file} has mode {mode:03o}, so other users of this machine can read it", f"chmod 600 {file}")


# Limits.


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that a new process may use: what the system has available, within the limit of this container."""
    found: list[int] = []
    with suppress(OSError, StopIteration, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    with suppress(OSError, ValueError):  # no limit is the text "max"
        cgroup = root / "sys/fs/cgroup"
        limit = int((cgroup / "memory.max").read_text())
        found.append(max(0, limit - int((cgroup / "memory.current").read_text())))
    return min(found, default=None)


def judge_memory(this: Machine, free: int) -> Finding:
    held = this.held_bytes
    if not held:
        return ok(f"{size(free)} are free; `averaging plan` reckons what a peer that trains holds")
    text, remedy = f"{size(held)} are needed, and {size(free)} are free", "share no state, or use more memory"
    if held > free:
        return failure(text, remedy)
    return warning(f"{text}, also for the process itself", remedy) if held > HEADROOM * free else ok(text)


def judge_open_files(_: Machine, limits: tuple[int, int]) -> Finding:
    soft, hard = limits
    if soft == resource.RLIM_INFINITY or soft >= FEW_FILES:
        return ok(f"this process may open {'any number of' if soft < 0 else soft} files")
    most = "4096" if hard == resource.RLIM_INFINITY else str(min(4096, hard))
    text = f"this process may open {counted(soft, 'file')}; each other peer takes some, and data loaders take many"
    return warning(text, f"ulimit -n {most}")


def processor_quota(root: Path = Path("/")) -> float:
    """Processors that the cgroups of this process grant, of version 1 or 2; infinite without a quota.

    In a container the path of the cgroup may be that of the host, which is not there; its own is at the top then.
    """
    granted = [math.inf]
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            tops = (controllers, "cpu") if controllers else ("", "unified")
            own = Path(path.lstrip("/"))
            folders = [root / "sys/fs/cgroup" / top / each for top in tops for each in (own, *own.parents)]
            granted += [quota for folder in folders if (quota := _quota_of(folder)) is not None]
    return min(granted)


def _quota_of(folder: Path) -> float | None:
    with suppress(OSError, ValueError, ZeroDivisionError):
        files = [folder / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        texts = (folder / "cpu.max").read_text().split() if not files[0].exists() else [f.read_text() for f in files]
        quota, period = map(int, texts)  # "max" or -1 is none
        return quota / period if quota > 0 else None
    return None


def judge_processors(_: Machine, threads_and_quota: tuple[int, float]) -> Finding:
    threads, quota = threads_and_quota
    granted = (
        "no cgroup limits them" if quota == math.inf else f"the cgroup of this process grants {quota:g} processors"
    )
    text = f"torch computes with {counted(threads, 'thread')}, and {granted}"
    if threads > max(1.0, quota):
        return warning(f"{text}: threads beyond that stop all", f"OMP_NUM_THREADS={max(1, int(quota))}")
    return ok(text)


# Clock.

# Offsets in `struct timex` of Linux with 64 bits, and the bit of its status that is set without synchronisation.
_STATUS, _UNSYNCHRONISED, _MAX_ERROR = 40, 0x40, 24


def clock_discipline() -> tuple[bool, float] | None:
    """Whether the system's clock is synchronised, and its maximum error in seconds; None if that is unknown."""
    if platform.system() != "Linux" or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    timex = ctypes.create_string_buffer(512)  # modes 0: reads only
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(timex) < 0:
            return None
    except (OSError, AttributeError):
        return None
    status = int.from_bytes(timex.raw[_STATUS : _STATUS + 4], "little")
    error = int.from_bytes(timex.raw[_MAX_ERROR : _MAX_ERROR + 8], "little") / 1e6
    return not status & _UNSYNCHRONISED, error


def judge_clock(_: Machine, known: tuple[bool, float]) -> Finding:
    synchronised, error = known
    if synchronised:
        return ok(f"it is synchronised, to {1000 * error:.0f} ms at worst")
    remedy = "run NTP (chrony, systemd-timesyncd) if nothing else keeps it right; clocks may be 3 s apart"
    return warning("the kernel says that nothing synchronises the clock of this machine", remedy)


CHECKS: tuple[Check[Machine], ...] = (
    *(Check(name, partial(ask_version, name), partial(judge_version, name)) for name in ("python", *PACKAGES)),
    Check("system", lambda _: (platform.system(), platform.release()), judge_system),
    Check("port", ask_port, judge_port),
    Check("listen", ask_listen, judge_listen),
    Check("advertise", ask_advertise, judge_advertise),
    Check("certificate", ask_certificate, judge_certificate),
    Check("token-file", lambda this: read_tokens(this.config.token_file), judge_token),
    Check("memory", lambda _: free_memory(), judge_memory),
    Check("open-files", lambda _: resource.getrlimit(resource.RLIMIT_NOFILE), judge_open_files),
    Check("processors", lambda _: (torch.get_num_threads(), processor_quota()), judge_processors),
    Check("clock", lambda _: clock_discipline(), judge_clock),
)
