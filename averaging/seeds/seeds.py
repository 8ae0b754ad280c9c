"""The peers that `join` names: the addresses in it, and those that its sources have named so far.

A source is a name, a file, a key of etcd, or the environment of a Slurm job, each of which `Seeds` asks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from pathlib import Path

from averaging.common import (
    CLIENT_PREFIX,
    SeedSource,
    SourceKind,
    are_same,
    counted,
    format_address,
    is_endpoint,
    is_own,
    listed,
    parse_address,
    parse_ip,
    parse_seed,
)
from averaging.errors import AveragingError, ConfigError, DiscoveryError
from averaging.security import Credentials
from averaging.transport.grpc import EtcdCluster, RpcChannel

logger = logging.getLogger("averaging.seeds")

RESOLVE_SECONDS = 3.0  # time limit for the look-up of a name
MAX_SEEDS = 1024  # addresses of one source that are looked at; further ones are left out. One that answers is enough
MAX_FILE_BYTES = 1 << 20

NODES = "SLURM_JOB_NODELIST"
"""Variable with the nodes of the job; `NODES_HET_GROUP_n` has those of component n of a heterogeneous job."""


class SeedsNotFoundError(Exception):
    """A source gave no addresses now; it is asked again. The message has the reason and the remedy."""


async def resolve_name(name: str, port: int) -> list[str]:
    """Returns all addresses of a host name as HOST:PORT, in an order that does not change."""
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise SeedsNotFoundError(
            f"the look-up of {name} took longer than {RESOLVE_SECONDS:g} s; check the name servers of this machine"
        ) from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SeedsNotFoundError(
            f"the name {name} does not resolve ({reason}); check it with `getent hosts {name}`"
        ) from None
    return sorted({format_address(str(where[0]), port) for *_, where in found})


def read_seed_file(path: str) -> list[str]:
    """Returns the addresses in a file: one HOST:PORT a line; `#` begins a comment."""
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe would block
            raise SeedsNotFoundError(f"{path} is no file; write one HOST:PORT a line into a file")
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        lines = content.decode().splitlines()
    except OSError as error:
        raise SeedsNotFoundError(f"{path} cannot be read: {error.strerror}; check the name of the file") from None
    except UnicodeError:
        raise SeedsNotFoundError(f"{path} is not text; write one HOST:PORT a line") from None
    if len(content) > MAX_FILE_BYTES:
        raise SeedsNotFoundError(f"{path} has more than {MAX_FILE_BYTES} bytes; write one HOST:PORT a line")
    addresses = []
    for number, line in enumerate(lines, 1):
        address = line.partition("#")[0].strip()
        if address and (address.startswith(CLIENT_PREFIX) or not is_endpoint(address)):
            raise SeedsNotFoundError(
                f"line {number} of {path} is {address[:100]!r} and no address; write one HOST:PORT a line"
            )
        if address:
            addresses.append(address)
    if not addresses:
        raise SeedsNotFoundError(f"{path} is empty; write the addresses of peers into it, one HOST:PORT a line")
    return addresses


# Slurm


def read_slurm_nodes(environ: Mapping[str, str], port: int) -> list[str]:
    """Returns the nodes of this Slurm job, those of all components if it is heterogeneous, as HOST:PORT."""
    components = sorted(name for name in environ if name.startswith(f"{NODES}_HET_GROUP_"))
    lists = [environ[name] for name in (components or [NODES]) if environ.get(name)]
    if not lists:
        raise ConfigError(
            f"slurm:{port} needs the variable {NODES}, which is not set: this is no process of a Slurm job. Start it "
            "with srun or sbatch, or name peers as HOST:PORT",
            "join",
        )
    hosts = (host for each in lists for host in expand_hostlist(each))
    return [format_address(host, port) for host in dict.fromkeys(hosts)]


_ITEM = re.compile(r"(?:[^,\[\]]|\[[0-9,-]+\])+")
_PART = re.compile(r"\[([0-9,-]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand_hostlist(text: str) -> list[str]:
    """Expands a list of nodes as Slurm writes it: `a,node[01-03,7]` is a, node01, node02, node03, node7."""
    items = _ITEM.findall(text)
    if ",".join(items) != text:
        raise ConfigError(f"{text[:200]!r} is not a list of nodes of Slurm, such as node[01-16]", "join")
    names: list[str] = []
    for item in items:
        parts = [_numbers(numbers) if numbers else (word,) for numbers, word in _PART.findall(item)]
        for name in product(*parts):
            if len(names) == MAX_SEEDS:
                return names
            names.append("".join(name))
    return names


def _numbers(text: str) -> tuple[str, ...]:
    return tuple(number for part in text.split(",") for number in _range(part))[:MAX_SEEDS]


def _range(text: str) -> Iterator[str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"[{text[:200]}] is not a range of nodes of Slurm, such as [01-16]", "join")
    first, last = match[1], match[2] or match[1]
    for number in range(int(first), min(int(last), int(first) + MAX_SEEDS - 1) + 1):
        yield f"{number:0{len(first)}d}"


def own_node(environ: Mapping[str, str] = os.environ) -> str:
    return environ.get("SLURMD_NODENAME", "")


LEASE_SECONDS, RENEW_SECONDS = 9.0, 3.0
"""Time for which an address stays after the death of its peer, and the interval at which the lease is renewed. A peer
that was killed and starts again alone finds its old address gone before the default `join_timeout` ends."""

CALL_SECONDS = 3.0
LEAVE_SECONDS = 1.0  # time limit for the removal of this peer's address when it leaves


class EtcdSeeds:
    """Reads the addresses under the key, and writes this peer's own."""

    def __init__(
        self, source: SeedSource, credentials: Credentials, most: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._prefix, self._most = f"{source.name}/".encode(), most
        self._monotonic = monotonic
        channels = [RpcChannel(member, credentials=Credentials(tls=credentials.tls)) for member in source.members]
        self._cluster = EtcdCluster(channels, CALL_SECONDS)
        self._lease: int | None = None
        self._renewed = 0.0
        self._busy = asyncio.Lock()  # the loop that renews, and a look-up, may publish at the same time

    async def read(self) -> list[str]:
        """Returns the addresses; what is no address is left out."""
        found = await self._cluster.list_values(self._prefix, self._most)
        return [address for pair in found.values if (address := _address(pair.value))]

    async def publish(self, endpoint: str) -> None:
        """Writes the address of this peer, or renews its lease if that is due."""
        async with self._busy:
            now = self._monotonic()
            if self._lease is not None and now < self._renewed + RENEW_SECONDS:
                return
            if self._lease is None or not await self._cluster.keep_alive(self._lease):
                self._lease = None
                lease = await self._cluster.grant(LEASE_SECONDS)
                await self._cluster.change({self._prefix + endpoint.encode(): endpoint.encode()}, lease)
                self._lease = lease
            self._renewed = now

    async def close(self) -> None:
        """Removes the address of this peer, if etcd answers in time, and closes the connections."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(AveragingError, TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._cluster.revoke(lease)
        await self._cluster.close()


def _address(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeError:
        return ""
    return text if is_endpoint(text) and not text.startswith(CLIENT_PREFIX) else ""


MAX_CALLED = 64  # addresses of one source that are called; of more, a random choice


@dataclass(frozen=True, slots=True)
class FoundSeeds:
    """What a source answered."""

    source: str  # the source as its user wrote it
    addresses: tuple[str, ...] = ()  # addresses of other peers
    own: tuple[str, ...] = ()  # addresses of this peer
    failure: str = ""  # why there is no answer, and what to do; empty if there is one

    def __str__(self) -> str:
        if self.failure:
            return f"{self.source}: {self.failure}"
        own = f"; {listed(self.own)} {'is' if len(self.own) == 1 else 'are'} this peer's" if self.own else ""
        others = (
            f"{counted(len(self.addresses), 'peer')}: {listed(self.addresses)}" if self.addresses else "no other peer"
        )
        return f"{self.source} has {others}{own}"


class NamedSeeds(Collection[str]):
    """The addresses that the user has named, himself or through a source that he trusts; it changes with `Seeds`.

    What peers have written into etcd is not among them, but the members of the cluster are.
    """

    def __init__(self, named: Callable[[], tuple[str, ...]]) -> None:
        self._named = named

    def __iter__(self) -> Iterator[str]:
        return iter(self._named())

    def __len__(self) -> int:
        return len(self._named())

    def __contains__(self, address: object) -> bool:
        return address in self._named()


class Seeds:
    """The peers to join.

    Attributes:
        sources: the sources; without any there is nothing to look up.
        addresses: all addresses that are known now, without this peer's own.
        named: those of them that the user has named, see `NamedSeeds`.
        names: for an address, the host name of which it was looked up, and for which certificates are valid.
        failures: for each source that has not answered last time, the reason and the remedy.
    """

    def __init__(
        self,
        join: Iterable[str] = (),
        credentials: Credentials | None = None,
        *,
        on_found: Callable[[FoundSeeds], object] | None = None,
    ) -> None:
        parsed = {text: parse_seed(text) for text in join}
        self._given = tuple(text for text, source in parsed.items() if source is None)
        self.sources: tuple[SeedSource, ...] = tuple(source for source in parsed.values() if source is not None)
        self._credentials, self._on_found = credentials or Credentials(), on_found
        self._salt = os.urandom(8)
        self._clusters: dict[str, EtcdSeeds] = {}
        self.named = NamedSeeds(self._named)
        self._found: dict[str, FoundSeeds] = {}
        self._endpoint, self._listen = "", ""
        self.names: dict[str, str] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        found = (address for each in self._found.values() for address in each.addresses)
        return tuple(dict.fromkeys((*self._given, *found)))

    def _named(self) -> tuple[str, ...]:
        trusted = (self._found.get(source.text) for source in self.sources if source.kind is not SourceKind.ETCD)
        found = (address for each in trusted if each is not None for address in each.addresses)
        members = (member for source in self.sources for member in source.members)
        return (*self._given, *found, *members)

    @property
    def failures(self) -> Mapping[str, str]:
        return {name: found.failure for name, found in self._found.items() if found.failure}

    @property
    def findings(self) -> str:
        return "; ".join(map(str, self._found.values()))

    def bind(self, endpoint: str, listen: str | None) -> None:
        """Says which peer this is, so that its own address is left out from now on."""
        self._endpoint, self._listen = ("", "") if endpoint.startswith(CLIENT_PREFIX) else (endpoint, listen or "")
        self._found.clear()

    async def look_up(self, *, report: bool = True) -> None:
        """Asks each source once; with `report` what has changed is logged, and given to `on_found`.

        What a source has named stays while it does not answer. One that can never be asked here raises a ConfigError.
        """
        for found in await asyncio.gather(*map(self._ask, self.sources)):
            before = self._found.get(found.source)
            self._found[found.source] = found
            if report and found != before:
                shown = self._on_found is not None or not found.failure
                logger.log(logging.INFO if shown else logging.WARNING, "%s", found)
                if self._on_found is not None:
                    self._on_found(found)

    async def _ask(self, source: SeedSource) -> FoundSeeds:
        try:
            answer = await self._answer(source)
        except SeedsNotFoundError as error:
            last = self._found.get(source.text, FoundSeeds(source.text))
            return FoundSeeds(source.text, last.addresses, last.own, str(error))
        addresses = list(dict.fromkeys(answer))[:MAX_SEEDS]
        own = await self._own(source, addresses)
        others = self._sample([address for address in addresses if address not in own])
        return FoundSeeds(source.text, others, own)

    def _sample(self, addresses: list[str]) -> tuple[str, ...]:
        """At most `MAX_CALLED` of many addresses: the same ones at each look-up, and other ones at each peer."""
        if len(addresses) <= MAX_CALLED:
            return tuple(addresses)
        return tuple(sorted(addresses, key=lambda name: blake2b(name.encode(), key=self._salt).digest())[:MAX_CALLED])

    def _cluster(self, source: SeedSource) -> EtcdSeeds:
        if source.text not in self._clusters:
            self._clusters[source.text] = EtcdSeeds(source, self._credentials, MAX_SEEDS)
        return self._clusters[source.text]

    async def keep_published(self) -> None:
        """Keeps this peer's address in each etcd cluster, until it is cancelled. A failure is tried again."""
        sources = [source for source in self.sources if source.kind is SourceKind.ETCD]
        while sources and self._endpoint:
            await asyncio.sleep(RENEW_SECONDS)
            for source in sources:
                try:
                    await self._cluster(source).publish(self._endpoint)
                except AveragingError as error:
                    logger.debug("%s: the address of this peer could not be renewed: %s", source, error)

    async def close(self) -> None:
        """Removes this peer's address from etcd, and closes the connections to it."""
        clusters, self._clusters = self._clusters, {}
        for cluster in clusters.values():
            await cluster.close()

    async def _read_etcd(self, source: SeedSource) -> list[str]:
        cluster = self._cluster(source)
        try:
            if self._endpoint:
                await cluster.publish(self._endpoint)  # first, so that of two peers at least one sees the other
            return await cluster.read()
        except AveragingError as error:
            secured = "with TLS and certificates of this peer's authority" if self._credentials.tls else "without TLS"
            raise SeedsNotFoundError(
                f"{error}; check the address, and that etcd serves there {secured}, as this peer calls it"
            ) from None

    async def _answer(self, source: SeedSource) -> list[str]:
        match source.kind:
            case SourceKind.DNS:
                addresses = await resolve_name(source.name, source.port)
                for address in [address for address, name in self.names.items() if name == source.name]:
                    del self.names[address]
                self.names.update(dict.fromkeys(addresses, source.name))
                return addresses
            case SourceKind.FILE:
                return await asyncio.to_thread(read_seed_file, source.name)
            case SourceKind.SLURM:
                return read_slurm_nodes(os.environ, source.port)
            case SourceKind.ETCD:
                return await self._read_etcd(source)

    async def _own(self, source: SeedSource, addresses: Collection[str]) -> tuple[str, ...]:
        if not self._endpoint:
            return ()
        if source.kind is SourceKind.ETCD:  # written by others, so nothing is looked up
            return tuple(address for address in addresses if address == self._endpoint)
        node = own_node() if source.kind is SourceKind.SLURM else ""
        return await asyncio.to_thread(own_addresses, addresses, self._endpoint, self._listen, node)


def own_addresses(addresses: Iterable[str], endpoint: str, listen: str, node: str = "") -> tuple[str, ...]:
    """Those of `addresses`, HOST:PORT each, that lead to the peer with this endpoint. It looks names up: it takes time.

    The peer listens on `listen`, whose port 0 is that of `endpoint`; `node` is a further name of this machine.
    """
    host, port = parse_address(endpoint)
    listens_on, listen_port = parse_address(listen or endpoint)
    listen_port = listen_port or port
    wildcard = (address := parse_ip(listens_on)) is not None and address.is_unspecified

    def is_own_address(address: str) -> bool:
        other, other_port = parse_address(address)
        bare = other.strip("[]")
        if other_port == port and (address == endpoint or are_same(bare, host.strip("[]"))):
            return True
        if other_port != listen_port:
            return False
        return bare == node or (is_own(bare) if wildcard else are_same(bare, listens_on.strip("[]")))

    return tuple(address for address in addresses if is_own_address(address))


async def look_up(join: Iterable[str], credentials: Credentials | None = None) -> list[str]:
    """Returns the addresses that `join` names, for a command; raises a DiscoveryError if there are none."""
    seeds = Seeds(join, credentials)
    try:
        await seeds.look_up()
    finally:
        await seeds.close()
    if not seeds.addresses:
        raise DiscoveryError(f"no peer to call: {seeds.findings}")
    return list(seeds.addresses)
