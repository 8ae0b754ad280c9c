"""Trainers and explorers as processes: all methods of transfer, deaths at any moment, nobody left counted."""

import asyncio
import json
import math
import signal
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager

import pytest

from averaging.errors import StateError
from averaging.rl.synchronizer import RunningStatus, Synchronizer, SynchronizerConfig
from averaging.rl.synchronizer.groups import WeightReceiver, WeightSender
from averaging.rpc import RpcServer
from tests.support.processes import JsonProcess
from tests.synchronizer.worker import until, weights

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

RUNNING, REQUIRE_SYNC, STOPPED = RunningStatus


class Site:
    """A synchronizer in this process, and the processes that use it."""

    def __init__(self, synchronizer: Synchronizer, endpoint: str, stack: ExitStack) -> None:
        self.synchronizer = synchronizer
        self._endpoint = endpoint
        self._stack = stack

    async def start(self, role: str, name: str, **options: object) -> JsonProcess:
        given = {"endpoint": self._endpoint, "role": role, "name": name, "collective": False, **options}
        process = self._stack.enter_context(JsonProcess("python", "-m", "tests.synchronizer.worker", json.dumps(given)))
        await expect(process, "ready")
        return process


async def expect(process: JsonProcess, event: str) -> dict[str, object]:
    return await asyncio.to_thread(process.expect, event)


@asynccontextmanager
async def site(**options: object) -> AsyncGenerator[Site, None]:
    config = SynchronizerConfig(**options)  # type: ignore[arg-type]
    with ExitStack() as stack:
        async with Synchronizer(config=config) as synchronizer, RpcServer("127.0.0.1:0", [synchronizer]) as server:
            yield Site(synchronizer, server.endpoint, stack)


def whole(process: JsonProcess) -> list[int]:
    """The versions that an explorer got: ascending, each of one step. Without restarts a version is its step."""
    seen = process.events("version")
    assert not any(math.isnan(event["value"]) for event in seen)
    versions = [event["version"] for event in seen]
    assert versions == sorted(versions)
    return versions


async def test_explorers_follow_a_trainer_and_one_is_killed() -> None:
    async with site() as run:
        # Explorers that come before the trainer wait for it.
        explorers = [await run.start("explorer", f"explorer {number}") for number in range(2)]
        trainer = await run.start("trainer", "trainer", steps=60)
        explorers.append(await run.start("explorer", "explorer 2"))
        for explorer in explorers:
            await expect(explorer, "version")
        explorers[0].kill()
        await until(lambda: run.synchronizer.module_count == 3)
        await expect(trainer, "end")
        for explorer in explorers[1:]:
            await expect(explorer, "end")
            assert whole(explorer)[-1] == 60
        await until(lambda: run.synchronizer.module_count == 0)
        assert not any(run.synchronizer.explorer_status_counts.values())


@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_trainer_that_dies_or_freezes_releases_the_explorers(number: signal.Signals, collective: bool) -> None:
    async with site(silence_timeout=2.0) as run:
        trainer = await run.start("trainer", "trainer", idle=True)
        explorers = [await run.start("explorer", f"explorer {n}", collective=collective) for n in range(2)]
        await until(lambda: run.synchronizer.explorer_status_counts[REQUIRE_SYNC] == 2)
        trainer.signal(number)
        for explorer in explorers:
            await expect(explorer, "end")
        assert run.synchronizer.trainer_status is STOPPED
        assert run.synchronizer.model_version == 0


async def test_a_trainer_restarted_from_its_checkpoint_does_not_set_the_version_back() -> None:
    async with site() as run:
        trainer = await run.start("trainer", "trainer")
        explorer = await run.start("explorer", "explorer")
        await until(lambda: run.synchronizer.model_version >= 20)
        await run.synchronizer.set_trainer_status(RUNNING, member="keeps the explorer")
        trainer.kill()
        await until(lambda: run.synchronizer.module_count == 1)
        reached = run.synchronizer.model_version
        trainer = await run.start("trainer", "trainer", step=5, steps=15)
        await expect(trainer, "end")
        await run.synchronizer.set_trainer_status(STOPPED, member="keeps the explorer")
        await expect(explorer, "end")
        last = explorer.events("version")[-1]
        assert (last["version"], last["value"]) == (reached + 10, 15.0)
        assert whole(explorer)


async def test_two_sites_transfer_weights_to_four_explorers_and_one_of_them_dies() -> None:
    async with site() as run:
        trainers = [await run.start("trainer", f"trainer {number}", collective=True) for number in range(2)]
        explorers = [await run.start("explorer", f"explorer {number}", collective=True) for number in range(4)]
        for process in (*trainers, *explorers):
            await expect(process, "version")
        explorers[1].kill()
        await until(lambda: run.synchronizer.module_count == 5)
        reached = run.synchronizer.model_version
        explorers.pop(1)
        for process in (*trainers, *explorers):
            while int(str((await expect(process, "version"))["version"])) <= reached + 20:
                pass
        sent = {event["version"]: event["value"] for trainer in trainers for event in trainer.events("version")}
        for explorer in explorers:
            got = {event["version"]: event["value"] for event in explorer.events("version")}
            assert whole(explorer)
            assert got.items() & sent.items(), "the values are those of the same version at its trainer"
            assert all(sent.get(version, value) == value for version, value in got.items())
        counts = run.synchronizer.explorer_status_counts
        assert sum(counts.values()) == 3


class Sender(WeightSender):
    """A trainer in this process."""

    def __init__(self) -> None:
        super().__init__(lambda: weights(1.0))


async def test_an_explorer_that_dies_during_the_set_up_is_named_and_the_others_are_free() -> None:
    async with site() as run:
        sender, receiver = Sender(), WeightReceiver()
        await run.synchronizer.add_module(sender, member="trainer")
        await run.synchronizer.set_trainer_status(RUNNING, member="trainer")
        await run.synchronizer.add_module(receiver, member="local")
        await run.synchronizer.set_explorer_status(RUNNING, member="local")
        frozen = await run.start("explorer", "frozen", collective=True)
        frozen.signal(signal.SIGSTOP)
        setting_up = asyncio.ensure_future(run.synchronizer.coordinate_weight_sync_setup())
        ready_meanwhile = asyncio.ensure_future(run.synchronizer.ready_to_nccl_sync("trainer", 1, member="trainer"))
        await until(lambda: run.synchronizer.trainer_status is REQUIRE_SYNC)
        frozen.kill()
        with pytest.raises(StateError, match="explorer 'frozen 1'.*gone"):
            await setting_up
        assert await ready_meanwhile is None
        with pytest.raises(StateError, match="there is no weight sync group"):
            await sender.send(1)

        await run.synchronizer.coordinate_weight_sync_setup()
        ready = [
            run.synchronizer.ready_to_nccl_sync("trainer", 1, member="trainer"),
            run.synchronizer.ready_to_nccl_sync("explorer", 0, member="local"),
        ]
        assert await asyncio.gather(*ready) == [1, 1]
        _, state = await asyncio.gather(sender.send(1), receiver.receive(1))
        assert state["w"].mean() == 1.0
        await run.synchronizer.coordinate_weight_sync_teardown()


async def test_a_dead_explorer_does_not_hold_up_the_teardown() -> None:
    async with site() as run:
        sender = Sender()
        await run.synchronizer.add_module(sender, member="trainer")
        await run.synchronizer.set_trainer_status(RUNNING, member="trainer")
        explorers = [await run.start("explorer", f"explorer {number}", collective=True) for number in range(2)]
        await run.synchronizer.coordinate_weight_sync_setup()
        explorers[0].kill()
        await run.synchronizer.coordinate_weight_sync_teardown()
        with pytest.raises(StateError, match="there is no weight sync group"):
            await sender.send(1)


async def test_without_members_and_with_another_version_it_fails_clearly() -> None:
    async with site() as run:
        with pytest.raises(StateError, match="there is no trainer"):
            await run.synchronizer.coordinate_weight_sync_setup()
        sender, receiver = Sender(), WeightReceiver()
        await run.synchronizer.add_module(sender, member="trainer")
        with pytest.raises(StateError, match="there is no explorer"):
            await run.synchronizer.coordinate_weight_sync_setup()
        await run.synchronizer.add_module(receiver, member="explorer")
        host, port, meta = sender.get_weight_sync_info()
        # The trainer joins by itself, and the synchronizer lets the explorers join.
        joining = asyncio.ensure_future(sender.setup_weight_sync_group(host, port, 2, "rollout_weight_sync", 20.0, 0))
        await run.synchronizer.setup_weight_sync_group(host, port, meta)
        await joining
        results = await asyncio.gather(sender.send(3), receiver.receive(4), return_exceptions=True)
        assert "sent version 3, not 4" in str(results[1])
        await sender.teardown_weight_sync_group()
        with pytest.raises(StateError, match=r"not all .* within 0\.0001 s|timed out"):
            await run.synchronizer.coordinate_weight_sync_setup(timeout=0.0001)
