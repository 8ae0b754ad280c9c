"""The values of `join`: addresses of peers, and sources in which `averaging/seeds` looks addresses up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from averaging.common.addresses import parse_address, parse_ip
from averaging.errors import ConfigError

ETCD = "etcd://"

SOURCES = "dns:NAME:PORT, file:PATH, slurm:PORT or etcd://HOST:PORT,…/KEY"

GOSSIP = "gossip"  # the value of `discovery` for peers that find each other by gossip
MAX_MEMBERS = 16  # members of an etcd cluster that `discovery` may name; clusters have 3 or 5
MAX_KEY = 512  # bytes of a key in etcd


class SourceKind(Enum):
    """Where the addresses of peers are looked up."""

    DNS = "dns:"
    """All addresses of a name, such as that of a headless service of Kubernetes."""
    FILE = "file:"
    """The lines of a file."""
    SLURM = "slurm:"
    """The nodes of the Slurm job."""
    ETCD = ETCD
    """What the peers have written under a key of an etcd cluster."""


@dataclass(frozen=True, slots=True)
class SeedSource:
    """A source of addresses."""

    text: str  # the source as its user wrote it
    kind: SourceKind  # where it looks
    name: str = ""  # the host name, the path, or the key
    port: int = 0  # the port of all peers; 0 where the source has ports of its own
    members: tuple[str, ...] = ()  # addresses of the members of an etcd cluster

    def __str__(self) -> str:
        return self.text


def parse_seed(text: str) -> SeedSource | None:
    """Reads one value of `join`: None if it is the address of a peer, a ConfigError if it is no source either."""
    if text.startswith(SourceKind.DNS.value) and ":" in text[4:]:
        return _dns(text)
    if text.startswith(SourceKind.FILE.value):
        return _file(text)
    if text.startswith(SourceKind.SLURM.value):
        return SeedSource(text, SourceKind.SLURM, port=_port(text, text))
    if text.startswith(ETCD):
        return _etcd(text)
    try:
        _port(text, text)
    except ConfigError as error:
        raise ConfigError(f"{error}, or a source: {SOURCES}") from None
    return None


def is_folder(text: str) -> bool:
    """Whether a value of a follower's `join` names a folder of versions: a URL, or a path with `/` or `./` first."""
    return text.startswith(("/", "./", "../", "~/")) or ("://" in text and not text.startswith(ETCD))


def split_seeds(text: str) -> list[str]:
    """Splits values of `join` at commas, other than those between the members of an etcd cluster."""
    values: list[str] = []
    for part in map(str.strip, text.split(",")):
        if values and values[-1].startswith(ETCD) and "/" not in values[-1].removeprefix(ETCD):
            values[-1] += f",{part}"
        elif part:
            values.append(part)
    return values


def parse_discovery(text: str) -> tuple[str, ...]:
    """Reads the value of `discovery`: the addresses of the members of an etcd cluster; empty for gossip."""
    if text == GOSSIP:
        return ()
    if not text.startswith(ETCD):
        raise ConfigError(f"{text[:100]!r} must be gossip, or etcd://HOST:PORT,… with members of a cluster of etcd 3")
    members, _, key = text.removeprefix(ETCD).partition("/")
    if key:
        raise ConfigError(
            f"{text[:200]!r} names a key, which is for the option join; leave out /{key[:100]}: peers write "
            "under a key with the id of their run"
        )
    addresses = _members(members, text)
    if len(addresses) > MAX_MEMBERS:
        raise ConfigError(f"{text[:100]!r}… names {len(addresses)} members; at most {MAX_MEMBERS} are called")
    return addresses


def _port(address: str, text: str) -> int:
    port = parse_address(address)[1]
    if port == 0:
        raise ConfigError(f"{text!r} has port 0; give the port on which that peer listens")
    return port


def _dns(text: str) -> SeedSource:
    name = text.removeprefix(SourceKind.DNS.value)
    port = _port(name, text)
    host = parse_address(name)[0]
    if parse_ip(host) is not None:
        raise ConfigError(f"{text!r}: {host} is an address and no name; leave `dns:` out")
    return SeedSource(text, SourceKind.DNS, host, port)


def _file(text: str) -> SeedSource:
    path = text.removeprefix(SourceKind.FILE.value)
    if not path or "\0" in path:
        raise ConfigError(f"{text!r} names no file; write file:PATH, for example file:/etc/averaging/seeds")
    return SeedSource(text, SourceKind.FILE, path)


def _etcd(text: str) -> SeedSource:
    members, slash, key = text.removeprefix(ETCD).partition("/")
    key = key.strip("/")
    if not slash or not key or not key.isprintable() or len(key.encode()) > MAX_KEY:
        raise ConfigError(
            f"{text[:200]!r} names no key; write etcd://HOST:PORT/KEY, with a key that all peers of the run give, for "
            "example etcd://etcd.example:2379/runs/gpt"
        )
    return SeedSource(text, SourceKind.ETCD, key, members=_members(members, text))


def _members(members: str, text: str) -> tuple[str, ...]:
    addresses = tuple(member.strip() for member in members.split(","))
    for address in addresses:
        _port(address, text)
    return addresses
