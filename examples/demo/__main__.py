"""The demo: real training averaged between processes that find each other; one is killed, and a new one joins.

    python -m examples.demo

Each peer trains a small language model on another part of the Python standard library's sources. A separate process
trains the same model alone, on one part. The first peer, through which the others joined, is killed during the
training, and a newcomer downloads the state of the run. The final results are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from examples.children import end, ending_children
from examples.demo.plot import draw
from examples.demo.record import Member, Record, judge
from examples.demo.view import View
from examples.outputs import claim, write_plot
from examples.sources import describe, divide, standard_library

ROOT = Path(__file__).parents[2]

KILLED_AFTER = 0.27
"""Fraction of the steps after which the first peer is killed."""

MOURNING = 1.0
"""Seconds from the kill until the newcomer joins."""


ENOUGH_FILES = 100
"""Minimum number of source files. Some Pythons have no library sources."""


class ProcessError(Exception):
    """A training process failed."""


@ending_children()
def main() -> None:
    """Runs the demo. Exits with 1 unless the averaged model is better and all peers hold the same bytes."""
    options = parse_arguments()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # some terminals' encodings lack "…"
    files = standard_library()
    if len(files) < ENOUGH_FILES:
        sys.exit(
            f"this Python has only {len(files)} sources of its library to learn from; run the demo with another one"
        )
    try:
        claim(options.output)
    except OSError as unmade:
        sys.exit(f"cannot write to {options.output}: {unmade.strerror}; give --output another folder")
    # The width of a pipe is unknown, so lines and tables are not wrapped.
    console = Console(width=None if sys.stdout.isatty() else 100)
    parts = divide(files, options.peers).parts
    if not all(parts):
        sys.exit(f"there is too little text for {options.peers} peers; give --peers a smaller number")
    record = Record(options.steps)
    view = View(record, console)
    try:
        asyncio.run(Conductor(options, parts, record, view).conduct())
        plot = options.output / "losses.png"
        drawn = False
        try:
            write_plot(plot, lambda file: draw(record, file))
            drawn = True
        except OSError as unwritten:  # the training is done, and its result does not depend on the plot
            text = f"{plot} could not be written: {unwritten.strerror}; free disk space"
            console.print(text, style="red", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("Stopped; all processes have ended.")
        sys.exit(130)
    except ExceptionGroup as group:
        failed, unforeseen = group.split(ProcessError)
        if failed is None or unforeseen is not None:
            raise
        for error in failed.exceptions:
            console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    verdict = judge(record)
    view.summarise(verdict, str(plot) if drawn else None)
    sys.exit(0 if verdict.good else 1)


class Conductor:
    """Starts the processes, kills one, and ends them all. It takes no part in the averaging."""

    def __init__(
        self, options: argparse.Namespace, parts: Sequence[tuple[Path, ...]], record: Record, view: View
    ) -> None:
        self._options, self._record, self._view = options, record, view
        self._parts = parts
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._changed = asyncio.Event()

    async def conduct(self) -> None:
        """Runs from the first process to the end of the last.

        Raises:
            ExceptionGroup: of ProcessError, if a process failed.
        """
        options, record, view = self._options, self._record, self._view
        async with view.progress(), asyncio.TaskGroup() as tasks:

            def introduce(member: Member) -> None:
                record.members.append(member)
                view.say_of(member, f"starts, trains on part {member.part}: {describe(self._parts[member.part - 1])}")

            def start(member: Member, *arguments: str) -> None:
                introduce(member)
                tasks.create_task(self._run(member, *arguments))

            alone = Member("alone", part=1, alone=True)
            founder, *others = [Member(f"peer {number}", part=number) for number in range(1, options.peers + 1)]
            start(founder)
            start(alone, "--alone")
            await self._until(lambda: bool(founder.endpoint))
            for member in others:
                start(member, "--join", founder.endpoint)
            if options.kill:
                # Its start and its imports would take longer than a quick training.
                newcomer = Member(f"peer {options.peers + 1}", part=founder.part, newcomer=True)
                tasks.create_task(self._run(newcomer, "--spare"))
                await self._until(lambda: min(peer.step for peer in record.peers) >= KILLED_AFTER * options.steps)
                founder.killed()
                self._processes[founder.name].kill()
                view.say_of(founder, f"killed without warning (SIGKILL) at step {founder.killed_at}", "bold red")
                await asyncio.sleep(MOURNING)
                view.say_of(newcomer, f"comes in place of {founder.name}", "bold")
                survivors = [peer.endpoint for peer in record.living]
                introduce(newcomer)
                self._tell(newcomer, " ".join(survivors))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _tell(self, member: Member, line: str) -> None:
        pipe = self._processes[member.name].stdin
        if pipe is None:
            raise ValueError("started without a pipe")
        pipe.write(f"{line}\n".encode())

    async def _run(self, member: Member, *arguments: str) -> None:
        """Runs one process from start to end. Cancelling this ends the process."""
        options = self._options
        common = {"part": member.part, "peers": options.peers, "steps": options.steps, "sync-every": options.sync_every}
        common |= {"seed": options.seed, "recipe": "quick" if options.quick else "full"}
        log = options.output / f"{member.name.replace(' ', '-')}.log"
        try:
            stderr = log.open("w")
        except OSError as error:
            raise ProcessError(f"{log} cannot be written: {error.strerror}; give --output another folder") from None
        with stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "examples.train"),
                *(f"--{name}={value}" for name, value in common.items()),
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                start_new_session=True,  # so that only the conductor gets Ctrl+C
            )
        self._processes[member.name] = process
        try:
            await self._read(member, process)
            code = await process.wait()
        except asyncio.CancelledError:
            member.state = "stopping"
            raise
        finally:
            await end(process)
        if code and member.killed_at is None:
            last_lines = "\n".join(log.read_text().splitlines()[-15:])
            raise ProcessError(f"{member.name} ended with exit code {code}; the end of {log}:\n{last_lines}")

    async def _read(self, member: Member, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None:
            raise ValueError("started without a pipe")
        async for line in process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # an incomplete line of a killed process
            if note := member.take(event):
                self._view.say_of(member, self._record.explain(note, member))
            self._changed.set()


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Training averaged between processes.")
    parser.add_argument("--quick", action="store_true", help="a tiny model for a few seconds")
    parser.add_argument("--steps", type=int, help="steps of training (700; quick: 400)")
    parser.add_argument("--sync-every", type=int, help="steps between two averages (20; quick: 10)")
    parser.add_argument("--peers", type=int, default=4, help="processes that average together, at least 2 (4)")
    parser.add_argument("--seed", type=int, default=0, help="of the models and of the order of their texts (0)")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder for plot and logs (runs/demo)")
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="kill no peer")
    options = parser.parse_args()
    if options.steps is None:
        options.steps = 400 if options.quick else 700
    if options.sync_every is None:
        options.sync_every = 10 if options.quick else 20
    if options.peers < 2:
        parser.error("--peers must be at least 2")
    if options.steps < 10 or options.sync_every < 1:
        parser.error("--steps must be at least 10 and --sync-every at least 1")
    return options


if __name__ == "__main__":
    main()
