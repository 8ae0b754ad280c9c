"""Gossip on real sockets: peers find each other, tell each other, and survive what processes and networks do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from averaging.discovery.gossip.access import GossipSettings
from averaging.discovery.gossip.gossip_discovery import GossipDiscovery, peers_key
from averaging.transport.grpc import GrpcTransport
from tests.support.grpc_fakes import MAX_MESSAGE_BYTES, FakePeer
from tests.support.ports import free_address

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

RUN = "run"
KEY = f"{RUN}.0b"
PEERS = peers_key(RUN)

FAST = GossipSettings(peer_lifetime=1.5, peer_refresh=0.4, exchange_interval=0.1, retry_interval=0.2)
"""So that what takes half a minute takes a second."""


class Host:
    """One peer in a task of its own, which can be stopped and killed."""

    def __init__(
        self,
        join: Sequence[str] = (),
        *,
        listen: str | None = "",
        run_id: str = RUN,
        settings: GossipSettings | None = None,
        join_timeout: float = 20.0,
    ) -> None:
        self.transport = GrpcTransport(free_address() if listen == "" else listen, max_message_bytes=MAX_MESSAGE_BYTES)
        self._options = (run_id, join, settings, join_timeout)
        self._leave = asyncio.Event()
        self._bound = asyncio.Event()
        self._joined = asyncio.Event()
        self.endpoint = ""
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        run_id, join, settings, join_timeout = self._options
        try:
            self.endpoint = await self.transport.bind()
            settings = replace(settings or GossipSettings(), join_timeout=join_timeout)
            self.discovery = GossipDiscovery(run_id, self.endpoint, self.transport, join=join, settings=settings)
            await self.transport.serve(FakePeer(), self.discovery)
            self._bound.set()
            async with self.discovery:
                self._joined.set()
                await self._leave.wait()
        finally:
            await self.transport.close(0.5 if self._leave.is_set() else 0.0)

    async def bound(self) -> str:
        await self._first_of(self._bound)
        return self.endpoint

    async def joined(self) -> GossipDiscovery:
        await self._first_of(self._joined)
        return self.discovery

    async def stop(self) -> None:
        self._leave.set()
        await self.task

    async def kill(self) -> None:
        """What others see of a SIGKILL: connections break, nothing is withdrawn, the port is free."""
        await self.transport.close()
        self.discovery._rumours.flush = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _first_of(self, event: asyncio.Event) -> None:
        waiter = asyncio.create_task(event.wait())
        await asyncio.wait([waiter, self.task], return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if not event.is_set():
            await self.task


@asynccontextmanager
async def hosts() -> AsyncGenerator[list[Host], None]:
    """A list to put peers in; those still there at the end leave."""
    started: list[Host] = []
    try:
        yield started
    finally:
        for host in started:
            if not host.task.done():
                host._leave.set()
        await asyncio.gather(*(host.task for host in started), return_exceptions=True)


async def grow(started: list[Host], count: int, settings: GossipSettings | None = None) -> list[GossipDiscovery]:
    """Starts `count` peers that all know of each other."""
    first = Host(settings=settings)
    started.append(first)
    await first.joined()
    others = [Host([first.endpoint], settings=settings) for _ in range(count - 1)]
    started.extend(others)
    peers = [first.discovery, *[await host.joined() for host in others]]
    await all_see(peers, PEERS, {host.endpoint for host in started})
    return peers


async def sees(peer: GossipDiscovery, key: str, subkeys: set[str]) -> None:
    """Waits until `peer` reads exactly these subkeys."""
    async with aclosing(peer.watch(key)) as changes:
        async for entries in changes:
            if set(entries) == subkeys:
                return


async def all_see(peers: Iterable[GossipDiscovery], key: str, subkeys: set[str], within: float = 30.0) -> None:
    async with asyncio.timeout(within), asyncio.TaskGroup() as tasks:
        for peer in peers:
            tasks.create_task(sees(peer, key, subkeys))


@pytest.mark.asyncio
async def test_what_all_store_all_read_and_what_leaves_is_gone() -> None:
    async with hosts() as started:
        peers = await grow(started, 8)
        names = [host.endpoint for host in started]
        for peer, name in zip(peers, names, strict=True):
            await peer.store(KEY, name, b"value of " + name.encode(), time.time() + 100)
        await all_see(peers, KEY, set(names))
        for peer in peers:
            assert all(entry.value == b"value of " + name.encode() for name, entry in peer.get(KEY).items())
            assert peer.refused == {}
        await peers[0].withdraw(KEY, names[0])
        await all_see(peers, KEY, set(names[1:]))
        await started[1].stop()
        await all_see([peers[0], *peers[2:]], PEERS, {names[0], *names[2:]})
        await all_see([peers[0], *peers[2:]], KEY, set(names[2:]))


@pytest.mark.asyncio
async def test_two_peers_that_know_only_each_other_find_each_other() -> None:
    async with hosts() as started:
        second = free_address()
        started.append(one := Host([second]))
        first = await one.bound()
        started.append(other := Host([first], listen=second))
        peers = [await one.joined(), await other.joined()]
        await all_see(peers, PEERS, {first, second})


@pytest.mark.asyncio
async def test_a_killed_peer_vanishes_and_its_successor_at_the_same_address_takes_its_places() -> None:
    async with hosts() as started:
        peers = await grow(started, 4, FAST)
        victim = started.pop()
        rest = peers[:3]
        await peers[3].store(KEY, victim.endpoint, b"old", time.time() + 3)
        await peers[3].store(KEY, "gone:1", b"", time.time() + 3)
        await all_see(rest, KEY, {victim.endpoint, "gone:1"})
        await victim.kill()
        started.append(again := Host([started[0].endpoint], listen=victim.endpoint, settings=FAST))
        newcomer = await again.joined()
        await newcomer.store(KEY, victim.endpoint, b"new", time.time() + 100)
        assert newcomer.get(KEY)[victim.endpoint].value == b"old"
        await all_see([*rest, newcomer], KEY, {victim.endpoint})
        for peer in [*rest, newcomer]:
            assert peer.get(KEY)[victim.endpoint].value == b"new"
        await all_see([*rest, newcomer], PEERS, {host.endpoint for host in started})


@pytest.mark.asyncio
async def test_a_client_follows_one_member_and_then_another() -> None:
    async with hosts() as started:
        peers = await grow(started, 3, FAST)
        started.append(client_host := Host([started[0].endpoint], listen=None, settings=FAST))
        client = await client_host.joined()
        members = {host.endpoint for host in started[:3]}
        await all_see([client], PEERS, members)
        await peers[1].store(KEY, "a:1", b"", time.time() + 100)
        await all_see([client], KEY, {"a:1"})
        await client.store(KEY, "b:1", b"", time.time() + 100)
        await all_see([*peers, client], KEY, {"a:1", "b:1"})
        await asyncio.gather(*(host.kill() for host in started[1:3]))
        await all_see([client], PEERS, {started[0].endpoint})
        await peers[0].store(KEY, "c:1", b"", time.time() + 100)
        await all_see([peers[0], client], KEY, {"a:1", "b:1", "c:1"})
        await client_host.stop()
        await all_see([peers[0]], KEY, {"a:1", "c:1"})
