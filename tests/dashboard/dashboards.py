"""A run for the page of the dashboard, whose views a test sends one by one, and receipts of such a run."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from averaging.dashboard import RunHistory
from averaging.monitor import PeerView, RunSnapshot, snapshot_json
from averaging.receipts import Account, DropCode, Dropped, Outcome, Receipt, Role, TrainingProgress
from tests.support.grpc_fakes import STATUS

NOW = 1_700_000_000.0
ENDPOINTS = ("10.0.0.1:4222", "10.0.0.2:4222", "10.0.0.3:4222")


def peer(endpoint: str, rate: float | None = 3.0, **more: Any) -> dict[str, Any]:
    """What a page gets of a peer that answers; `strategy` is that of its training."""
    training = TrainingProgress(more.pop("strategy", "LocalSGD"), "training", 70, 7, steps_per_second=rate)
    status = replace(
        STATUS,
        endpoint=endpoint,
        software="averaging 0.2.0",
        members=(),
        waiting_for=(),
        last_round=None,
        training=training,
    )
    view = PeerView(endpoint, status=status, bytes_sent_per_second=2000.0, bytes_received_per_second=1000.0)
    [shown] = snapshot_json(RunSnapshot(NOW, "run", (view,)), receipts=False)["peers"]
    return {**shown, "lanes": ["direct"], "waiting_share": 0.1, "answers": not more.get("error"), **more}


def view(*peers: dict[str, Any], **run: Any) -> dict[str, Any]:
    """What a page gets of a run."""
    shown = snapshot_json(RunSnapshot(NOW, "run", ()), receipts=False)
    figures = {"rounds_per_minute": 6.0, "waiting_share": 0.1, "phase_seconds": {"looking": 1.0, "allreduce": 2.0}}
    return {**shown, **figures, "peers": [*peers] or [peer(name) for name in ENDPOINTS], **run}


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
