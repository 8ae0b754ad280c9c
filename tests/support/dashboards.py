"""A run for the page of the dashboard, whose views a test sends one by one, and receipts of such a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from averaging.dashboard import RunHistory
from averaging.receipts import Account, DropCode, Dropped, Outcome, Receipt, Role

NOW = 1_700_000_000.0
ENDPOINTS = ("10.0.0.1:4222", "10.0.0.2:4222", "10.0.0.3:4222")


def peer(endpoint: str, **more: Any) -> dict[str, Any]:
    """What a page shows of a peer that answers."""
    return {
        "endpoint": endpoint,
        "error": "",
        "role": "trainer",
        "doing": "idle",
        "strategy": "LocalSGD",
        "global_step": 7,
        "local_step": 70,
        "rate": 3.0,
        "samples": None,
        "last": None,
        "lane": "direct",
        "bytes_in": 1000.0,
        "bytes_out": 2000.0,
        "waits_for": "",
        "waiting": 0.1,
        "version": 5,
        "software": "averaging 0.2.0",
        "rounds": {"averaged": 7},
        "drops": {},
    } | more


def view(*peers: dict[str, Any], time: float = NOW, **run: Any) -> dict[str, Any]:
    """What a page shows of a run."""
    whole = {
        "id": "run",
        "time": time,
        "problem": "",
        "rounds_per_minute": 6.0,
        "waiting": 0.1,
        "phases": {"looking": 1.0, "allreduce": 2.0},
        "drops": {},
        "bytes_in": 3000.0,
        "bytes_out": 3000.0,
    }
    return {"run": whole | run, "peers": [*peers] or [peer(name) for name in ENDPOINTS], "others": []}


def receipt(endpoint: str = ENDPOINTS[0], number: int = 1, lost: str = "", **more: Any) -> Receipt:
    """The receipt of a round of three at one of them; `lost` was dropped."""
    accounts = [
        Account(
            name, Role.LEADER if name == ENDPOINTS[0] else Role.FOLLOWER, share=1 / 3, bytes_sent=300, lane="direct"
        )
        for name in ENDPOINTS
    ]
    values: dict[str, Any] = {
        "outcome": Outcome.AVERAGED,
        "group_id": number.to_bytes(20, "big"),
        "members": ENDPOINTS,
        "accounts": tuple(accounts),
        "seconds": 3.0,
        "allreduce_seconds": 2.0,
        "started": NOW - 100 + 10 * number,
        "endpoint": endpoint,
        "run_id": "run",
        "role": Role.LEADER if endpoint == ENDPOINTS[0] else Role.FOLLOWER,
        "phases": {"looking": 1.0, "allreduce": 2.0},
        "dropped": (Dropped(lost, "sent nothing for 4.1 s", DropCode.SILENT),) if lost else (),
    }
    return Receipt(number, **values | more)


class FakeRun:
    """Stands in for the collector. `views` is what a `DashboardServer` is given.

    Attributes:
        followed: how often it was called.
        history: the history that the server keeps.
    """

    def __init__(self, first: dict[str, Any] | None = None) -> None:
        self._views: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._views.put_nowait(first or view())
        self.followed = 0
        self.history = RunHistory()

    async def views(self, history: RunHistory) -> AsyncGenerator[dict[str, Any], None]:
        self.followed += 1
        self.history = history
        while True:
            yield await self._views.get()

    def send(self, next_view: dict[str, Any]) -> None:
        """Sends what the run looks like now to the open pages."""
        self._views.put_nowait(next_view)
