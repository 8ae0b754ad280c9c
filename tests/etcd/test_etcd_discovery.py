"""Discovery in a real etcd: the same contract as its model, and whole peers."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch

from averaging import Peer
from averaging.config import PeerConfig
from averaging.doctor import Examination, Finding, Severity, examine
from averaging.errors import AveragingError
from averaging.monitor.collector import Collector
from averaging.rpc import RpcChannel
from averaging.transport.grpc.etcd import EtcdCluster
from averaging.transport.rpc_methods import RpcMethod
from averaging.wire.etcd_pb2 import CompactionRequest, CompactionResponse
from tests.etcd.conftest import Etcd
from tests.etcd.test_etcd_register import credentials
from tests.support.key_value_store import SCENARIOS, Scenario
from tests.support.peers import average
from tests.support.ports import free_address

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]

COMPACT = RpcMethod("/etcdserverpb.KV/Compact", CompactionRequest, CompactionResponse)


@asynccontextmanager
async def cluster_of(etcd: Etcd) -> AsyncIterator[EtcdCluster]:
    cluster = EtcdCluster([RpcChannel(f"127.0.0.1:{etcd.port}", credentials=credentials(etcd))], 5.0)
    async with asyncio.timeout(30):
        while True:
            try:
                await cluster.read(b"up")
                break
            except AveragingError:
                await asyncio.sleep(0.1)
    try:
        yield cluster
    finally:
        await cluster.close()


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_real_etcd_does_what_the_model_does(etcd: Etcd, scenario: Scenario) -> None:
    async with cluster_of(etcd) as cluster:

        async def compact() -> None:
            revision = (await cluster.list_values(b"a/", 1)).revision
            await cluster._channels[0].call(COMPACT, CompactionRequest(revision=revision), 5.0)

        await scenario(cluster, compact)


def name_of(etcd: Etcd) -> str:
    """The cluster has a member that does not answer."""
    return f"etcd://{free_address()},127.0.0.1:{etcd.port}"


def options(etcd: Etcd) -> Any:
    return etcd.files


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), value)}


async def test_peers_meet_average_and_leave_nothing(etcd: Etcd) -> None:
    async with cluster_of(etcd) as cluster, AsyncExitStack() as stack:
        peers = [
            await stack.enter_async_context(
                Peer(
                    tensors(value),
                    run_id="run",
                    discovery=name_of(etcd),
                    group_size=3,
                    group_wait=20.0,
                    **options(etcd),
                )
            )
            for value in (1.0, 2.0, 3.0)
        ]
        for _ in range(3):
            receipts = await average(*peers)
            assert all(len(receipt.members) == 3 for receipt in receipts)
        assert all(torch.equal(peer.own_tensors[0], torch.full((3,), 2.0)) for peer in peers)
        newcomer = await stack.enter_async_context(
            Peer(tensors(0.0), run_id="run", discovery=name_of(etcd), **options(etcd))
        )
        await newcomer.download_state()
        assert torch.equal(newcomer.own_tensors[0], torch.full((3,), 2.0))
        assert newcomer.peers >= {peer.endpoint for peer in peers}
        async with Collector([newcomer.endpoint], credentials(etcd)) as collector:
            snapshot = await collector.collect()
        assert {peer.endpoint for peer in snapshot.answering} >= {peer.endpoint for peer in peers}
        examined = list[Finding]()
        config = PeerConfig(run_id="run", discovery=name_of(etcd), **options(etcd))
        await examine(Examination(config=config), examined.append)
        assert [finding.severity for finding in examined if finding.check == "discovery"] == [Severity.OK]
        assert {finding.peer for finding in examined if finding.peer} == {peer.endpoint for peer in [*peers, newcomer]}
        await stack.aclose()
        assert (await cluster.list_values(b"averaging/", 9)).values == ()


async def test_peers_go_on_when_etcd_is_stopped_for_a_while(etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    """They say so, know each other still, and average again when it is back."""
    async with cluster_of(etcd), AsyncExitStack() as stack:
        name = f"etcd://127.0.0.1:{etcd.port}"
        peers = [
            await stack.enter_async_context(
                Peer(tensors(value), run_id="run", discovery=name, group_size=2, group_wait=2.0, **options(etcd))
            )
            for value in (1.0, 3.0)
        ]
        assert all(len(receipt.members) == 2 for receipt in await average(*peers))
        etcd.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(30)  # longer than the lease
        assert all(len(peer.peers) == 2 for peer in peers)
        receipts = await asyncio.gather(*(peer.average(search_timeout=8.0) for peer in peers))
        assert all("has not answered for" in receipt.reason for receipt in receipts)
        etcd.process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(60):
            while not all(receipt.averaged for receipt in await average(*peers)):
                pass
    assert sum("This peer goes on" in record.message for record in caplog.records) == 2
    assert sum("answers again after" in record.message for record in caplog.records) == 2
