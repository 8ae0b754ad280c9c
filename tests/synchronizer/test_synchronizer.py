"""`Synchronizer` in one process: waits, modules, checkpoints, versions over restarts, get_actor."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import ClosedError, ConfigError, StateError, TensorError
from averaging.rl.synchronizer import (
    RunningStatus,
    Synchronizer,
    SynchronizerConfig,
    WeightReceiver,
    WeightSender,
    synchronizer as synchronizing,
)
from averaging.rl.synchronizer.synchronizer import LATEST_FILE, VERSION_FILE
from averaging.testing import virtual_time

RUNNING, REQUIRE_SYNC, STOPPED = RunningStatus

Test = Callable[..., Coroutine[Any, Any, None]]


def simulated(test: Test) -> Callable[..., None]:
    """Runs a test on virtual time, on which no threads run."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        virtual_time.run(test(*arguments, **named))

    return run


class Module:
    """A module that a test kills."""

    def __init__(self) -> None:
        self.alive, self.answers = True, True
        self.asked = 0

    async def is_alive(self) -> bool:
        self.asked += 1
        if not self.answers:
            await asyncio.Event().wait()
        return self.alive


def state(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2, 3), value), "b": torch.full((2,), value, dtype=torch.bfloat16)}


@simulated
async def test_the_statuses_of_a_dead_module_go_and_a_busy_one_stays() -> None:
    async with Synchronizer() as synchronizer:
        dead, busy = Module(), Module()
        for module, member in ((dead, "dead"), (busy, "busy")):
            await synchronizer.add_module(module, member=member)
            await synchronizer.set_explorer_status(RUNNING, member=member)
        dead.alive, busy.answers = False, False
        waiting = asyncio.ensure_future(synchronizer.ready_to_nccl_sync("explorer", 0, member="dead"))
        await asyncio.sleep(20)
        assert synchronizer.explorer_status_counts == {RUNNING: 1, REQUIRE_SYNC: 0, STOPPED: 0}
        with pytest.raises(ClosedError, match="left"):
            await waiting
        assert busy.asked > 1
        assert synchronizer.module_count == 1


@simulated
async def test_get_actor_is_one_per_namespace_and_ends_with_its_modules() -> None:
    with pytest.raises(ConfigError, match="no synchronizer in namespace 'a'"):
        Synchronizer.get_actor(namespace="a")
    module, other = Module(), Module()
    config = SynchronizerConfig(namespace="a")
    actor = Synchronizer.get_actor(config, module=module)
    assert Synchronizer.get_actor(config, module=other) is actor
    assert Synchronizer.get_actor(namespace="a") is actor
    assert Synchronizer.get_actor(SynchronizerConfig(namespace="b"), module=module) is not actor
    await actor.set_trainer_status(RUNNING)
    await actor.set_explorer_status(RUNNING)
    waiting = asyncio.ensure_future(actor.wait_new_model_state_dict(0))
    other.alive = False
    await asyncio.sleep(5)
    assert not actor.ended
    module.alive = False
    with pytest.raises(ClosedError, match="has left|has ended"):
        await waiting
    await asyncio.sleep(2)
    with pytest.raises(ConfigError):
        Synchronizer.get_actor(namespace="a")
    replaced = Synchronizer.get_actor(config)
    assert replaced is not actor
    await replaced.close()


@simulated
async def test_one_that_is_held_does_not_end_without_modules() -> None:
    async with Synchronizer() as synchronizer:
        module = Module()
        await synchronizer.add_module(module, member="e")
        module.alive = False
        await asyncio.sleep(10)
        assert synchronizer.module_count == 0
        await synchronizer.set_trainer_status(RUNNING)
    with pytest.raises(ClosedError):
        await synchronizer.get_latest_model_version()


async def test_checkpoints_are_found_by_the_file_that_names_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synchronizing, "POLL_SECONDS", 0.01)
    config = SynchronizerConfig(sync_method="checkpoint", checkpoint_dir=tmp_path)
    async with Synchronizer(config=config) as synchronizer:
        assert await synchronizer.get_latest_model_path() is None
        await synchronizer.set_trainer_status(RUNNING)
        await synchronizer.set_explorer_status(RUNNING)
        waiting = asyncio.ensure_future(synchronizer.wait_new_model_state_dict(0))
        (tmp_path / LATEST_FILE).write_text("7\n")
        assert await waiting == 7
        actor = tmp_path / "global_step_7" / "actor"
        assert await synchronizer.get_latest_model_path() is None, "the checkpoint is not there"
        actor.mkdir(parents=True)
        assert await synchronizer.get_latest_model_path() == str(actor)
        assert await synchronizer.get_latest_model_path(use_huggingface=True) is None, "only a half of it is there"
        (actor / "huggingface").mkdir()
        assert await synchronizer.get_latest_model_path(use_huggingface=True) == str(actor / "huggingface")
        assert synchronizer.get_model_state_dict() == (None, 7)
        assert await synchronizer.get_state_dict_meta() is None
        assert list(synchronizer.get_model_state_dict_iterator()) == []


async def test_the_version_does_not_go_back_over_restarts(tmp_path: Path) -> None:
    config = SynchronizerConfig(checkpoint_dir=tmp_path)
    async with Synchronizer(config=config) as synchronizer:
        await synchronizer.set_model_state_dict(state(), 100)
        assert await synchronizer.set_model_state_dict(state(), 81) == 101, "only the trainer restarted"
        assert await synchronizer.get_latest_model_path() is None, "the trainer has written no checkpoint"
        (tmp_path / "global_step_81" / "actor").mkdir(parents=True)
        assert await synchronizer.get_latest_model_path() == str(tmp_path / "global_step_81" / "actor")
    async with Synchronizer(config=config) as synchronizer:
        assert await synchronizer.get_latest_model_version() == 101
        assert await synchronizer.set_model_state_dict(state(), 82) == 102
        await synchronizer.set_trainer_status(RUNNING)
        await synchronizer.set_explorer_status(RUNNING)
        ready = (synchronizer.ready_to_nccl_sync("trainer", 83), synchronizer.ready_to_nccl_sync("explorer", 0))
        assert list(await asyncio.gather(*ready)) == [103, 103]
    async with Synchronizer(config=config) as synchronizer:
        assert await synchronizer.get_latest_model_version() == 103
    (tmp_path / VERSION_FILE).write_text("nonsense")
    with pytest.raises(ConfigError, match="should hold the last version"):
        Synchronizer(config=config)


async def test_a_trainer_that_goes_back_to_an_earlier_checkpoint_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synchronizing, "POLL_SECONDS", 0.01)
    config = SynchronizerConfig(sync_method="checkpoint", checkpoint_dir=tmp_path)

    async def path_of(synchronizer: Synchronizer) -> str:
        return str(Path(await synchronizer.get_latest_model_path() or "").parent.name)

    for step in (7, 8, 9, 10):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
    async with Synchronizer(config=config) as synchronizer:
        await synchronizer.set_explorer_status(RUNNING)
        for step, before, version in ((10, 0, 10), (7, 10, 11), (8, 11, 12)):
            (tmp_path / LATEST_FILE).write_text(f"{step}\n")
            assert await synchronizer.wait_new_model_state_dict(before) == version
            assert await path_of(synchronizer) == f"global_step_{step}"
    async with Synchronizer(config=config) as synchronizer:
        await asyncio.sleep(0)
        assert await path_of(synchronizer) == "global_step_8", "a restarted synchronizer knows the checkpoint"
        await synchronizer.set_explorer_status(RUNNING)
        (tmp_path / LATEST_FILE).write_text("9\n")
        assert await synchronizer.wait_new_model_state_dict(12) == 13, "step 8 was handed out already"
        assert await path_of(synchronizer) == "global_step_9"


async def test_a_checkpoint_that_the_trainer_has_set_itself_has_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter([7, 7, 9])  # as the file has it at each look
    monkeypatch.setattr(synchronizing, "read_numbers", lambda _: [next(steps, 9)])
    monkeypatch.setattr(synchronizing, "POLL_SECONDS", 0.01)
    config = SynchronizerConfig(sync_method="checkpoint", checkpoint_dir=tmp_path)
    synchronizer = Synchronizer(config=config)
    assert await synchronizer.set_model_state_dict(None, 7, member="trainer") == 7
    async with synchronizer:
        await synchronizer.set_explorer_status(RUNNING)
        assert await synchronizer.wait_new_model_state_dict(7) == 9, "and not 8"


async def test_a_checkpoint_that_cannot_be_handed_out_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(synchronizing, "POLL_SECONDS", 0.01)
    (tmp_path / LATEST_FILE).write_text("7\n")
    full, tried = True, 0

    async def hand_out(step: int) -> None:
        nonlocal tried, full
        tried += 1
        full = tried < 3
        if full:
            raise StateError("the disk is full")

    finding = asyncio.ensure_future(synchronizing.find_checkpoints(tmp_path, lambda: None, hand_out))
    while full:  # noqa: ASYNC110 - of a file in a thread
        await asyncio.sleep(0.01)
    finding.cancel()
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint of step 7 is not handed out: the disk is full"
    ]


async def test_the_highest_step_can_be_read_back(tmp_path: Path) -> None:
    config = SynchronizerConfig(checkpoint_dir=tmp_path)
    for versions in ((1 << 62, (1 << 62) + 1), ((1 << 62) + 2,)):
        async with Synchronizer(config=config) as synchronizer:
            for version in versions:
                assert await synchronizer.set_model_state_dict(state(), 1 << 62, member=f"trainer {version}") == version


async def test_the_path_is_that_of_the_newest_weights(tmp_path: Path) -> None:
    config = SynchronizerConfig(checkpoint_dir=tmp_path / "checkpoints")
    weights = tmp_path / "weights"
    async with Synchronizer(config=config) as synchronizer:
        await synchronizer.set_model_state_dict(str(weights), 12)
        assert await synchronizer.get_latest_model_path() == str(weights)
        assert await synchronizer.get_latest_model_path(use_huggingface=True) == str(weights)
        (weights / "huggingface").mkdir(parents=True)
        assert await synchronizer.get_latest_model_path(use_huggingface=True) == str(weights / "huggingface")
        with pytest.raises(ConfigError, match="is a path"):
            list(synchronizer.get_model_state_dict_iterator())
        await synchronizer.set_model_state_dict(state(), 13)
        assert await synchronizer.get_latest_model_path() is None


async def test_a_version_that_cannot_be_kept_is_not_handed_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with Synchronizer(config=SynchronizerConfig(checkpoint_dir=tmp_path / "file" / "folder")) as synchronizer:
        with pytest.raises(StateError, match="cannot be kept"):
            await synchronizer.set_model_state_dict(state(), 1)
        assert synchronizer.get_model_state_dict() == (None, 0)


@simulated
async def test_bad_input_is_refused_by_name() -> None:
    async with Synchronizer() as synchronizer:
        for bad in (
            {"w": torch.ones(2).to_sparse()},
            {"w": torch.ones(2, device="meta")},
            {"w": 1},
            {3: torch.ones(2)},
        ):
            with pytest.raises(TensorError, match="w|3"):
                await synchronizer.set_model_state_dict(bad, 1)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="step"):
            await synchronizer.set_model_state_dict({}, -1)
        for wrong in (
            synchronizer.set_trainer_status("ready"),
            synchronizer.set_explorer_status("ready"),
            synchronizer.set_explorer_status("running", "ready"),
        ):
            with pytest.raises(ConfigError, match="status must be one of running, require_sync, stopped, not 'ready'"):
                await wrong
        with pytest.raises(ConfigError, match="'trainer' or 'explorer'"):
            await synchronizer.ready_to_nccl_sync("judge", 1)  # type: ignore[arg-type]
        assert synchronizer.model_version == 0
    for options, named in (
        ({"sync_method": "ncc"}, "sync_method must be one of nccl, checkpoint, memory"),
        ({"sync_method": "checkpoint"}, "needs checkpoint_dir"),
        ({"sync_timeout": 0.0}, "sync_timeout"),
        ({"max_state_bytes": float("nan")}, "max_state_bytes"),
        ({"namespace": "x" * 200}, "namespace of 200 characters"),
        ({"group_name": ""}, "group_name"),
    ):
        with pytest.raises(ConfigError, match=named):
            SynchronizerConfig(**options)
    with pytest.raises(ClosedError, match="not running"):
        await Synchronizer().add_module(Module())


async def test_a_weight_sync_group_over_ipv6() -> None:
    sender, receiver = WeightSender(lambda: {"w": torch.arange(3.0)}, host="::1"), WeightReceiver()
    address, port, meta = sender.get_weight_sync_info()
    await receiver.set_state_dict_meta(meta)
    members = (sender, 0), (receiver, 1)
    await asyncio.gather(
        *(each.setup_weight_sync_group(address, port, 2, "group", 30.0, rank) for each, rank in members)
    )
    _, state = await asyncio.gather(sender.send(1), receiver.receive(1))
    assert state["w"].tolist() == [0.0, 1.0, 2.0]
    await asyncio.gather(sender.teardown_weight_sync_group(), receiver.teardown_weight_sync_group())
