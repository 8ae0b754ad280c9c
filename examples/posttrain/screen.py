"""The screen: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from examples.posttrain.record import Record

REPEATED = 10.0
"""Seconds between plain lines of progress."""


class Screen:
    """Shows the progress inside the context."""

    def __init__(self, record: Record, steps: int, console: Console) -> None:
        self._record, self._steps, self._console = record, steps, console
        self._began = time.monotonic()
        self._repeated = self._began
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def say(self, line: str, style: str = "") -> None:
        """Prints a line, above the table if there is one."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self._console.print(Text(f"{minutes}:{seconds:02}  {line}", style), soft_wrap=True)

    def update(self) -> None:
        """Shows what the record has now."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif time.monotonic() >= self._repeated + REPEATED:
            self._repeated = time.monotonic()
            self.say("; ".join(self._short(number) for number in range(len(self._record.sites))))

    def _short(self, number: int) -> str:
        site = self._record.sites[number]
        reward = site.reward()
        rounds = int(site.steps[-1]["rounds"]) if site.steps else 0
        text = f"site {number + 1}: {site.ranks} ranks, step {site.local_step} of {self._steps}, {rounds} rounds"
        return text if reward is None else f"{text}, reward {reward:.2f}"

    def _table(self) -> Group:
        table = Table(title="Post-training in two sites")
        for column in (
            "site",
            "nodes",
            "ranks",
            "step",
            "rounds",
            "sites in the last",
            "reward",
            "versions at explorers",
        ):
            table.add_column(column, justify="left" if column == "site" else "right")
        for number, site in enumerate(self._record.sites, start=1):
            last = site.steps[-1] if site.steps else {"rounds": 0, "sites": 0}
            reward = site.reward()
            table.add_row(
                str(number),
                str(site.ranks // 2),
                str(site.ranks),
                f"{site.local_step}/{self._steps}",
                str(int(last["rounds"])),
                str(int(last["sites"])),
                "" if reward is None else f"{reward:.2f} of 2",
                ", ".join(str(events[-1]["version"]) for _, events in sorted(site.versions.items())),
            )
        kills = [
            Text(
                f"{kill.what}: killed, "
                + ("…" if kill.seconds is None else f"at work again after {kill.seconds:.1f} s"),
                "red" if kill.seconds is None else "green",
            )
            for kill in self._record.kills
        ]
        return Group(table, *kills)
