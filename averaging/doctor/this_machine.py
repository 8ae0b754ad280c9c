"""The checks of this machine that need no other peer: software, addresses, limits, clock."""

from __future__ import annotations

import ctypes
import ipaddress
import math
import multiprocessing
import os
import platform
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from averaging.common import (
    Address,
    chosen_proxy,
    counted,
    ignored_proxies,
    is_loopback,
    is_own,
    parse_address,
    parse_ip,
    shown_proxy,
    spelled,
)
from averaging.config import PeerConfig
from averaging.doctor.dial_back import look_up
from averaging.doctor.findings import Finding, failure, ok, told, warning
from averaging.errors import SUPPORTED_SYSTEMS, ConfigError, ListenError
from averaging.protocol import Mode
from averaging.transport.grpc import check_listen

PACKAGES = ("torch", "grpcio", "protobuf")
"""The packages whose versions are compared with what this one requires."""

FEW_FILES = 1024
"""File descriptors that a peer should have at least. It needs a few for each other peer that it knows."""

ELSEWHERE = {"ipv4": "192.0.2.1", "ipv6": "2001:db8::1"}
"""Addresses for documentation, to which nothing is sent: the system only says from which address it would be."""


# Software.


def check_software(required: Mapping[str, str] | None = None, version: str | None = None) -> list[Finding]:
    """Compares the versions of Python and of the packages with those that this package requires.

    Args:
        required: The requirement of each, such as `>=2.4`; those of the installed package if None.
        version: The version of Python; that of this process if None.
    """
    required = requirements() if required is None else required
    installed = {"python": version or platform.python_version()} | {name: _installed(name) for name in PACKAGES}
    return [compare_version(name, found, required.get(name, "")) for name, found in installed.items()]


def check_system(system: str | None = None, release: str | None = None) -> list[Finding]:
    """Says whether this operating system is supported; WSL 2 is a Linux whose kernel names Microsoft."""
    system, release = system or platform.system(), release or platform.release()
    if system == "Linux":
        which = "WSL 2, whose own network needs forwarding of ports" if "microsoft" in release.lower() else "tested"
        return [ok("system", f"Linux {release} ({which})")]
    if system == "Darwin":
        return [warning("system", "macOS is supported for peers, and not tested", "use Linux for servers and engines")]
    return [failure("system", f"{system} is not supported", SUPPORTED_SYSTEMS)]


def requirements() -> dict[str, str]:
    """What the installed package requires of Python and of other packages, without extras, by name."""
    required = {"python": metadata.metadata("averaging")["Requires-Python"] or ""}
    for line in metadata.requires("averaging") or ():
        if "extra ==" not in line and (found := re.match(r"([\w.-]+)\s*\(?([^;)]*)", line)):
            required[found[1].lower()] = found[2].strip()
    return required


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def compare_version(name: str, found: str, required: str) -> Finding:
    """The finding about one package."""
    install = f"install {name}{required} (pip install '{name}{required}')"
    if name == "python":
        install = f"make an environment with Python {required}"
    if not found:
        return failure(name, "it is not installed", install)
    if not all(_fits(found, bound.strip()) for bound in required.split(",") if bound.strip()):
        return failure(name, f"{found} is installed, and {required} is required", install)
    return ok(name, f"{found}{f' ({required} is required)' if required else ''}")


def _fits(found: str, bound: str) -> bool:
    operator, least = re.fullmatch(r"([<>=!~]*)(.*)", bound).groups()  # type: ignore[union-attr] # matches any text
    own, other = _numbers(found), _numbers(least)
    return {">=": own >= other, "<": own < other, ">": own > other, "<=": own <= other}.get(operator, True)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, without zeros at its end: (2, 4) of `2.4.0+cpu`."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


# Addresses.


async def check_port(config: PeerConfig, *, exposed: bool) -> list[Finding]:
    """Checks that a peer could listen on `listen`. Nothing is listened on for it."""
    if config.mode is Mode.CLIENT:
        return [ok("port", "a client listens on none")]
    try:
        await check_listen(config.listen, config.advertise, exposed=exposed)
    except (ListenError, ConfigError) as error:
        return [told("port", error)]
    port = parse_address(config.listen)[1]
    return [ok("port", f"{config.listen} is free" if port else f"a free port of {config.listen} will be taken")]


async def check_listen_host(config: PeerConfig, seeds: Collection[str]) -> list[Finding]:
    """Checks that `listen` can be reached from elsewhere if the peers to join, at `seeds`, are elsewhere."""
    if config.mode is Mode.CLIENT:
        return []
    host = parse_address(config.listen)[0]
    own = await look_up(host)
    if not own:
        return []  # the check of the port says so
    if not all(is_loopback(str(address)) for address in own):
        return [ok("listen", f"{config.listen} is no loopback address")]
    where = config.listen if is_loopback(host) else f"{config.listen}, which is {own[0]} here,"
    remedy = f"listen on an address that other peers reach, such as 0.0.0.0:PORT with {spelled('advertise')}, or use "
    remedy += spelled("mode", "client")
    elsewhere = [seed for seed in seeds if not await _is_here(parse_address(seed)[0])]
    if config.advertise is not None and not is_loopback(parse_address(config.advertise)[0]):
        text = f"{where} is reached from this machine only, so something here must forward {config.advertise} to it"
        return [warning("listen", text, remedy)]
    if elsewhere:
        return [failure("listen", f"{where} is reached from this machine only, and {elsewhere[0]} is not here", remedy)]
    if seeds:
        return [ok("listen", f"{where} is reached from this machine only, as the peers to join are")]
    return [warning("listen", f"{where} is reached from this machine only; no peer elsewhere can join it", remedy)]


async def _is_here(host: str) -> bool:
    return any(is_loopback(str(address)) for address in await look_up(host)) or is_loopback(host)


async def check_advertise(config: PeerConfig) -> list[Finding]:
    """Checks that the host of this peer's endpoint is known, and whether it is an address of this machine."""
    if config.mode is Mode.CLIENT:
        return [ok("advertise", "a client has no address")]
    endpoint = config.advertise or config.listen
    host, port = parse_address(endpoint)
    addresses = await look_up(host)
    if not addresses:
        remedy = "correct the name, or give an IP address; all peers of the run must know the name"
        return [failure("advertise", f"{host} is an unknown host here", remedy)]
    if any(address.is_unspecified for address in addresses):
        return []  # the check of the port says so
    named = "" if parse_ip(host) else f" ({', '.join(map(str, addresses))})"
    foreign = [address for address in addresses if not is_own(str(address))]
    if not foreign:
        return [*_families(config, addresses), ok("advertise", f"{host}{named} is this machine")]
    which = f"{host}{named}" if len(foreign) == len(addresses) else f"{', '.join(map(str, foreign))} of {host}"
    text = f"{which} is no address of this machine, so a router must forward port {port or '(any)'} to it (NAT)"
    remedy = f"check the forwarding: with {spelled('join')} a peer of the run calls back"
    return [*_families(config, addresses), warning("advertise", text, remedy)]


def _families(config: PeerConfig, addresses: tuple[Address, ...]) -> Iterator[Finding]:
    """Whether callers may come over a family on which `listen` does not listen."""
    listened = parse_ip(parse_address(config.listen)[0])
    if listened is None or listened.is_unspecified:
        return
    missing = {address.version for address in addresses if is_own(str(address))} - {listened.version}
    if missing and config.advertise is not None:
        text = f"{config.advertise} has an address of IPv{missing.pop()}, on which {config.listen} does not listen"
        yield warning("advertise", text, "listen on [::]:PORT for both, or advertise an address of one family")


def check_families() -> list[Finding]:
    """Says from which address calls to the outside leave, for IPv4 and IPv6."""
    sources = {name: source_address(ipaddress.ip_address(where)) for name, where in ELSEWHERE.items()}
    if not any(sources.values()):
        text = "this machine has no route to other networks; it can average with peers on this machine only"
        return [warning("ipv4", text, "connect it to a network if peers are elsewhere")]
    return [
        ok(name, f"calls leave from {source}" if source else "no route to other networks")
        for name, source in sources.items()
    ]


def source_address(destination: Address) -> str:
    """The address from which packets to `destination` leave; empty if there is no route. Nothing is sent."""
    family = socket.AF_INET if destination.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(destination), 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


# The process and its surroundings.


def check_proxies(proxy: str | None = None, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Names the proxy through which others are called, and the variables that are set and not used.

    Args:
        proxy: the option `proxy`.
        environ: the environment.
    """
    try:
        chosen = chosen_proxy(proxy, environ)
    except ConfigError as error:
        return [failure("proxies", str(error), "correct the variable, or unset it")]
    if chosen is not None:
        return [
            ok("proxies", f"others are called through the proxy {shown_proxy(chosen)}, except loopback and NO_PROXY")
        ]
    if ignored := ignored_proxies(environ):
        return [warning("proxies", ignored, "if this machine has no other way out, set it, and take part as a client")]
    return [ok("proxies", "no proxy variable is set")]


def check_open_files(limit: int | None = None) -> list[Finding]:
    """Checks the limit of file descriptors of this process."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = soft if limit is None else limit
    if limit == resource.RLIM_INFINITY or limit >= FEW_FILES:
        return [ok("open-files", f"this process may open {'any number of' if limit < 0 else limit} files")]
    text = f"this process may open {counted(limit, 'file')}; each other peer takes some, and data loaders take many"
    most = "4096" if hard == resource.RLIM_INFINITY else str(min(4096, hard))
    return [warning("open-files", text, f"ulimit -n {most}")]


def check_processors(threads: int | None = None, quota: float | None = None) -> list[Finding]:
    """Compares the threads with which torch computes with the quota of processors of this process's cgroup."""
    threads = torch.get_num_threads() if threads is None else threads
    quota = processor_quota() if quota is None else quota
    granted = (
        "no cgroup limits them" if quota == math.inf else f"the cgroup of this process grants {quota:g} processors"
    )
    text = f"torch computes with {counted(threads, 'thread')}, and {granted}"
    if threads > max(1.0, quota):
        return [warning("processors", f"{text}: threads beyond that stop all", f"OMP_NUM_THREADS={max(1, int(quota))}")]
    return [ok("processors", text)]


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
    """The quota of one cgroup; None if it has none."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        files = [folder / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        texts = (folder / "cpu.max").read_text().split() if not files[0].exists() else [f.read_text() for f in files]
        quota, period = map(int, texts)  # "max" or -1 is none
        return quota / period if quota > 0 else None
    return None


def check_fork(environ: Mapping[str, str] = os.environ, method: str | None = None) -> list[Finding]:
    """Says how data loaders start their workers, and whether gRPC's own support of forks, which can crash, is on."""
    # The default of this Python; asking for the present method would also set it.
    method = method or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    wanted = environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower()
    if wanted in ("1", "true", "yes") and method != "spawn":
        text = f"GRPC_ENABLE_FORK_SUPPORT={wanted}: gRPC starts threads in each forked worker, which sometimes crash"
        return [warning("fork", text, "unset GRPC_ENABLE_FORK_SUPPORT; workers of data loaders need no gRPC")]
    if method == "fork":
        text = (
            "data loaders fork workers beside open channels of gRPC, whose own support of forks is off, as it should be"
        )
        return [ok("fork", f"{text}. A worker cannot use the averager")]
    return [ok("fork", f"data loaders start their workers by {method}, which shares no channel of gRPC with them")]


_STATUS, _UNSYNCHRONISED, _MAX_ERROR = 40, 0x40, 24
"""Offsets in `struct timex` of Linux with 64 bits, and the bit of its status that is set without synchronisation."""


def check_clock() -> list[Finding]:
    """Asks the kernel whether something, such as NTP, keeps the clock right."""
    remedy = "run NTP (chrony, systemd-timesyncd) if nothing else keeps it right; clocks may be 3 s apart"
    known = clock_discipline()
    if known is None:
        return [warning("clock", "this system does not say whether its clock is synchronised", remedy)]
    synchronised, error = known
    if not synchronised:
        return [warning("clock", "the kernel says that nothing synchronises the clock of this machine", remedy)]
    return [ok("clock", f"it is synchronised, to {1000 * error:.0f} ms at worst")]


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
