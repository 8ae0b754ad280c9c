"""Weights on a GPU for processes that do not train: publisher and follower, and a weight sync group over NCCL."""

import asyncio
from contextlib import ExitStack

import pytest
import torch

from averaging import WeightFollower, WeightPublisher
from averaging.rl.synchronizer import Synchronizer, WeightReceiver, WeightSender
from averaging.rpc import RpcServer
from tests.support.processes import DEADLINE, JsonProcess
from tests.support.training import model_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

GPU = torch.device("cuda", 0)


async def test_a_follower_has_the_weights_of_a_publisher() -> None:
    """Both on the GPU, and one follower on the CPU; in bfloat16 as well."""
    published, followed, on_cpu = model_of(0).to(GPU), model_of(1).to(GPU), model_of(2)
    publisher = WeightPublisher(published)
    async with RpcServer("127.0.0.1:0", [publisher]) as server:
        await publisher.publish(version=1)
        async with (
            WeightFollower(followed, join=[server.endpoint]) as follower,
            WeightFollower(on_cpu, join=[server.endpoint]) as other,
        ):
            for version in (1, 2):
                if version == 2:
                    with torch.no_grad():
                        for parameter in published.parameters():
                            parameter.add_(1.0)
                    await publisher.publish(version=2)
                for one, model in ((follower, followed), (other, on_cpu)):
                    while one.version != version:
                        await asyncio.to_thread(one.update, DEADLINE)
                    for mine, theirs in zip(model.parameters(), published.parameters(), strict=True):
                        assert torch.equal(mine.cpu(), theirs.cpu())


async def joined(sender: WeightSender, receiver: WeightReceiver) -> None:
    host, port, meta = sender.get_weight_sync_info()
    await receiver.set_state_dict_meta(meta)
    group = (host, port, 2, "group", 20.0)
    await asyncio.gather(sender.setup_weight_sync_group(*group, 0), receiver.setup_weight_sync_group(*group, 1))


async def test_a_sync_group_over_gloo_sends_what_is_on_the_gpu() -> None:
    state = {"w": torch.randn(1000, 300, device=GPU), "b": torch.randn(7, device=GPU).to(torch.bfloat16)}
    sender, receiver = WeightSender(lambda: state), WeightReceiver()
    await joined(sender, receiver)
    _, received = await asyncio.gather(sender.send(3), receiver.receive(3))
    assert all(torch.equal(received[name], tensor.cpu()) for name, tensor in state.items())
    await sender.teardown_weight_sync_group()
    await receiver.teardown_weight_sync_group()


def member(stack: ExitStack, role: str, endpoint: str, **options: object) -> JsonProcess:
    """A trainer or an explorer; NCCL refuses two on one GPU of one host, so each says that it is a host of its own."""
    import json
    import os

    env = os.environ | {"NCCL_HOSTID": role, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    given = {"endpoint": endpoint, "role": role, "name": role, "collective": True, "backend": "nccl", "device": "cuda"}
    command = ("python", "-m", "tests.synchronizer.worker", json.dumps(given | options))
    return stack.enter_context(JsonProcess(*command, env=env))


@pytest.mark.parametrize("dies", [False, True])
async def test_explorers_get_versions_over_nccl(dies: bool) -> None:
    """Whole versions; and a trainer whose explorer is killed goes on, with another one."""
    with ExitStack() as stack:
        async with Synchronizer() as synchronizer, RpcServer("127.0.0.1:0", [synchronizer]) as server:

            def three(explorer: JsonProcess) -> None:
                for _ in range(3):
                    found = explorer.expect("version", DEADLINE)
                    assert found["value"] == found["value"]

            trainer = member(stack, "trainer", server.endpoint)
            await asyncio.to_thread(trainer.expect, "ready", DEADLINE)
            explorer = member(stack, "explorer", server.endpoint)
            await asyncio.to_thread(three, explorer)
            if dies:
                explorer.kill()
                await asyncio.to_thread(trainer.expect, "lost", DEADLINE)
                again = member(stack, "explorer", server.endpoint)
                await asyncio.to_thread(three, again)
