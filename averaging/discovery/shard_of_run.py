"""One shard of a run whose sites divide the model: its peers meet only those that hold the same shard elsewhere.

The peers of all shards share the discovery of their run, so any of them can be joined through any other. Each tells in
one record which shard of which site it holds. The keys of everything else that concerns the shard have its number.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from averaging.common import pack, unpack
from averaging.discovery.base import Diagnosis, Discovery, Entry
from averaging.errors import ConfigError

LIFETIME, REFRESH = 60.0, 20.0  # seconds until the record of a peer's shard expires, and between its renewals

APPEAR_SECONDS = 5.0
"""Seconds in which the shards of a site become known once one of them is."""


def shards_key(run_id: str) -> str:
    return f"{run_id}.shards"


@dataclass(frozen=True, slots=True)
class ShardRecord:
    layout: str  # how its site divides the model
    shard: int
    site: str  # endpoint of the peer that leads it

    def pack(self) -> bytes:
        return pack([self.layout, self.shard, self.site])

    @classmethod
    def unpack(cls, packed: bytes) -> ShardRecord | None:
        with suppress(ValueError):
            match unpack(packed):
                case [str(layout), int(shard), str(site)] if len(layout) <= 128:
                    return cls(layout, shard, site)
        return None


class ShardOfRun:
    """Names the peers of one shard by their sites, so that all ranks of a site name the other sites alike.

    `layout` describes how the sites divide the model; `site` is the endpoint of the peer that leads this one, empty if
    it is this peer.
    """

    def __init__(self, run_id: str, layout: str, shard: int, site: str = "") -> None:
        self._run_id, self._layout, self._shard, self.site = run_id, layout, shard, site
        self._base: Discovery | None = None
        self._endpoint = ""

    def discovery_in(self, base: Discovery, endpoint: str) -> Discovery:
        """The discovery of the shard within that of the run, for the peer with this endpoint."""
        self._base, self._endpoint = base, endpoint
        self.site = self.site or endpoint
        return _DiscoveryOfShard(base, f"@{self._shard}", self.members)

    @property
    def key(self) -> str:
        return shards_key(self._run_id)

    def record(self) -> bytes:
        return ShardRecord(self._layout, self._shard, self.site).pack()

    def members(self) -> dict[str, str]:
        return {
            name: record.site
            for name, record in self._shard_records().items()
            if name != self._endpoint and (record.layout, record.shard) == (self._layout, self._shard)
        }

    def site_of(self, endpoint: str) -> str | None:
        return self.site if endpoint == self._endpoint else self.members().get(endpoint)

    async def endpoints_of(self, sites: Sequence[str]) -> list[str]:
        """The peers of these sites that hold the same shard; waits a while for those that are not known yet."""

        def known() -> list[str]:
            endpoints = {site: name for name, site in self.members().items()}
            return [endpoints[site] for site in sites if site in endpoints]

        if self._base is not None and len(known()) < len(sites):
            with suppress(TimeoutError):
                async with asyncio.timeout(APPEAR_SECONDS), aclosing(self._base.watch(self.key)) as changes:
                    async for _ in changes:
                        if len(known()) == len(sites):
                            break
        return known()

    def translated(
        self, expected: Callable[[Mapping[str, bytes]], Collection[str]]
    ) -> Callable[[Mapping[str, bytes]], Collection[str]]:
        """A function of this shard's announcements, made from one of announcements by site."""

        def translated(announcements: Mapping[str, bytes]) -> Collection[str]:
            members = self.members()
            endpoints = {members.get(name, name): name for name in announcements}
            named = {site: announcements[name] for site, name in endpoints.items()}
            return [endpoints[site] for site in expected(named) if site in endpoints]

        return translated

    def check(self, whole: Collection[str]) -> None:
        """Checks that all sites of the run divide the model alike; `whole` are peers that do not divide it."""
        for name, record in sorted(self._shard_records().items()):
            if record.layout != self._layout:
                raise ConfigError(
                    f"this site divides the model into {self._layout}, the site of {name} into {record.layout}; use "
                    "the same number of shards at all sites of a run, or another run_id"
                )
        for name in sorted(whole):
            raise ConfigError(
                f"this site divides the model into {self._layout}, but the peer {name} of the run holds all of it; "
                "divide the model at all sites of a run alike, or use another run_id"
            )

    def _shard_records(self) -> dict[str, ShardRecord]:
        entries = {} if self._base is None else self._base.get(self.key)
        records = {name: ShardRecord.unpack(entry.value) for name, entry in entries.items()}
        return {name: record for name, record in records.items() if record is not None}


class _DiscoveryOfShard:
    """The records of one shard: a discovery whose keys have its number, within that of the run."""

    def __init__(self, base: Discovery, suffix: str, members: Callable[[], Mapping[str, str]]) -> None:
        self._base, self._suffix, self._members = base, suffix, members

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> None:
        await self._base.store(key + self._suffix, subkey, value, expiration)

    async def withdraw(self, key: str, subkey: str) -> None:
        await self._base.withdraw(key + self._suffix, subkey)

    async def follow(self, key: str, *, keep: bool = True) -> None:
        await self._base.follow(key + self._suffix, keep=keep)

    def get(self, key: str) -> Mapping[str, Entry]:
        return self._base.get(key + self._suffix)

    def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        return self._base.watch(key + self._suffix)

    def knows(self, endpoint: str) -> bool:
        return self._base.knows(endpoint)

    def withdrew(self, endpoint: str) -> bool:
        return self._base.withdrew(endpoint)

    def endpoints(self) -> frozenset[str]:
        return self._base.endpoints() & self._members().keys()

    def diagnose(self) -> Diagnosis:
        whole = self._base.diagnose()
        peers = {
            name: replace(
                peer,
                values={
                    key.removesuffix(self._suffix): value
                    for key, value in peer.values.items()
                    if key.endswith(self._suffix)
                },
            )
            for name, peer in whole.peers.items()
            if name in self._members()
        }
        return replace(whole, peers=peers)
