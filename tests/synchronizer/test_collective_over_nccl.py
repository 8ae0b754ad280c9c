"""A weight sync group over NCCL, with a stand-in for torch's group: how long it waits, and whose errors end what."""

import asyncio
import os
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from averaging.errors import StateError
from averaging.rl.synchronizer.groups import WeightSender

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Work:
    """A broadcast that is complete after so many looks; a wait with a time limit would end the group."""

    def __init__(self, looks: float) -> None:
        self._looks = looks

    def is_completed(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def wait(self, *limit: object) -> None:
        assert not limit


class Group:
    """What `ProcessGroupNCCL` is to a member."""

    class Options:
        _timeout: Any = None

    looks = 3.0
    made_with: dict[str, Any]

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        type(self).made_with = {"handling": os.environ.get(HANDLING), "days": options._timeout.days}

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return Work(self.looks)

    def abort(self) -> None: ...


async def sender(monkeypatch: pytest.MonkeyPatch, timeout: float) -> WeightSender:
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Group, raising=False)
    made = WeightSender(lambda: {"w": torch.ones(3)}, backend="nccl", device="cpu")
    host, port, _ = made.get_weight_sync_info()
    await made.setup_weight_sync_group(host, port, 1, "group", timeout, 0)
    return made


async def test_errors_are_left_to_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HANDLING, "1")
    await (await sender(monkeypatch, 20.0)).send(1)
    assert Group.made_with == {"handling": "0", "days": 1}
    assert os.environ[HANDLING] == "1"
    monkeypatch.delenv(HANDLING)
    await sender(monkeypatch, 20.0)
    assert HANDLING not in os.environ


async def test_a_member_that_does_nothing_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "looks", float("inf"))
    made = await sender(monkeypatch, 0.05)
    with pytest.raises(StateError, match=r"did nothing for 0\.05 s"):
        await made.send(1)


async def test_leaving_ends_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "looks", float("inf"))
    made = await sender(monkeypatch, 60.0)
    sending = asyncio.ensure_future(made.send(1))
    await asyncio.sleep(0)  # it has taken the group
    await made.teardown_weight_sync_group()
    with pytest.raises(StateError, match="this member left"):
        await sending
