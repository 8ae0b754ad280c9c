"""Discovery in etcd, on the model: outages, leases, compaction, strangers, and what a peer holds."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Self

import pytest
import torch

from averaging import Peer
from averaging.discovery.etcd import EtcdDiscovery, EtcdSettings
from averaging.discovery.etcd.records import RecordLayout
from averaging.discovery.gossip.gossip_discovery import GossipDiscovery
from averaging.discovery.gossip.record import Author, Ed25519Identity, Reason, RecordLimits, UnsignedIdentity
from averaging.errors import JoinError
from averaging.peer import PeerContext
from averaging.protocol.messages import Record
from averaging.testing import virtual_time
from averaging.testing.transport import MemoryNetwork
from averaging.transport.base import Transport
from tests.support.gossip_swarm import NO_AVERAGING
from tests.support.memory_etcd import MemoryEtcd, MemoryEtcdClient
from tests.support.simulated import in_virtual_time

KEY = "run.0b"
LAYOUT = RecordLayout("run")
SETTINGS = EtcdSettings(name="etcd://h:2379")


class Cluster:
    """A model of etcd, and peers in it."""

    def __init__(self) -> None:
        self.etcd = MemoryEtcd((0.001, 0.01))
        self.clients: dict[EtcdDiscovery, MemoryEtcdClient] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def peer(
        self, name: str, *, tokens: tuple[str, ...] = (), settings: EtcdSettings = SETTINGS
    ) -> EtcdDiscovery:
        client = self.etcd.client()
        discovery = EtcdDiscovery(*("run", name, client), tokens=tokens, clock=virtual_time.clock, settings=settings)
        self.clients[discovery] = client
        await self._stack.enter_async_context(discovery)
        await discovery.follow(KEY)
        return discovery

    def go_down(self) -> None:
        self.etcd.down = True
        self.etcd.end_all_watches()


def later(seconds: float) -> float:
    return virtual_time.clock() + seconds


async def settle() -> None:
    await asyncio.sleep(0.5)


@in_virtual_time
async def test_while_etcd_is_down_peers_go_on_with_what_they_know(caplog: pytest.LogCaptureFixture) -> None:
    """Records stay that nobody can renew, what is stored meanwhile appears afterwards, and the log says it once."""
    caplog.set_level(logging.WARNING)
    async with Cluster() as cluster:
        one, other = await cluster.peer("a:1"), await cluster.peer("b:1")
        await one.store(KEY, "a:1", b"1", later(30))
        await settle()
        cluster.go_down()
        await asyncio.sleep(200)
        assert other.get(KEY)["a:1"].value == b"1"
        diagnosis = other.diagnose()
        assert "etcd://h:2379 has not answered for" in diagnosis.isolation
        assert diagnosis.silent.keys() == {"etcd://h:2379"}
        began = virtual_time.clock()
        await one.store(KEY, "a:1", b"2", later(30))
        assert virtual_time.clock() == began  # it does not wait
        assert one.get(KEY)["a:1"].value == b"2"
        cluster.etcd.down = False
        await asyncio.sleep(5)
        assert other.get(KEY)["a:1"].value == b"2"
        assert not other.diagnose().isolation
        await asyncio.sleep(30)
        assert other.get(KEY) == {}
    texts = [record.message for record in caplog.records]
    assert sum("does not answer: connection refused. This peer goes on" in text for text in texts) == 2
    assert sum("answers again after 20" in text for text in texts) == 2


@in_virtual_time
async def test_a_lease_that_has_ended_is_replaced_and_all_is_written_again() -> None:
    async with Cluster() as cluster:
        one, other = await cluster.peer("a:1"), await cluster.peer("b:1")
        await one.store(KEY, "a:1", b"1", later(300))
        await settle()
        cluster.etcd.revoke_all()
        await settle()
        assert other.get(KEY) == {}
        await asyncio.sleep(SETTINGS.renew + 1)
        assert other.get(KEY)["a:1"].value == b"1"
        assert "a:1" in other.endpoints()


@in_virtual_time
async def test_the_records_of_a_dead_peer_go_with_its_lease_and_it_has_not_withdrawn_them_before() -> None:
    async with Cluster() as cluster:
        one, other = await cluster.peer("a:1"), await cluster.peer("b:1")
        await one.store(KEY, "a:1", b"1", later(300))
        await settle()
        cluster.clients[one].cut = True
        await asyncio.sleep(20)
        assert other.knows("a:1")
        assert not other.withdrew("a:1")
        await asyncio.sleep(15)
        assert not other.knows("a:1")
        cluster.clients[one].cut = False
        await asyncio.sleep(SETTINGS.renew + 4)
        assert other.knows("a:1")


@pytest.mark.parametrize("compacted", [False, True])
@in_virtual_time
async def test_a_watch_goes_on_after_a_lost_connection(compacted: bool) -> None:
    """Where it ended, or, if etcd has forgotten that, with all records read again."""
    async with Cluster() as cluster:
        one, other = await cluster.peer("a:1"), await cluster.peer("b:1")
        await one.store(KEY, "a:1", b"1", later(300))
        await one.store(KEY, "c:1", b"1", later(300))
        await settle()
        async with aclosing(other.watch(KEY)) as changes:
            assert len(await anext(changes)) == 2
            cluster.clients[other].cut = True
            cluster.etcd.end_all_watches()
            await settle()
            await one.store(KEY, "a:1", b"2", later(300))
            await one.withdraw(KEY, "c:1")
            await settle()
            if compacted:
                cluster.etcd.compact()
            cluster.clients[other].cut = False
            await asyncio.sleep(5)
            assert {name: entry.value for name, entry in (await anext(changes)).items()} == {"a:1": b"2"}


@in_virtual_time
async def test_a_store_that_was_made_anew_is_read_again() -> None:
    async with Cluster() as cluster:
        one, other = await cluster.peer("a:1"), await cluster.peer("b:1")
        for number in range(50):
            await one.store(KEY, "a:1", b"%d" % number, later(300))
        cluster.etcd.end_all_watches()
        new = MemoryEtcd((0.001, 0.01), random.Random(1))
        for peer in (one, other):
            cluster.clients[peer].etcd = new
        await asyncio.sleep(SETTINGS.renew + 5)
        assert other.get(KEY)["a:1"].value == b"49"
        await one.store(KEY, "a:1", b"new", later(300))
        await settle()
        assert other.get(KEY)["a:1"].value == b"new"


@in_virtual_time
async def test_what_a_peer_holds_does_not_grow_with_the_run() -> None:
    async with Cluster() as cluster:
        peers = [await cluster.peer(f"p{number}:1") for number in range(60)]
        for number, peer in enumerate(peers):
            await peer.store(f"run.0b{number // 4}", f"p{number}:1", b"", later(300))
        await asyncio.sleep(40)
        for number, peer in enumerate(peers):
            group = {f"p{each}:1" for each in range(number // 4 * 4, number // 4 * 4 + 4)}
            await peer.follow(f"run.0b{number // 4}", keep=False)
            assert peer.get(f"run.0b{number // 4}").keys() == group
            assert len(peer._records._table) <= 4 + SETTINGS.neighbours + 1
        # Together they know all, whoever is asked first.
        reached, asked = {"p7:1"}, set[str]()
        by_name = {peer._endpoint: peer for peer in peers}
        while reached - asked:
            name = min(reached - asked)
            asked.add(name)
            reached |= by_name[name].endpoints()
        assert len(reached) == 60
        await asyncio.sleep(SETTINGS.lapse + 15)  # nobody reads the keys any more
        assert all(len(peer._records._table) <= 1 + SETTINGS.neighbours + 1 for peer in peers)


@pytest.mark.parametrize("bits", [False, True], ids=["one-key", "a-key-for-each-group"])
@in_virtual_time
async def test_whole_peers_meet_in_full_groups(bits: bool) -> None:
    rng, latency = random.Random(3), (0.02, 0.08)
    network, etcd = MemoryNetwork(rng, latency=latency), MemoryEtcd(latency, rng)

    def discovery(endpoint: str, transport: Transport) -> EtcdDiscovery:
        own = random.Random(rng.getrandbits(64))
        return EtcdDiscovery(
            *("run", endpoint, etcd.client()), identity=UnsignedIdentity(rng), clock=virtual_time.clock, rng=own
        )

    async with AsyncExitStack() as stack:
        peers = [
            Peer(
                {"w": torch.full((1,), float(number))},
                run_id="run",
                context=PeerContext(
                    network.transport(f"p{number}:1"), discovery, virtual_time.clock, random.Random(number)
                ),
                group_size=4,
                group_bits=f"{number // 4:02b}" if bits else "",
            )
            for number in range(16)
        ]
        await asyncio.gather(*(stack.enter_async_context(peer) for peer in peers))
        for _ in range(2):
            await asyncio.sleep(1)
            receipts = await asyncio.gather(*(peer.average() for peer in peers))
            assert [len(receipt.members) for receipt in receipts] == [4] * 16
        if bits:
            assert {peer.own_tensors[0].item() for peer in peers} == {7.5}
    assert network.errors == []


# Strangers


def signed(identity: Ed25519Identity, value: bytes = b"x", seconds: float = 30.0, run: str = "run") -> Record:
    author = Author(run, identity, RecordLimits())
    return author.write(KEY, "s:1", value, later(seconds), virtual_time.clock(), None)


@in_virtual_time
async def test_what_a_stranger_writes_is_checked_as_gossip_is() -> None:
    """Another signature, another run, an expired record, too large a value, no record at all, a copy elsewhere."""
    async with Cluster() as cluster:
        peer, stranger = await cluster.peer("a:1"), cluster.etcd.client()
        await peer.store(KEY, "a:1", b"1", later(300))
        lease, seal, identity = await stranger.grant(300.0), LAYOUT, Ed25519Identity()
        good = signed(identity)
        prefix = LAYOUT.prefix(KEY)

        async def write(record: Record, name: bytes = b"") -> None:
            await stranger.change({name or LAYOUT.name(record): seal.pack(record)}, lease)
            await settle()

        await write(replace(good, value=b"other"))
        await write(signed(identity, run="other"))
        await write(good, LAYOUT.name(replace(good, subkey="t:1")))
        await write(replace(good, expiration=later(-1)))
        await write(replace(good, value=bytes(2000)))
        await write(replace(good, subkey="t:\n1"))
        await stranger.change(
            {prefix + b"s:1/x": bytes(100_000), prefix + b"z": b"\xff" * 9, prefix + b"y": b""}, lease
        )
        await stranger.change({LAYOUT.prefix() + b"run.0b": b"\0\xff\xff"}, lease)
        await settle()
        assert peer.get(KEY).keys() == {"a:1"}
        assert peer.refused[Reason.FORGED] == 2
        assert peer.refused[Reason.OVERSIZED] == 2
        assert peer.refused[Reason.MALFORMED] == 3
        # A record of its own, of which the signature is right, and one at the place of another.
        await write(good)
        assert peer.get(KEY).keys() == {"a:1", "s:1"}
        author = Author("run", identity, RecordLimits())
        await write(author.write(KEY, "a:1", b"mine", later(30), virtual_time.clock(), None))
        assert peer.get(KEY)["a:1"].value == b"1"


@in_virtual_time
async def test_values_that_are_no_records_hide_nobody() -> None:
    """More of them than a peer holds records, between those of the others."""
    async with Cluster() as cluster:
        for name in ("b:1", "c:1"):
            await (await cluster.peer(name)).store(KEY, name, b"1", later(300))
        stranger = cluster.etcd.client()
        lease, prefix = await stranger.grant(300.0), LAYOUT.prefix(KEY, "b:2")
        for number in range(1100):
            await stranger.change({prefix + b"%d" % number: b"\xff"}, lease)
        await settle()
        newcomer = await cluster.peer("a:1")
        await newcomer.store(KEY, "a:1", b"1", later(300))
        await settle()
        assert newcomer.get(KEY).keys() == {"a:1", "b:1", "c:1"}


@in_virtual_time
async def test_with_tokens_a_stranger_without_one_is_not_heard() -> None:
    async with Cluster() as cluster:
        tokens = ("a-token-of-the-run", "an-older-token-of-it")
        one, other = await cluster.peer("a:1", tokens=tokens), await cluster.peer("b:1", tokens=tokens[::-1])
        await other.store(KEY, "b:1", b"", later(300))
        stranger = cluster.etcd.client()
        lease, record = await stranger.grant(300.0), signed(Ed25519Identity())
        for seal in (LAYOUT, RecordLayout("run", ["some-other-long-token"])):
            await stranger.change({LAYOUT.name(record): seal.pack(record)}, lease)
            await settle()
        assert one.get(KEY).keys() == {"b:1"}
        assert one.refused == {Reason.UNSEALED: 2}
        open_peer = await cluster.peer("c:1")
        assert open_peer.get(KEY) == {}
        assert open_peer.refused[Reason.UNSEALED] > 0


# Joining


@in_virtual_time
async def test_without_etcd_no_peer_starts_and_the_error_says_what_to_check() -> None:
    async with Cluster() as cluster:
        cluster.go_down()
        with pytest.raises(JoinError) as failed:
            await cluster.peer("a:1")
        assert str(failed.value) == (
            "etcd://h:2379 has not answered within 10 s (connection refused); check the addresses in discovery, that a "
            "majority of etcd's members is up, and that it accepts this peer's certificate"
        )


@asynccontextmanager
async def serving(network: MemoryNetwork, discovery: EtcdDiscovery) -> AsyncIterator[None]:
    transport = network.transport("a:1")
    await transport.serve(NO_AVERAGING, discovery)
    yield
    await transport.close()


@in_virtual_time
async def test_a_peer_that_gossips_is_told_that_its_run_is_another() -> None:
    async with Cluster() as cluster:
        network = MemoryNetwork(random.Random(0))
        discovery = await cluster.peer("a:1")
        async with serving(network, discovery):
            gossiping = network.transport("b:1")
            with pytest.raises(JoinError, match=r"finds its run through etcd://h:2379, and the caller .* by gossip"):
                async with GossipDiscovery("run", "b:1", gossiping, join=["a:1"], clock=virtual_time.clock):
                    pass
            await gossiping.close()
        assert network.errors == []
