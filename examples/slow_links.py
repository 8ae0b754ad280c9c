"""Two ways to average over slow links, side by side: DiLoCo with int8, and with top-k.

    python -m examples.slow_links

A small language model is trained for a moment by one process. From there two teams of four peers go on at the same
time, each peer a process with its own part of the text, behind a link of 10 Mbit/s that is emulated on this machine.
One team sends its changes in int8, the other one the largest of each block in 2 bit. The bytes, the seconds and the
loss on held-out text are measured, and so is what is said about them in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from examples.children import end, ending_children
from examples.command_line import positive
from examples.links import Link, relay
from examples.outputs import claim, clear
from examples.ports import free_ports
from examples.sources import divide, standard_library

ROOT = Path(__file__).parents[1]

PEERS = 4
TEAMS = ("int8", "top-k")

REDRAWN, REPEATED = 0.5, 5.0
"""Seconds between updates of the table, and between plain lines of progress."""

ALIKE = 0.005
"""Relative difference of two losses below which neither is called better."""


class ProcessError(Exception):
    """A training process failed."""


@dataclass(slots=True)
class Member:
    """One peer of a team.

    Attributes:
        step: local steps so far.
        in_rounds: seconds in rounds so far.
        averaged: rounds in which all peers took part.
        digest: of its final parameters.
    """

    step: int = 0
    in_rounds: float = 0.0
    averaged: int = 0
    began: float | None = None
    ended: float | None = None
    loss: float | None = None
    digest: str = ""


@dataclass(slots=True)
class Team:
    """Four peers that average in the same way.

    Attributes:
        links: of each peer.
        before: bytes that the links had carried when the last peer began, such as the model that newcomers download.
        held_out: loss of the first peer on held-out text after each round, by the seconds since its first step.
    """

    name: str
    members: list[Member] = field(default_factory=lambda: [Member() for _ in range(PEERS)])
    links: list[Link] = field(default_factory=list)
    before: int = 0
    held_out: list[tuple[float, float]] = field(default_factory=list)

    def take(self, member: Member, event: Mapping[str, Any], now: float) -> None:
        """Processes an event of a peer."""
        match event:
            case {"event": "found"}:
                member.began = now
                self.before = sum(link.passed for link in self.links)
            case {"event": "step", "step": step}:
                member.step = step
            case {"event": "round", "outcome": "averaged", "members": members, "dropped": dropped, "seconds": seconds}:
                member.in_rounds += seconds
                member.averaged += len(members) == PEERS and not dropped
            case {"event": "held_out", "loss": loss} if member is self.members[0] and member.began is not None:
                self.held_out.append((now - member.began, loss))
            case {"event": "done", "loss": loss, "sha256": digest}:
                member.loss, member.digest, member.ended = loss, digest, now

    @property
    def bytes(self) -> float:
        """Bytes that a peer's link has carried since the training began, in the mean."""
        return (sum(link.passed for link in self.links) - self.before) / PEERS

    def result(self) -> Result:
        """The result, when all peers have ended.

        Raises:
            ValueError: one has not.
        """
        first = self.members[0]
        if first.loss is None or any(member.ended is None or member.began is None for member in self.members):
            raise ValueError(f"a peer of {self.name} ended without a result")
        seconds = max((member.ended or 0.0) - (member.began or 0.0) for member in self.members)
        in_rounds = sum(member.in_rounds for member in self.members) / PEERS
        alike = len({member.digest for member in self.members}) == 1
        rounds = min(member.averaged for member in self.members)
        return Result(self.name, first.loss, self.bytes, seconds, in_rounds, rounds, alike, tuple(self.held_out))


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured of a team.

    Attributes:
        loss: on held-out text in the end, in bits per byte.
        bytes: that the link of a peer has carried, in the mean.
        seconds: from the first step to the end.
        in_rounds: seconds of these in rounds, in the mean of the peers.
        rounds: number of rounds in which all peers took part.
        alike: whether all peers ended with the same bytes.
        held_out: loss by the seconds since the first step.
    """

    name: str
    loss: float
    bytes: float
    seconds: float
    in_rounds: float
    rounds: int
    alike: bool
    held_out: tuple[tuple[float, float], ...] = ()

    @property
    def training(self) -> float:
        """Share of the time outside of rounds."""
        return max(0.0, 1 - self.in_rounds / self.seconds)

    def loss_at(self, seconds: float) -> float | None:
        """The last loss on held-out text that was measured until then."""
        return next((loss for at, loss in reversed(self.held_out) if at <= seconds), None)


def verdict(dense: Result, sparse: Result) -> Iterator[str]:
    """What the measurements say, in sentences."""
    over = sparse.loss / dense.loss - 1
    if dense.rounds != sparse.rounds:
        yield (
            f"All peers took part in {dense.rounds} rounds of {dense.name} and in {sparse.rounds} of {sparse.name}, so "
            "the two cannot be compared; the logs say why. Run it again on a machine that is less busy."
        )
        return
    yield (
        f"{sparse.name} sent {times(dense.bytes, sparse.bytes)} bytes, and ended at {sparse.loss:.3f} instead of "
        f"{dense.loss:.3f} bits per byte ({over:+.1%}) after {sparse.seconds:.0f} instead of {dense.seconds:.0f} s. "
        f"Its peers trained {sparse.training:.0%} of the time, those of {dense.name} {dense.training:.0%}."
    )
    first, second = sorted((dense, sparse), key=lambda team: team.seconds)
    at = second.loss_at(first.seconds)
    if at is not None:
        yield f"After {first.seconds:.0f} s {first.name} was done at {first.loss:.3f}, {second.name} was at {at:.3f}."
    faster, better = sparse.seconds < dense.seconds, sparse.loss < dense.loss
    if abs(over) < ALIKE:
        yield f"The losses are equal within {ALIKE:.1%}; over this link {(sparse if faster else dense).name} is faster."
    elif faster == better:
        yield f"Over this link {(sparse if faster else dense).name} is better and faster."
    else:
        quick, good = (sparse, dense) if faster else (dense, sparse)
        yield f"{quick.name} is faster over this link, and {good.name} is better after the same steps."


def times(more: float, less: float) -> str:
    """Such as `12.5 times fewer`."""
    return f"{more / less:.1f} times fewer" if less < more else f"{less / more:.1f} times as many"


class Conductor:
    """Starts the links and the processes, and ends them all. It takes no part in the averaging.

    Args:
        say: prints a line.
    """

    def __init__(self, options: argparse.Namespace, teams: Sequence[Team], say: Callable[[str], None]) -> None:
        self._options, self._teams, self._say = options, teams, say

    async def conduct(self) -> None:
        """Runs from the first process to the end of the last.

        Raises:
            ExceptionGroup: of ProcessError, if a process failed.
        """
        options = self._options
        start = options.output / "start.safetensors"
        self._say(f"one process trains for {options.start_steps} steps; both teams begin with its model")
        common = {"recipe": "slow-links", "peers": PEERS, "seed": options.seed}
        async with asyncio.TaskGroup() as tasks:
            alone = common | {"steps": options.start_steps, "save": start}
            tasks.create_task(self._run("start", [*arguments(alone), "--alone"], lambda _: None))
        self._say(f"{len(self._teams) * PEERS} peers begin, each behind {options.mbit:g} Mbit/s")
        common |= {"steps": options.steps, "sync-every": options.sync_every, "start": start}
        async with AsyncExitStack() as links, asyncio.TaskGroup() as tasks:
            for team in self._teams:
                tasks.create_task(self._team(team, common, links))

    async def _team(self, team: Team, common: Mapping[str, object], links: AsyncExitStack) -> None:
        """Runs the peers of a team; the others join through the first one, whose address is known before it runs."""
        ports = free_ports(PEERS)
        team.links.extend(Link(self._options.mbit * 1e6 / 8) for _ in ports)
        advertised = [
            await links.enter_async_context(relay(link, port)) for link, port in zip(team.links, ports, strict=True)
        ]
        async with asyncio.TaskGroup() as tasks:
            for number, (member, port) in enumerate(zip(team.members, ports, strict=True), 1):
                own = {"strategy": team.name, "run-id": team.name, "part": number, "listen": f"127.0.0.1:{port}"}
                own |= {"advertise": f"127.0.0.1:{advertised[number - 1]}"}
                joining = [f"--join=127.0.0.1:{advertised[0]}"] if number > 1 else []
                given = [*arguments({**common, **own}), *joining]
                tasks.create_task(self._run(f"{team.name}-{number}", given, partial(take, team, member)))

    async def _run(self, name: str, given: Sequence[str], note: Callable[[Mapping[str, Any]], None]) -> None:
        """Runs one process from start to end. Cancelling this ends the process."""
        log = self._options.output / f"{name}.log"
        with log.open("w") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "examples.train", *given),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                start_new_session=True,  # so that only this process gets Ctrl+C
            )
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                with suppress(ValueError):  # an incomplete line of a killed process
                    note(json.loads(line))
            code = await process.wait()
        finally:
            await end(process)
        if code:
            last_lines = "\n".join(log.read_text().splitlines()[-15:])
            raise ProcessError(f"{name} ended with exit code {code}; the end of {log}:\n{last_lines}")


def take(team: Team, member: Member, event: Mapping[str, Any]) -> None:
    """Processes an event of a peer now."""
    team.take(member, event, time.monotonic())


def arguments(given: Mapping[str, object]) -> list[str]:
    """Options of a command line."""
    return [f"--{name}={value}" for name, value in given.items()]


class View:
    """Prints the progress: a live table on a terminal, plain lines elsewhere."""

    def __init__(self, teams: Sequence[Team], steps: int, console: Console) -> None:
        self._teams, self._steps, self._console = teams, steps, console
        self._started = time.monotonic()

    @property
    def elapsed(self) -> str:
        """Minutes and seconds since the start."""
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes}:{seconds:02}"

    def say(self, line: str, style: str = "") -> None:
        """Prints one line, above the table if there is one."""
        self._console.print(Text(f"{self.elapsed}  {line}", style=style), soft_wrap=not self._console.is_terminal)

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
        with Live(self.table(), console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    await asyncio.sleep(REDRAWN)
                    live.update(self.table(), refresh=True)
            finally:
                live.update(self.table(), refresh=True)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(REPEATED)
            if any(team.bytes for team in self._teams):
                self.say("; ".join(self._short(team) for team in self._teams))

    def _short(self, team: Team) -> str:
        loss = f", {team.held_out[-1][1]:.3f} bits per byte" if team.held_out else ""
        return f"{team.name} step {min(member.step for member in team.members)}, {mb(team.bytes)}{loss}"

    def table(self) -> Table:
        """The present state of both teams."""
        table = Table(title=f"{self.elapsed} min", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for head in ("team", "step", "rounds of all", "bytes of a link", "in rounds", "held-out bits per byte"):
            table.add_column(head, justify="left" if head == "team" else "right", no_wrap=True)
        for team in self._teams:
            first = team.members[0]
            table.add_row(
                team.name,
                f"{min(member.step for member in team.members)}/{self._steps}",
                f"{first.averaged}",
                mb(team.bytes),
                f"{first.in_rounds:.1f} s",
                f"{team.held_out[-1][1]:.3f}" if team.held_out else "",
            )
        return table


def mb(nbytes: float) -> str:
    """Such as `1.25 MB`."""
    return f"{nbytes / 1e6:.2f} MB"


def number_above_0(text: str) -> float:
    """Parses a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def parse_arguments(given: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    name = "python -m examples.slow_links"
    parser = argparse.ArgumentParser(prog=name, usage=f"{name} [options]", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=positive, default=120, help="steps of each peer (120)")
    parser.add_argument("--sync-every", type=positive, default=10, help="steps between two rounds (10)")
    parser.add_argument("--start-steps", type=positive, default=150, help="steps of the process before them (150)")
    parser.add_argument("--mbit", type=number_above_0, default=10.0, help="Mbit/s of each peer's link (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the order of its text (0)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/slow-links"), help="folder for logs (runs/slow-links)"
    )
    options = parser.parse_args(given)
    if options.sync_every > options.steps:
        parser.error("--sync-every must be at most --steps: there would be no round")
    if not all(divide(standard_library(), PEERS).parts):
        parser.error("this Python has no sources of its library to learn from; run this with another one")
    try:
        claim(options.output)
        clear(options.output)
    except OSError as unmade:
        parser.error(f"cannot write to {options.output}: {unmade.strerror}; give --output another folder")
    return options


@ending_children()
def main(given: list[str] | None = None) -> None:
    """Runs both teams. Exits with 1 if a process failed, or if the peers of a team do not hold the same bytes."""
    options = parse_arguments(given)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(width=None if sys.stdout.isatty() else 100)
    teams = [Team(name) for name in TEAMS]
    view = View(teams, options.steps, console)

    async def run() -> None:
        async with view.progress():
            await Conductor(options, teams, view.say).conduct()

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        console.print("Stopped; all processes have ended.")
        sys.exit(130)
    except ExceptionGroup as group:
        failed, unforeseen = group.split(ProcessError)
        if failed is None or unforeseen is not None:
            raise
        for error in leaves(failed):
            console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    results = [team.result() for team in teams]
    console.print(view.table())
    for sentence in verdict(*results):
        console.print(Text(sentence, style="bold"), soft_wrap=not console.is_terminal)
    different = [result.name for result in results if not result.alike]
    for name in different:
        console.print(f"The peers of {name} do NOT hold the same bytes.", style="bold red")
    sys.exit(1 if different else 0)


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The exceptions of nested groups."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


if __name__ == "__main__":
    main()
