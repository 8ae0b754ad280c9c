"""What a view shows of real peers: who waits for whom, followers and explorers."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
import torch

from averaging import Peer, WeightPublisher
from averaging.monitor import Collector, RunSnapshot, snapshot_json
from averaging.monitor.table import as_text
from averaging.rl.synchronizer import RunningStatus, Synchronizer
from averaging.rl.synchronizer.remote import RemoteSynchronizer
from averaging.rpc import Credentials
from averaging.weights.receiver import FollowerOptions, ModelReceiver
from tests.support.peers import average

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

LIMIT = 30.0


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(8)}


async def until(collector: Collector, condition: Callable[[RunSnapshot], object]) -> RunSnapshot:
    async with asyncio.timeout(LIMIT):
        while not condition(snapshot := collector.snapshot()):  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.05)
    return snapshot


async def test_rounds_and_who_waits_for_whom() -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(Peer(tensors(), run_id="run"))
        second = await stack.enter_async_context(Peer(tensors(), run_id="run", join=[first.endpoint]))
        collector = await stack.enter_async_context(Collector([first.endpoint], receipts=4, interval=0.1))
        assert len((await collector.collect()).peers) == 2
        await average(first, second)
        await until(collector, lambda snapshot: all(peer.last_round for peer in snapshot.peers))
        assert {len(collector.receipts_of(peer.endpoint)) for peer in (first, second)} == {1}
        absent = {second.endpoint}
        waiting = asyncio.create_task(
            first.average(start_size=3, expected_peers=lambda _: absent, search_timeout=LIMIT)
        )
        snapshot = await until(collector, lambda snapshot: any(peer.waits_for for peer in snapshot.peers))
        assert {peer.endpoint: peer.waits_for for peer in snapshot.peers} == {
            first.endpoint: (second.endpoint,),
            second.endpoint: (),
        }
        assert any("waited for: " + second.endpoint in line for line in as_text(snapshot))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_followers_and_explorers_with_their_versions() -> None:
    publisher, model = WeightPublisher(), {"w": torch.ones(4)}
    async with AsyncExitStack() as stack:
        synchronizer = await stack.enter_async_context(Synchronizer())
        peer = await stack.enter_async_context(Peer(tensors(), run_id="run", services=[publisher, synchronizer]))
        collector = await stack.enter_async_context(Collector([peer.endpoint], interval=0.1))
        await publisher.publish(model, 3)
        followers = await stack.enter_async_context(AsyncExitStack())
        await followers.enter_async_context(ModelReceiver(FollowerOptions(join=[peer.endpoint], run_id="run")))
        remote = RemoteSynchronizer(
            peer.endpoint, namespace="", name="explorer of a test", credentials=Credentials(), timeout=LIMIT
        )
        explorer = await stack.enter_async_context(remote)
        await explorer.set_explorer_status(RunningStatus.RUNNING)
        await synchronizer.set_model_state_dict(model, 5)
        await explorer.get_model_state_dict()
        snapshot = await until(
            collector, lambda snapshot: len([each for _, each in snapshot.readers if each.version is not None]) == 2
        )
        shown = snapshot_json(snapshot)
        assert [(each["version"], each["newest"]) for each in shown["followers"]] == [(3, 3)]
        [seen] = shown["explorers"]
        assert seen["name"].startswith("explorer of a test")
        assert (seen["status"], seen["version"], seen["newest"]) == ("running", 5, 5)
        await followers.aclose()
        await until(collector, lambda snapshot: not snapshot_json(snapshot)["followers"])
