"""An event loop whose clock moves only when it is told to, and how arguments travel as JSON.

Used here and in the environment of the original.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import torch


class ManualTimeLoop(asyncio.SelectorEventLoop):
    """Its time is `now`."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def settle(self, turns: int = 40) -> None:
        """Runs what can run now."""
        for _ in range(turns):
            self.run_until_complete(asyncio.sleep(0))

    def start(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a call and runs what can run now."""
        task = self.create_task(call)
        self.settle()
        return task


def decoded(argument: Any, statuses: Any) -> Any:
    if isinstance(argument, dict):
        if "status" in argument:
            return statuses(argument["status"])
        return {name: torch.tensor(value) for name, value in argument["tensors"].items()}
    return argument


def encoded(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.tolist()
    if isinstance(result, dict):
        return {name: encoded(value) for name, value in result.items()}
    if isinstance(result, tuple | list):
        return [encoded(value) for value in result]
    if hasattr(result, "__next__"):
        return [encoded(item) for item in result]
    return result
