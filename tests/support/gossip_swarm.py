"""Peers that gossip on the memory network in virtual time."""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self, cast

from averaging.discovery.gossip.bootstrap import Waiting
from averaging.discovery.gossip.gossip_discovery import GossipDiscovery, peers_key
from averaging.discovery.gossip.membership import GossipSettings
from averaging.discovery.gossip.record import Identity, UnsignedIdentity
from averaging.errors import PeerUnreachableError
from averaging.protocol.messages import Refusal, Rumour
from averaging.testing import virtual_time
from averaging.testing.transport import MemoryNetwork, MemoryTransport
from averaging.transport.base import AveragingService

RUN = "run"
PEERS = peers_key(RUN)
KEY = f"{RUN}.0b"

NO_AVERAGING = cast(AveragingService, None)


class LossyTransport(MemoryTransport):
    """Also loses requests, before they have an effect; the network itself loses replies."""

    async def push(self, endpoint: str, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        if self._network.rng.random() < self._network.loss:
            await asyncio.sleep(self._network._delay())
            raise PeerUnreachableError(endpoint, "lost")  # not refused: nobody says that the port is closed
        return await super().push(endpoint, run_id, rumours)


class Host:
    """One peer, in a task of its own as in a process of its own."""

    def __init__(self, discovery: GossipDiscovery, transport: MemoryTransport) -> None:
        self.discovery = discovery
        self.transport = transport
        self.joined = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self.transport.serve(NO_AVERAGING, self.discovery)
        try:
            async with self.discovery:
                self.joined.set()
                await self.leave.wait()
            await asyncio.sleep(0.1)  # a real transport, too, lets calls in progress end
        finally:
            await self.transport.close()


class GossipSwarm:
    """Peers by their endpoints. Everything random comes from `seed`."""

    def __init__(
        self,
        seed: int = 0,
        *,
        settings: GossipSettings | None = None,
        latency: tuple[float, float] = (0.001, 0.02),
        loss: float = 0.0,
    ) -> None:
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(self.rng, latency=latency, loss=loss)
        self.settings = settings or GossipSettings()
        self.hosts: dict[str, Host] = {}

    def __getitem__(self, endpoint: str) -> GossipDiscovery:
        return self.hosts[endpoint].discovery

    def start(
        self,
        endpoint: str | None,
        join: Sequence[str] = (),
        *,
        run_id: str = RUN,
        identity: Identity | None = None,
        join_timeout: float = 10.0,
        clock: Callable[[], float] = virtual_time.clock,
        on_joining: Callable[[Waiting], None] | None = None,
    ) -> Host:
        """Starts a peer; None starts a client. It has not joined yet."""
        transport = (LossyTransport if self.network.loss else MemoryTransport)(self.network, endpoint)
        discovery = GossipDiscovery(
            run_id,
            transport.endpoint,
            transport,
            join=join,
            identity=identity or UnsignedIdentity(self.rng),
            clock=clock,
            rng=random.Random(self.rng.getrandbits(64)),
            settings=replace(self.settings, join_timeout=join_timeout),
        )
        discovery.on_joining = on_joining
        host = self.hosts[transport.endpoint] = Host(discovery, transport)
        return host

    async def grow(self, count: int, pause: float = 0.2, **options: Any) -> list[GossipDiscovery]:
        """Starts peer-0:1, peer-1:1, ..., one after the other; all but the first join one that is there."""
        names = [f"peer-{number}:1" for number in range(count)]
        for number, name in enumerate(names):
            host = self.start(name, [names[self.rng.randrange(number)]] if number else [], **options)
            await joined(host)
            await asyncio.sleep(pause)
        return [self[name] for name in names]

    async def kill(self, endpoint: str) -> None:
        """Ends a peer as SIGKILL does, without a message to the others."""
        host = self.hosts.pop(endpoint)
        self.network.kill(endpoint)
        self.network.cut(frozenset([endpoint]))
        host.task.cancel()
        await asyncio.wait([host.task])
        self.network.heal()

    async def stop(self, endpoint: str) -> None:
        """Has a peer leave."""
        host = self.hosts.pop(endpoint)
        host.leave.set()
        await host.task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        """Ends all peers, and checks that no service raised an unexpected error."""
        for host in self.hosts.values():
            host.task.cancel()
        if self.hosts:
            await asyncio.wait([host.task for host in self.hosts.values()])
        assert kind is not None or self.network.errors == []


async def joined(host: Host) -> None:
    """Waits until a peer has joined; raises its error if it has not."""
    waiter = asyncio.create_task(host.joined.wait())
    await asyncio.wait([waiter, host.task], return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if not host.joined.is_set():
        await host.task


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(condition: Callable[[], bool], within: float, step: float = 0.01) -> float:
    """Waits, in virtual time, until `condition` holds; returns how long that took."""
    start = now()
    while not condition():
        assert now() - start <= within, f"not within {within} s"
        await asyncio.sleep(step)
    return now() - start


def everywhere(discoveries: Iterable[GossipDiscovery], key: str, subkeys: set[str]) -> Callable[[], bool]:
    """Whether all peers read exactly these subkeys under `key`."""
    listed = list(discoveries)
    return lambda: all(set(discovery.get(key)) == subkeys for discovery in listed)


def members(discovery: GossipDiscovery) -> set[str]:
    return set(discovery.get(peers_key(RUN)))


def in_an_hour() -> float:
    return virtual_time.clock() + 3500
