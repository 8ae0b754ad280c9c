"""An event loop whose clock moves only when it is told to. Used here and in the environment of the original."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


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
