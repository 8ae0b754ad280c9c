"""A trainer or an explorer in a process of its own: `python -m tests.synchronizer.worker '{"role": …}'`.

With `collective` the weights travel in a weight sync group, else from the memory of the synchronizer. It prints JSON
lines: `ready`, `version` with the value of the weights for each version that a trainer sent or an explorer got, `lost`
or `none` if a transfer did not come about, and `end`.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from averaging.errors import CallRefusedError, PeerUnreachableError, StateError
from averaging.rl.synchronizer import RunningStatus, Synchronizer
from averaging.rl.synchronizer.groups import WeightReceiver, WeightSender
from averaging.rl.synchronizer.remote import RemoteSynchronizer
from tests.support.processes import DEADLINE
from tests.support.worker import tell

PAUSE = 0.02
"""Seconds before another try, so that a test gets no thousands of lines."""


def weights(value: float, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {
        "w": torch.full((1000,), value, device=device),
        "half": torch.full((3, 2), value, dtype=torch.bfloat16, device=device),
    }


def value_of(state: dict[str, torch.Tensor]) -> float:
    """The value of all elements; of two versions mixed it would be NaN."""
    found = {float(element) for tensor in state.values() for element in tensor.flatten()}
    return found.pop() if len(found) == 1 else float("nan")


async def until(condition: Callable[[], object]) -> None:
    """Waits until what other tasks and processes do has an effect here."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.01)


async def train(synchronizer: RemoteSynchronizer, options: dict[str, Any]) -> None:
    backend, device = options.get("backend", "gloo"), options.get("device", "cpu")
    now = weights(options.get("value", 0.0), device)
    sender = WeightSender(lambda: now, backend=backend, device=device)
    await synchronizer.add_module(sender)
    await synchronizer.set_trainer_status(RunningStatus.RUNNING)
    tell("ready")
    if options.get("idle"):
        await asyncio.Event().wait()
    step = options.get("step", 0)
    while step < options.get("steps", 1 << 30):
        await asyncio.sleep(PAUSE)
        for tensor in now.values():
            tensor.fill_(step + 1)
        if not options["collective"]:
            version = await synchronizer.set_model_state_dict(now, step + 1)
        else:
            try:
                found = await synchronizer.ready_to_nccl_sync("trainer", step + 1)
                if found is None:
                    raise StateError("not ready")
                version = found
                await sender.send(version)
            except StateError as error:
                tell("lost", error=str(error))
                with suppress(CallRefusedError):
                    await synchronizer.coordinate_weight_sync_setup(20.0)
                continue
        step += 1
        tell("version", version=version, value=value_of(now))
    await synchronizer.set_trainer_status(RunningStatus.STOPPED)


async def explore(synchronizer: RemoteSynchronizer, options: dict[str, Any]) -> None:
    receiver = WeightReceiver(options.get("backend", "gloo"), options.get("device", "cpu"))
    await synchronizer.add_module(receiver)
    await synchronizer.set_explorer_status(RunningStatus.RUNNING)
    tell("ready")
    version = 0
    while await synchronizer.trainer_requires_weight_sync() is not None:
        if options["collective"]:
            found = await synchronizer.ready_to_nccl_sync("explorer", 0)
            if found is None:
                tell("none")
                await asyncio.sleep(PAUSE)
                with suppress(CallRefusedError):
                    await synchronizer.coordinate_weight_sync_setup(20.0)
                continue
            with suppress(StateError):
                tell("version", version=found, value=value_of(await receiver.receive(found)))
        else:
            await synchronizer.wait_new_model_state_dict(version)
            version = await get_newer(synchronizer, version)
    if not options["collective"]:  # the trainer may stop just after it has set its last version
        await get_newer(synchronizer, version)
    await synchronizer.set_explorer_status(RunningStatus.STOPPED, RunningStatus.RUNNING)


async def get_newer(synchronizer: RemoteSynchronizer, version: int) -> int:
    """Reports the newest version if it is newer than `version`; returns it."""
    if await synchronizer.get_latest_model_version() > version:
        state, version = await synchronizer.get_model_state_dict()
        assert isinstance(state, dict)
        tell("version", version=version, value=value_of(state))
    return version


async def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    connected = Synchronizer.connect(options["endpoint"], name=options["name"])
    async with connected as synchronizer:
        try:
            await (train if options["role"] == "trainer" else explore)(synchronizer, options)
        except PeerUnreachableError as error:
            tell("unreachable", error=str(error))
    tell("end")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
