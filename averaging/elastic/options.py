"""The options of the rendezvous from torchrun: `--rdzv-endpoint` and `--rdzv-conf`, and from its variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from averaging.common import (
    PATH,
    SWITCH,
    check_options,
    is_loopback,
    option,
    options_of,
    parse_address,
    spelling,
    unknown_option,
    whole,
)
from averaging.config import TLSFiles, tls_files
from averaging.errors import ConfigError

# The default ports of torchrun's rendezvous and of its `--master-port`, and that of etcd.
DEFAULT_PORT, MASTER_PORT, ETCD_PORT = 29400, 29500, 2379

RDZV_ENDPOINT, PET_MASTER = "--rdzv-endpoint", "PET_MASTER_ADDR:PET_MASTER_PORT"  # the two origins of an endpoint
ETCD = "etcd://"

_TLS = ("tls_ca", "tls_cert", "tls_key")
_COUNT = whole(1)
# Options that torchrun adds, or that only its own backends use; ignored here.
_OF_TORCHRUN = ("timeout", "rank", "local_addr", "read_timeout", "store_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousOptions:
    """The address of the register and the timeouts. The names are those of `--rdzv-conf`."""

    endpoints: tuple[str, ...]  # `host:port` of the register, or of the members of an etcd cluster
    origin: str = RDZV_ENDPOINT  # what the endpoints come from, for errors
    # whether a name that is not found is waited for: a cluster gives pods their names as they start
    awaits_name: bool = False
    etcd: bool = False  # whether the register is in etcd
    tls: TLSFiles | None = None  # certificates for all calls
    token_file: str | None = option(None, PATH)  # the run's tokens
    insecure: bool = option(False, SWITCH)  # whether other machines may take part without TLS
    # whether this node hosts the register; with None, whether the endpoint is one of its addresses
    is_host: bool | None = option(None, SWITCH)
    join_timeout: int = option(600, _COUNT)  # seconds within which enough nodes must join
    last_call_timeout: int = option(30, _COUNT)  # seconds for further nodes to join once there are enough
    close_timeout: int = option(30, _COUNT)  # seconds to announce the end of the job to the other nodes
    heartbeat_timeout: int = option(5, _COUNT)  # seconds for the write of one heartbeat
    keep_alive_interval: int = option(5, _COUNT)  # seconds between two heartbeats of a node
    keep_alive_max_attempt: int = option(3, _COUNT)  # number of missing heartbeats after which a node is removed

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def endpoint(self) -> str:
        return (ETCD if self.etcd else "") + ",".join(self.endpoints)


def read_options(
    endpoint: str, conf: Mapping[str, Any], max_nodes: int, environ: Mapping[str, str] | None = None
) -> RendezvousOptions:
    """Reads and checks the options of torchrun.

    Args:
        endpoint: `--rdzv-endpoint`, or PET_RDZV_ENDPOINT, which torchrun reads itself. If it is empty, the endpoint is
            PET_MASTER_ADDR:PET_MASTER_PORT, which Kubeflow Trainer sets, and else the default port of this machine.
        conf: `--rdzv-conf`.
        max_nodes: Upper bound of `--nnodes`.
        environ: The variables of this process.

    Raises:
        ConfigError: An option is invalid.
    """
    known = options_of(RendezvousOptions)
    for name in conf:
        if name not in (*known, *_TLS, *_OF_TORCHRUN):
            raise ConfigError(unknown_option(name, _in_conf(name), (*known, *_TLS)))
    environ = environ or {}
    master = "" if endpoint.strip() else _master(environ)
    origin = PET_MASTER if master else RDZV_ENDPOINT
    etcd, endpoints = _endpoints(master or endpoint, origin)
    values = {name: conf[name] for name in known if conf.get(name) is not None}
    parsed = {n: known[n].kind.parse(value) if isinstance(value, str) else value for n, value in values.items()}
    with spelling(_in_conf):
        tls = tls_files(*(conf.get(name) for name in _TLS))
        options = RendezvousOptions(
            endpoints=endpoints,
            origin=origin,
            awaits_name=bool(master) or "KUBERNETES_SERVICE_HOST" in environ,
            etcd=etcd,
            tls=tls,
            **parsed,
        )
    _check(options, max_nodes)
    return options


def _in_conf(option: str, value: Any = None) -> str:
    return f"--rdzv-conf={option}" + ("" if value is None else f"={value}")


def _master(environ: Mapping[str, str]) -> str:
    """The endpoint in the variables of torchrun's static rendezvous; empty if they are not set."""
    host, port = (environ.get(f"PET_MASTER_{part}", "").strip() for part in ("ADDR", "PORT"))
    if not host:
        return ""
    bare = host.count(":") > 1 and not host.startswith("[")  # an IPv6 address
    if ":" in host and not bare and not host.startswith("["):
        raise ConfigError(f"PET_MASTER_ADDR {host!r} must be a name or an address; the port is PET_MASTER_PORT")
    return f"{f'[{host}]' if bare else host}:{port or MASTER_PORT}"


def _endpoints(endpoint: str, origin: str) -> tuple[bool, tuple[str, ...]]:
    etcd = endpoint.startswith(ETCD)
    port = ETCD_PORT if etcd else DEFAULT_PORT
    places = endpoint.removeprefix(ETCD).strip("/").split(",") if etcd else [endpoint.strip() or "localhost"]
    if "://" in places[0]:
        raise ConfigError(f"{origin} {endpoint!r} must be HOST:PORT of a register, or {ETCD}HOST:PORT,…")
    endpoints = []
    for place in map(str.strip, places):
        bare = place.count(":") != 1 and not place.startswith("[") and ":" in place  # an IPv6 address
        full = f"[{place}]:{port}" if bare else place if place.rpartition("]")[2].count(":") else f"{place}:{port}"
        try:
            parse_address(full)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from None
        endpoints.append(full)
    return etcd, tuple(endpoints)


def _check(options: RendezvousOptions, max_nodes: int) -> None:
    hosts = [parse_address(endpoint) for endpoint in options.endpoints]
    if any(port == 0 for _, port in hosts) and (options.etcd or max_nodes > 1):
        raise ConfigError(
            f"{options.origin} {options.endpoint} has port 0, which only a job of one node can use; give the port of "
            "the register, for example 29400"
        )
    if any(host.strip("[]") in ("0.0.0.0", "::") for host, _ in hosts):  # noqa: S104 - it is refused
        raise ConfigError(
            f"{options.origin} {options.endpoint} is every address of each node; give the one at which all nodes reach "
            "the register"
        )
    if options.etcd and options.is_host:
        raise ConfigError("is_host=true cannot work with an etcd endpoint: the cluster keeps the register")
    if options.tls is None and not options.insecure and not all(is_loopback(host) for host, _ in hosts):
        raise ConfigError(
            f"{options.origin} {options.endpoint} is reached over the network, where others could take the job over. "
            "Give --rdzv-conf=tls_ca=…,tls_cert=…,tls_key=… (`averaging ca` makes them), or insecure=true with a "
            "token_file if every machine in the network is trusted"
        )
