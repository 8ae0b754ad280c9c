"""The demo's output: a live table on a terminal, plain lines elsewhere, and the summary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from examples.demo.record import Member, Record, Verdict

REDRAWN, REPEATED = 0.25, 10.0
"""Seconds between updates of the table, and between plain lines of progress."""

STYLES = {"KILLED": "bold red", "training": "green", "finishing": "cyan", "done": "bold green"}


class View:
    """Prints the progress of the demo.

    Args:
        record: the processes to show.
        console: the console to print to.
    """

    def __init__(self, record: Record, console: Console) -> None:
        self._record, self._console = record, console
        self._started = time.monotonic()

    @property
    def elapsed(self) -> str:
        """Minutes and seconds since the start."""
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes}:{seconds:02}"

    def say(self, line: str, style: str = "") -> None:
        """Prints one line, above the table if there is one."""
        self._print(f"{self.elapsed}  {line}", style)

    def say_of(self, member: Member, line: str, style: str = "") -> None:
        """Prints an event of a process."""
        self.say(f"{member.name}: {line}", style)

    @asynccontextmanager
    async def progress(self) -> AsyncIterator[None]:
        """Shows progress inside the context."""
        show = asyncio.create_task(self._redraw() if self._console.is_terminal else self._repeat())
        try:
            yield
        finally:
            show.cancel()
            with suppress(asyncio.CancelledError):
                await show

    async def _redraw(self) -> None:
        with Live(self._table(), console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    await asyncio.sleep(REDRAWN)
                    live.update(self._table(), refresh=True)
            finally:
                live.update(self._table(), refresh=True)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(REPEATED)
            self.say("; ".join(self._short(member) for member in self._record.members))

    def _short(self, member: Member) -> str:
        loss = "" if member.recent_loss is None else f" loss {member.recent_loss:.2f}"
        group = f" in a group of {len(member.members)}" if member.members else ""
        return f"{member.name} {member.state} step {member.step}{loss}{group}"

    def _table(self) -> Table:
        title = f"{self.elapsed} min; losses in bits per byte"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("process", no_wrap=True)
        table.add_column("state", no_wrap=True, min_width=9)
        table.add_column("step", justify="right", no_wrap=True, min_width=2 * len(str(self._record.steps)) + 1)
        table.add_column("own text", justify="right", no_wrap=True)
        table.add_column("held-out", justify="right", no_wrap=True)
        table.add_column("rounds", justify="right", no_wrap=True)
        table.add_column("last round with", no_wrap=True, min_width=20)
        for member in self._record.members:
            others = [endpoint for endpoint in member.members if endpoint != member.endpoint]
            names = ", ".join(name.removeprefix("peer ") for name in self._record.names(others))
            table.add_row(
                member.name,
                Text(member.state, style=STYLES.get(member.state, "")),
                f"{member.step}/{self._record.steps}",
                number(member.recent_loss),
                number(member.recent_held_out),
                "" if member.alone else str(member.rounds),
                f"{names} in {member.seconds:.1f} s" if names else "",
                style="dim" if member.killed_at is not None else "",
            )
        return table

    def summarise(self, verdict: Verdict, plot: str | None) -> None:
        """Prints the results, the verdict, and the path of the plot, if it could be written."""
        record, console = self._record, self._console
        table = Table(title="Loss on held-out text, in bits per byte", title_justify="left")
        table.add_column("process", no_wrap=True)
        table.add_column("own steps", justify="right")
        table.add_column("averaged", justify="right")
        table.add_column("alone", justify="right")
        table.add_column("difference", justify="right")
        table.add_column("sha256 of parameters", no_wrap=True)
        for peer in record.peers:
            own = str(peer.step - peer.first_step)
            if peer.result is None:
                table.add_row(peer.name, own, "killed", style="dim")
                continue
            difference = f"{peer.result - verdict.alone:+.3f}"
            table.add_row(
                peer.name, own, number(peer.result), number(verdict.alone), difference, f"{peer.sha256[:16]}…"
            )
        console.print()
        console.print(table)
        alone = record.alone
        self._print(f"Alone: the same model, trained on part {alone.part} only, for {alone.step} steps.")
        if verdict.same_bytes:
            self._print(f"All {len(record.living)} peers hold the same bytes after the last average.")
        else:
            self._print("The peers do NOT hold the same bytes after the last average.", "bold red")
        self._print(str(verdict), "bold green" if verdict.good else "bold red")
        if plot is not None:
            self._print(f"Curves: {plot}")
        self._print(f"Took {self.elapsed} min.")

    def _print(self, line: str, style: str = "") -> None:
        """Wraps long lines on a terminal, but not in a pipe."""
        self._console.print(Text(line, style=style), soft_wrap=not self._console.is_terminal)


def number(loss: float | None) -> str:
    """Formats a loss; empty if there is none."""
    return "" if loss is None else f"{loss:.3f}"
