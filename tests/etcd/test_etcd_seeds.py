"""Peers that meet under a key of a real etcd."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from averaging import Peer
from averaging.common.seed_sources import parse_seed
from averaging.errors import AveragingError
from averaging.peer import PeerContext
from averaging.seeds import FoundSeeds, look_up
from averaging.seeds.seeds import LEASE_SECONDS, EtcdSeeds
from averaging.transport.grpc import RpcChannel
from averaging.transport.grpc.etcd import EtcdCluster
from tests.etcd.conftest import Etcd
from tests.etcd.test_etcd_register import credentials
from tests.support.peers import average, enter
from tests.support.ports import free_address

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]


def seed(etcd: Etcd, key: str = "runs/gpt") -> str:
    """The cluster has a member that does not answer."""
    return f"etcd://{free_address()},127.0.0.1:{etcd.port}/{key}"


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), value)}


async def up(etcd: Etcd, text: str) -> EtcdSeeds:
    source = parse_seed(text)
    assert source is not None
    seeds = EtcdSeeds(source, credentials(etcd), 64)
    async with asyncio.timeout(30):
        while True:
            try:
                await seeds.read()
                return seeds
            except AveragingError:
                await asyncio.sleep(0.1)


async def test_peers_that_start_at_the_same_time_meet_and_leave_nothing(etcd: Etcd) -> None:
    """All have the same options; one of them starts the run, and the key is empty when all have left."""
    text, told = seed(etcd), list[FoundSeeds]()
    reader = await up(etcd, text)
    options: dict[str, Any] = {
        **etcd.files,
        "join": [text],
        "group_size": 3,
        "context": PeerContext(on_found=told.append),
    }
    async with AsyncExitStack() as stack:
        peers = [Peer(tensors(value), run_id="run", group_wait=20.0, **options) for value in (1.0, 2.0, 3.0)]
        await asyncio.gather(*(stack.enter_async_context(peer) for peer in peers))
        receipts = await average(*peers)
        assert all(len(receipt.members) == 3 for receipt in receipts)
        assert sorted(await reader.read()) == sorted(peer.endpoint for peer in peers)
        assert sorted(await look_up([text], credentials(etcd))) == sorted(peer.endpoint for peer in peers)
    assert await reader.read() == []
    await reader.close()
    assert any(found.own for found in told)


async def test_the_address_of_a_killed_peer_goes_and_that_of_a_peer_stays(etcd: Etcd) -> None:
    text = seed(etcd)
    reader = await up(etcd, text)
    killed = await up(etcd, text)
    async with AsyncExitStack() as stack:
        await killed.publish("192.0.2.7:4222")
        peer = await enter(stack, tensors(1.0), join=[text], join_timeout=30.0, **etcd.files)
        # While it joins, the address of the killed one is called in vain, until it goes.
        assert await reader.read() == [peer.endpoint]
        await asyncio.sleep(LEASE_SECONDS + 1)
        assert await reader.read() == [peer.endpoint]
    for seeds in (reader, killed):
        await seeds.close()


async def test_a_lease_that_has_ended_is_replaced(etcd: Etcd) -> None:
    now = [0.0]
    source = parse_seed(seed(etcd))
    assert source is not None
    reader = await up(etcd, source.text)
    seeds = EtcdSeeds(source, credentials(etcd), 64, monotonic=lambda: now[0])
    await seeds.publish("192.0.2.7:4222")
    async with RpcChannel(f"127.0.0.1:{etcd.port}", credentials=credentials(etcd)) as channel:
        lease = seeds._lease
        assert lease is not None
        await EtcdCluster([channel], 5.0).revoke(lease)
    assert await reader.read() == []
    now[0] = 100.0
    await seeds.publish("192.0.2.7:4222")
    assert await reader.read() == ["192.0.2.7:4222"]
    for each in (reader, seeds):
        await each.close()


async def test_other_keys_and_what_is_no_address_are_not_read(etcd: Etcd) -> None:
    text = seed(etcd, "a")
    reader = await up(etcd, text)
    other = await up(etcd, seed(etcd, "ab"))
    await other.publish("192.0.2.7:4222")
    async with RpcChannel(f"127.0.0.1:{etcd.port}", credentials=credentials(etcd)) as channel:
        cluster = EtcdCluster([channel], 5.0)
        lease = await cluster.grant(60.0)
        for name, value in ((b"a/1", b"no address"), (b"a/2", b"\xff:1"), (b"a/3", b"client::x"), (b"a/4", b"b:1")):
            await cluster.change({name: value}, lease)
    assert await reader.read() == ["b:1"]
    for seeds in (reader, other):
        await seeds.close()
