"""The contract of discovery, for every implementation, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from inspect import Signature, signature
from typing import Any

import pytest

from averaging.discovery.base import MAX_LIFETIME, MAX_VALUE_BYTES, Discovery, Entry
from averaging.discovery.etcd import EtcdDiscovery
from averaging.errors import ClosedError, DiscoveryError
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry
from tests.support.gossip_swarm import GossipSwarm, joined
from tests.support.memory_etcd import MemoryEtcd

KEY = "run.0b"


@dataclass(frozen=True)
class Peer:
    """A discovery that has been entered, and how to leave it."""

    discovery: Discovery
    leave: Callable[[], Awaitable[None]]


Two = Callable[[], AbstractAsyncContextManager[tuple[Peer, Peer]]]
"""Makes two peers of one run."""


def memory(delay: float) -> Two:
    @asynccontextmanager
    async def two() -> AsyncIterator[tuple[Peer, Peer]]:
        registry = MemoryRegistry(clock=virtual_time.clock, delay=delay)
        async with AsyncExitStack() as one, AsyncExitStack() as other:
            yield (
                Peer(await one.enter_async_context(MemoryDiscovery(registry)), one.aclose),
                Peer(await other.enter_async_context(MemoryDiscovery(registry)), other.aclose),
            )

    return two


def gossip(client: bool) -> Two:
    @asynccontextmanager
    async def two() -> AsyncIterator[tuple[Peer, Peer]]:
        async with GossipSwarm() as swarm:
            first = swarm.start("a:1")
            second = swarm.start(None if client else "b:1", ["a:1"])
            await joined(second)
            await settle()
            yield (
                Peer(first.discovery, lambda: swarm.stop("a:1")),
                Peer(second.discovery, lambda: swarm.stop(second.transport.endpoint)),
            )

    return two


def in_etcd(latency: tuple[float, float], tokens: tuple[str, ...] = ()) -> Two:
    @asynccontextmanager
    async def two() -> AsyncIterator[tuple[Peer, Peer]]:
        etcd = MemoryEtcd(latency)
        async with AsyncExitStack() as one, AsyncExitStack() as other:
            peers = []
            for name, stack in (("a:1", one), ("b:1", other)):
                discovery = EtcdDiscovery("run", name, etcd.client(), tokens=tokens, clock=virtual_time.clock)
                peers.append(Peer(await stack.enter_async_context(discovery), stack.aclose))
            yield peers[0], peers[1]

    return two


Scenario = Callable[[Discovery, Discovery], Awaitable[None]]


class Simulation:
    """Runs a scenario for two peers, and again with the peers exchanged."""

    def __init__(self, two: Two) -> None:
        self._two = two

    def __call__(self, scenario: Scenario) -> None:
        self.peers(lambda one, other: scenario(one.discovery, other.discovery))

    def peers(self, scenario: Callable[[Peer, Peer], Awaitable[None]]) -> None:
        for exchanged in (False, True):
            virtual_time.run(self._run(scenario, exchanged))

    async def _run(self, scenario: Callable[[Peer, Peer], Awaitable[None]], exchanged: bool) -> None:
        async with self._two() as (one, other):
            for peer in (one, other):
                for key in (KEY, KEY + "1"):
                    await peer.discovery.follow(key)
            await (scenario(other, one) if exchanged else scenario(one, other))


@pytest.fixture(
    params=[
        pytest.param(memory(0.0), id="memory"),
        pytest.param(memory(0.05), id="memory-delayed"),
        pytest.param(gossip(client=False), id="gossip"),
        pytest.param(gossip(client=True), id="gossip-client"),
        pytest.param(in_etcd((0.0, 0.0)), id="etcd"),
        pytest.param(in_etcd((0.001, 0.02)), id="etcd-delayed"),
        pytest.param(in_etcd((0.0, 0.0), tokens=("0123456789abcdef",)), id="etcd-sealed"),
    ]
)
def simulate(request: pytest.FixtureRequest) -> Simulation:
    return Simulation(request.param)


def between_two(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Makes a test of a scenario of two peers, which may have parameters besides."""

    def test(simulate: Simulation, **parameters: Any) -> None:
        simulate(lambda one, other: scenario(one, other, **parameters))

    given = [each for name, each in signature(scenario).parameters.items() if name not in ("one", "other")]
    own = signature(test).parameters["simulate"]
    test.__signature__ = Signature([own, *given])  # type: ignore[attr-defined]
    return test


def later(seconds: float) -> float:
    return virtual_time.clock() + seconds


async def settle() -> None:
    await asyncio.sleep(0.5)


@between_two
async def test_what_one_stores_the_other_reads(one: Discovery, other: Discovery) -> None:
    expiration = later(10)
    await one.store(KEY, "x:1", b"value", expiration)
    await one.store(KEY + "1", "y:1", b"", expiration)
    assert one.get(KEY) == {"x:1": Entry(b"value", expiration)}  # the owner reads it at once
    await settle()
    for view in (one, other):
        assert view.get(KEY) == {"x:1": Entry(b"value", expiration)}
        assert view.get("run.nothing") == {}
        assert view.knows("x:1")
        assert view.knows("y:1")
        assert not view.knows("z:1")
        assert {"x:1", "y:1"} <= view.endpoints()


@between_two
async def test_a_later_record_replaces_an_earlier_one(one: Discovery, other: Discovery) -> None:
    await one.store(KEY, "x:1", b"1", later(10))
    await settle()
    await one.store(KEY, "x:1", b"2", expiration := later(5))
    await settle()
    assert other.get(KEY) == one.get(KEY) == {"x:1": Entry(b"2", expiration)}


@between_two
async def test_only_the_owner_withdraws_a_record(one: Discovery, other: Discovery) -> None:
    await one.store(KEY, "x:1", b"", later(10))
    await settle()
    await other.withdraw(KEY, "x:1")
    await other.withdraw(KEY, "nothing:1")
    await settle()
    assert one.knows("x:1")
    await one.withdraw(KEY, "x:1")
    assert one.get(KEY) == {}
    await settle()
    for view in (one, other):
        assert view.get(KEY) == {}
        assert not view.knows("x:1")
    await one.store(KEY, "x:1", b"again", later(10))
    await settle()
    assert other.get(KEY)["x:1"].value == b"again"


@between_two
async def test_a_record_is_gone_when_it_expires(one: Discovery, other: Discovery) -> None:
    await one.store(KEY, "x:1", b"", expiration := later(5))
    await asyncio.sleep(expiration - virtual_time.clock() - 0.001)
    assert one.get(KEY).keys() == other.get(KEY).keys() == {"x:1"}
    await asyncio.sleep(expiration - virtual_time.clock() + 1e-6)
    for view in (one, other):
        assert view.get(KEY) == {}
        assert not view.knows("x:1")
        assert "x:1" not in view.endpoints()


@between_two
async def test_the_first_owner_holds_a_place_until_its_record_expires(one: Discovery, other: Discovery) -> None:
    await one.store(KEY, "x:1", b"first", later(5))
    await settle()
    await other.store(KEY, "x:1", b"second", later(20))
    await settle()
    await one.store(KEY, "x:1", b"renewed", later(5))
    await settle()
    assert one.get(KEY)["x:1"].value == other.get(KEY)["x:1"].value == b"renewed"
    await asyncio.sleep(5)
    assert one.get(KEY)["x:1"].value == other.get(KEY)["x:1"].value == b"second"


@pytest.mark.parametrize(
    ("key", "subkey", "value", "seconds"),
    [
        (KEY, "x:1", bytes(MAX_VALUE_BYTES + 1), 1),
        ("k" * 257, "x:1", b"", 1),
        (KEY, "x" * 257, b"", 1),
        (KEY, "x:1", b"", 0),
        (KEY, "x:1", b"", -1),
        (KEY, "x:1", b"", MAX_LIFETIME + 1),
        (KEY, "x:1", b"", float("nan")),
    ],
)
@between_two
async def test_invalid_records_raise(
    one: Discovery, other: Discovery, key: str, subkey: str, value: bytes, seconds: float
) -> None:
    with pytest.raises(DiscoveryError, match="cannot store"):
        await one.store(key, subkey, value, later(seconds))
    assert one.get(key) == {}


@between_two
async def test_too_many_records_raise(one: Discovery, other: Discovery) -> None:
    async def store_many() -> None:
        for number in range(257):
            await one.store(KEY, f"x:{number}", b"%d" % number, later(100))

    with pytest.raises(DiscoveryError, match="its owner has too many records"):
        await store_many()
    await one.store(KEY, "x:0", b"replaced", later(100))
    await other.store(KEY, "y:1", b"", later(100))
    await settle()
    assert other.get(KEY) == one.get(KEY)
    assert {"x:0", "x:254", "y:1"} <= other.get(KEY).keys()


@between_two
async def test_watching_yields_at_once_and_at_every_change(one: Discovery, other: Discovery) -> None:
    for view in (one, other):
        async with aclosing(view.watch(KEY)) as watching:
            assert await anext(watching) == {}
            await one.store(KEY, "x:1", b"1", later(10))
            assert (await anext(watching))["x:1"].value == b"1"
            await one.store(KEY, "x:1", b"2", expiration := later(2))
            await one.store("run.other", "x:1", b"", later(2))
            assert (await anext(watching))["x:1"].value == b"2"
            assert await anext(watching) == {}
            assert virtual_time.clock() == pytest.approx(expiration, abs=0.002)


@between_two
async def test_watching_merges_changes_for_a_slow_reader(one: Discovery, other: Discovery) -> None:
    async with aclosing(other.watch(KEY)) as watching:
        assert await anext(watching) == {}
        for number in range(10):
            await one.store(KEY, f"x:{number}", b"", later(10))
        await settle()
        assert len(await anext(watching)) == 10
        await one.withdraw(KEY, "x:0")
        assert len(await anext(watching)) == 9


def test_leaving_withdraws_and_ends_watching(simulate: Simulation) -> None:
    async def scenario(one: Peer, other: Peer) -> None:
        await one.discovery.store(KEY, "x:1", b"", later(100))
        await settle()
        assert other.discovery.knows("x:1")

        async def watch() -> int:
            return len([entries async for entries in one.discovery.watch("run.watched")])

        watcher = asyncio.create_task(watch())
        await settle()
        await one.leave()
        assert await watcher == 1
        await settle()
        assert not other.discovery.knows("x:1")
        with pytest.raises(ClosedError):
            await one.discovery.store(KEY, "x:1", b"", later(100))
        await one.discovery.withdraw(KEY, "x:1")
        assert one.discovery.get(KEY) == {}

    simulate.peers(scenario)
