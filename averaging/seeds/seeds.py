"""The peers that `join` names: the addresses in it, and those that its sources have given so far."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from averaging.common import (
    CLIENT_PREFIX,
    SeedSource,
    SourceKind,
    are_same,
    counted,
    is_own,
    listed,
    parse_address,
    parse_ip,
    parse_seed,
)
from averaging.errors import DiscoveryError
from averaging.seeds.sources import (
    MAX_SEEDS,
    SeedsNotFoundError,
    own_node,
    read_seed_file,
    read_slurm_nodes,
    resolve_name,
)

logger = logging.getLogger("averaging.seeds")


@dataclass(frozen=True, slots=True)
class FoundSeeds:
    """What a source answered.

    Attributes:
        source: the source as its user wrote it.
        addresses: addresses of other peers.
        own: addresses of this peer.
        failure: why there is no answer, and what to do; empty if there is one.
    """

    source: str
    addresses: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    failure: str = ""

    def __str__(self) -> str:
        if self.failure:
            return f"{self.source}: {self.failure}"
        own = f"; {listed(self.own)} {'is' if len(self.own) == 1 else 'are'} this peer's" if self.own else ""
        others = (
            f"{counted(len(self.addresses), 'peer')}: {listed(self.addresses)}" if self.addresses else "no other peer"
        )
        return f"{self.source} has {others}{own}"


class Seeds(Collection[str]):
    """The addresses of `join`. As a collection it has those that the user has named, himself or through a source.

    Args:
        join: addresses and sources.
        on_found: callback when a source answers otherwise than before, in the event loop.

    Attributes:
        sources: the sources; without any there is nothing to look up.
        addresses: all addresses that are known now, without this peer's own.
        names: for an address, the host name of which it was looked up, and for which certificates are valid.
        failures: for each source that has not answered last time, the reason and the remedy.

    Raises:
        ConfigError: a value is malformed.
    """

    def __init__(self, join: Iterable[str] = (), *, on_found: Callable[[FoundSeeds], object] | None = None) -> None:
        parsed = {text: parse_seed(text) for text in join}
        self._given = tuple(text for text, source in parsed.items() if source is None)
        self.sources: tuple[SeedSource, ...] = tuple(source for source in parsed.values() if source is not None)
        self._on_found = on_found
        self._found: dict[str, FoundSeeds] = {}
        self._endpoint, self._listen = "", ""
        self.names: dict[str, str] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.addresses)

    def __len__(self) -> int:
        return len(self.addresses)

    def __contains__(self, address: object) -> bool:
        return address in self._given or any(address in found.addresses for found in self._found.values())

    @property
    def addresses(self) -> tuple[str, ...]:
        """See the class."""
        found = (address for each in self._found.values() for address in each.addresses)
        return tuple(dict.fromkeys((*self._given, *found)))

    @property
    def failures(self) -> Mapping[str, str]:
        """See the class."""
        return {name: found.failure for name, found in self._found.items() if found.failure}

    @property
    def findings(self) -> str:
        """What the sources answered last, for a message."""
        return "; ".join(map(str, self._found.values()))

    def bind(self, endpoint: str, listen: str | None) -> None:
        """Says which peer this is, so that its own address is left out from now on.

        Args:
            endpoint: its endpoint.
            listen: the address on which it listens; None for a client.
        """
        self._endpoint, self._listen = ("", "") if endpoint.startswith(CLIENT_PREFIX) else (endpoint, listen or "")
        self._found.clear()

    async def look_up(self, *, report: bool = True) -> None:
        """Asks each source once. What one that does not answer has named before stays.

        Args:
            report: whether what has changed is logged, and given to `on_found`.

        Raises:
            ConfigError: a source cannot be asked here, however often.
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
        addresses = tuple(dict.fromkeys(answer))[:MAX_SEEDS]
        own = await self._own(source, addresses)
        return FoundSeeds(source.text, tuple(a for a in addresses if a not in own), own)

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
            case _:
                raise SeedsNotFoundError("etcd is not supported yet; name peers as HOST:PORT")

    async def _own(self, source: SeedSource, addresses: Collection[str]) -> tuple[str, ...]:
        """Those of `addresses` at which this peer listens."""
        if not self._endpoint:
            return ()
        node = own_node() if source.kind is SourceKind.SLURM else ""
        return await asyncio.to_thread(own_addresses, addresses, self._endpoint, self._listen, node)


def own_addresses(addresses: Iterable[str], endpoint: str, listen: str, node: str = "") -> tuple[str, ...]:
    """Those of `addresses` that lead to the peer with this endpoint. It looks names up, and so may take seconds.

    Args:
        addresses: HOST:PORT each.
        endpoint: address at which others reach the peer.
        listen: address on which it listens; port 0 stands for that of `endpoint`.
        node: name of this machine beside its host names; empty if it has none.
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


async def look_up(join: Iterable[str]) -> list[str]:
    """Returns the addresses that `join` names, for a command that calls peers and is none itself.

    Args:
        join: addresses and sources.

    Raises:
        ConfigError: a value is malformed, or a source cannot be asked here.
        DiscoveryError: the sources name no address; the message says why and what to do.
    """
    seeds = Seeds(join)
    await seeds.look_up()
    if not seeds.addresses:
        raise DiscoveryError(f"no peer to call: {seeds.findings}")
    return list(seeds.addresses)
