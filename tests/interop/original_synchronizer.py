"""The original `Synchronizer` of trinity-rft, driven by JSON lines: `python original_synchronizer.py FOLDER`.

It runs without a Ray cluster: modules are fakes with `is_alive.remote()`, and `ray.get_actor` returns fakes too. Each
line is `[name, arguments]`, and is answered with the calls that have ended since, and the state afterwards.
"""

import asyncio
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import ray
from manual_time import ManualTimeLoop, decoded, encoded
from trinity.common.constants import RunningStatus, SyncMethod
from trinity.manager.synchronizer import Synchronizer

LOOP = ManualTimeLoop()
asyncio.set_event_loop(LOOP)


class Remote:
    """A method of an actor."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Module:
    """An actor that notes its calls."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.alive = True
        self.name, self.log = name, log
        self.is_alive = Remote(self._is_alive)

    async def _is_alive(self) -> bool:
        if not self.alive:
            raise ray.exceptions.RayActorError
        return True

    def __getattr__(self, method: str) -> Remote:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*arguments: Any) -> Any:
            if not self.alive:
                raise ray.exceptions.RayActorError
            self.log.append([self.name, method, [*arguments]])
            return ("10.0.0.1", 1234, [["w", "float32", [2]]]) if method == "get_weight_sync_info" else None

        return Remote(call)


class Original:
    """One synchronizer with its pending calls."""

    def __init__(self, folder: str, method: str, timeout: float) -> None:
        self.log: list[Any] = []
        self.modules = {"trainer": Module("trainer", self.log), "explorer": Module("explorer", self.log)}
        ray.get_actor = lambda name, namespace=None: self.modules[name]
        explorer = SimpleNamespace(rollout_model=SimpleNamespace(enable_lora=False), name="explorer")
        synchronizer = SimpleNamespace(
            sync_method=SyncMethod(method), sync_timeout=timeout, explorer_world_size=1, group_name="group"
        )
        config = SimpleNamespace(
            explorer=explorer,
            trainer=SimpleNamespace(trainer_type="verl", name="trainer"),
            synchronizer=synchronizer,
            mode="both",
            checkpoint_job_dir=folder,
            ray_namespace="",
        )

        async def create() -> Synchronizer:
            return Synchronizer(config, self.modules["trainer"])

        self.synchronizer = LOOP.run_until_complete(create())
        self.pending: dict[str, asyncio.Task[Any]] = {}

    def call(self, number: str, name: str, arguments: list[Any]) -> None:
        async def call() -> Any:
            result = getattr(self.synchronizer, name)(*[decoded(argument, RunningStatus) for argument in arguments])
            return encoded(await result if asyncio.iscoroutine(result) else result)

        self.pending[number] = LOOP.start(call())

    def ended(self) -> dict[str, Any]:
        """The results of the calls that have ended, and the errors by the name of their class."""
        found = {}
        for number, task in list(self.pending.items()):
            if task.done():
                del self.pending[number]
                error = task.exception()
                found[number] = {"error": type(error).__name__} if error else {"result": task.result()}
        return found

    def state(self) -> dict[str, Any]:
        synchronizer = self.synchronizer
        return {
            "version": synchronizer.model_version,
            "trainer": synchronizer.trainer_status.value,
            "counts": [synchronizer.explorer_status_counts.get(status, 0) for status in RunningStatus],
            "modules": len(synchronizer._modules),
            "calls": self.log,
        }

    def repair(self, version: int, trainer: str, counts: list[int]) -> None:
        """Sets the state, after a fault of the original has been seen."""
        self.synchronizer.model_version = version
        self.synchronizer.trainer_status = RunningStatus(trainer)
        self.synchronizer.explorer_status_counts.update(zip(RunningStatus, counts, strict=True))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints
    original: Any = None
    for line in sys.stdin:
        name, arguments = json.loads(line)
        if name == "new":
            for task in asyncio.all_tasks(LOOP):
                task.cancel()
            LOOP.settle()
            original = Original(*arguments)
        elif name == "advance":
            LOOP.now += arguments[0]
            LOOP.settle()
        elif name == "die":
            original.modules[arguments[0]].alive = False
        elif name == "add_module":
            LOOP.start(original.synchronizer.add_module(original.modules[arguments[0]]))
        elif name == "repair":
            original.repair(*arguments)
        else:
            number, method, given = arguments
            original.call(number, method, given)
        LOOP.settle()
        print(json.dumps({"ended": original.ended(), "state": original.state()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
