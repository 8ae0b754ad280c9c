"""Measures the interruption after one of four peers is killed, and how soon a newcomer takes part.

Four processes average 16 MiB repeatedly. One of them is killed (SIGKILL) at a random moment, and the time until each of
the others has finished its next round is measured. Then a new one is started, and the time until its first average is
measured, from the start of its process and from the moment at which it was up.
Peers declare themselves for `--group-wait` seconds: a leader waits that long for a fourth member that no longer exists.

With `--hivemind PYTHON` (see `benchmarks.allreduce --help`) the same is done with hivemind 1.1.12. If the peers have
not recovered after a minute, the next kill uses four new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.output import make_folder, write
from benchmarks.workers import ENVIRONMENT, ROOT
from examples.children import ending_children

ELEMENTS = 4 << 20
PEERS = 4
LIMIT = 60.0
"""Timeout of each phase in seconds."""

ROWS = {
    "usual_round": "usual round of four, s",
    "recovered": "from SIGKILL of one until all others have finished a round, s",
    "newcomer_from_start": "from the start of a newcomer's process to its first average, s",
    "newcomer_from_up": "from its being up, s",
}
"""The measured quantities: median, minimum and maximum, and the number of kills if not all."""


def say(**fields: Any) -> None:
    print(json.dumps({"time": time.time(), **fields}), flush=True)


async def averaging_worker(join: str, group_wait: float) -> None:
    import torch

    from averaging.peer.peer import Peer

    torch.set_num_threads(1)
    async with Peer(
        [torch.randn(ELEMENTS)],
        run_id="recovery",
        join=[join] if join else [],
        group_size=PEERS,
        group_wait=group_wait,
    ) as peer:
        say(event="up", address=peer.endpoint)
        while True:
            began = time.time()
            receipt = await peer.average()
            say(
                event="round",
                began=began,
                averaged=receipt.averaged,
                members=len(receipt.members),
                outcome=str(receipt),
            )


def hivemind_worker(join: str, group_wait: float) -> None:
    import torch

    # not installed where types are checked, so everything is Any
    hivemind = importlib.import_module("hivemind")
    torch.set_num_threads(1)
    dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=[join] if join else [], start=True)
    averager: Any = hivemind.averaging.DecentralizedAverager(
        [torch.randn(ELEMENTS)],
        dht,
        prefix="recovery",
        target_group_size=PEERS,
        min_group_size=2,
        min_group_wait=group_wait,
        start=True,
    )
    say(event="up", address=str(dht.get_visible_maddrs()[0]))
    while True:
        began, members, outcome = time.time(), None, ""
        try:
            members = averager.step(timeout=LIMIT)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        say(event="round", began=began, averaged=bool(members), members=len(members or ()), outcome=outcome)


class EndedError(Exception):
    """A peer's process has ended unexpectedly. The message is the last line that it wrote."""


class Process:
    """A peer process, and the events that it has reported."""

    def __init__(self, system: str, python: str, join: str, group_wait: float) -> None:
        self.started = time.time()
        self.events: list[dict[str, Any]] = []
        self.changed = asyncio.Event()
        self._ended = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `kill` closes it
        arguments = ["--worker", system, "--join", join, "--group-wait", str(group_wait)]
        self._command = [python, "-m", "benchmarks.recovery", *arguments]
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, Any]:
        """Waits until it is up; returns that event."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._reading = asyncio.create_task(self._read(self._process.stdout))
        return await self.first(lambda event: event["event"] == "up")

    async def _read(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            with suppress(json.JSONDecodeError):
                self.events.append(json.loads(line))
                self.changed.set()
        self._ended = True
        self.changed.set()

    async def first(self, wanted: Any) -> dict[str, Any]:
        """Returns the first matching event, past or future.

        Raises:
            TimeoutError: none came in time.
            EndedError: the process has ended.
        """
        place = 0
        async with asyncio.timeout(LIMIT):
            while True:
                for event in self.events[place:]:
                    if wanted(event):
                        return event
                if self._ended and not self._errors.closed:
                    self._errors.seek(0)
                    lines = self._errors.read().decode(errors="replace").split("\n")
                    raise EndedError(next((line for line in reversed(lines) if line.strip()), "it wrote nothing"))
                place = len(self.events)
                self.changed.clear()
                await self.changed.wait()

    async def kill(self) -> None:
        self._errors.close()
        if self._process is None or self._reading is None:  # Ctrl+C came before the process was started
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._reading.cancel()


class Run:
    """The living peers of one system."""

    def __init__(self, system: str, python: str, group_wait: float) -> None:
        self._with = (system, python, group_wait)
        self.peers: list[Process] = []
        self._first = ""

    async def add(self) -> tuple[Process, dict[str, Any]]:
        """Starts another peer; returns its first event."""
        system, python, group_wait = self._with
        self.peers.append(Process(system, python, self._first, group_wait))
        up = await self.peers[-1].start()
        self._first = self._first or up["address"]
        return self.peers[-1], up

    async def averaged(self, since: float | None = None) -> float:
        """Returns the seconds from `since`, or now, until each peer has finished a round; raises TimeoutError."""
        began = time.time() if since is None else since
        ends = await asyncio.gather(*(peer.first(_averaged(began)) for peer in self.peers))
        return float(max(event["time"] for event in ends)) - began

    async def end(self) -> None:
        """Kills all peers."""
        await asyncio.gather(*(peer.kill() for peer in self.peers))
        self.peers.clear()
        self._first = ""


def _averaged(since: float) -> Any:
    return lambda event: event["event"] == "round" and event["averaged"] and event["time"] > since


async def measure(system: str, python: str, kills: int, group_wait: float, seed: int) -> dict[str, Any]:
    """Kills and starts peers alternately. After a failure it starts four new ones."""
    rng = random.Random(seed)
    run = Run(system, python, group_wait)
    done: dict[str, list[Any]] = {name: [] for name in ROWS} | {"failures": []}
    try:
        for number in range(1, kills + 1):
            doing = "start"
            try:
                while len(run.peers) < PEERS:
                    await run.add()
                doing = "usual rounds before the kill"
                await run.averaged()
                usual = sum([await run.averaged() for _ in range(3)]) / 3
                done["usual_round"].append(usual)
                await asyncio.sleep(rng.random() * usual)
                victim = run.peers.pop(rng.randrange(1, PEERS))  # not the first one, which newcomers join
                doing = "next round of all others"
                killed = time.time()
                await victim.kill()
                done["recovered"].append(await run.averaged(killed))
                doing = "first average of the newcomer"
                newcomer, up = await run.add()
                first = await newcomer.first(_averaged(0.0))
                done["newcomer_from_start"].append(first["time"] - newcomer.started)
                done["newcomer_from_up"].append(first["time"] - up["time"])
            except TimeoutError:
                done["failures"].append(f"kill {number}: no {doing} within {LIMIT:g} s")
                await run.end()
            except EndedError as error:
                done["failures"].append(f"kill {number}: no {doing}, because a process ended: {error}")
                await run.end()
            figures = {name: [round(value, 2) for value in done[name]] for name in ROWS}
            print(f"  {system}, after kill {number} of {kills}: {figures}", file=sys.stderr, flush=True)
    finally:
        await run.end()
    return done


def table(systems: Mapping[str, Mapping[str, Sequence[Any]]], kills: int) -> str:
    """Returns the results in Markdown: a row per quantity, a column per system."""
    lines = ["| | " + " | ".join(systems) + " |", "|---|" + "---|" * len(systems)]
    for name, quantity in ROWS.items():
        cells = []
        for done in systems.values():
            values = sorted(done[name])
            cell = f"{statistics.median(values):.2f} ({values[0]:.2f} … {values[-1]:.2f})" if values else "never"
            cells.append(cell + (f", {len(values)} of {kills}" if len(values) < kills else ""))
        lines.append(f"| {quantity} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each system (10)")
    parser.add_argument("--group-wait", type=float, default=1.0, help="seconds, of both systems (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims (0)")
    parser.add_argument("--hivemind", metavar="PYTHON", help="interpreter of an environment with hivemind")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks"), help="folder of the results (runs/benchmarks)"
    )
    parser.add_argument("--worker", choices=["averaging", "hivemind"], help=argparse.SUPPRESS)
    parser.add_argument("--join", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kills < 1 or not 0 < options.group_wait < math.inf:
        parser.error("there must be at least 1 kill, and --group-wait above 0")
    if options.hivemind and not shutil.which(options.hivemind):
        parser.error(f"--hivemind {options.hivemind}: there is no such program")
    if options.worker == "averaging":
        asyncio.run(averaging_worker(options.join, options.group_wait))
    elif options.worker == "hivemind":
        hivemind_worker(options.join, options.group_wait)
    else:
        make_folder(parser, options.output)
        compare(options)


@ending_children()
def compare(options: argparse.Namespace) -> None:
    from benchmarks.allreduce.report import machine

    pythons = {"averaging": sys.executable} | ({"hivemind": options.hivemind} if options.hivemind else {})
    results = machine(ROOT) | {"group_wait": options.group_wait, "systems": {}}
    for system, python in pythons.items():
        done = asyncio.run(measure(system, python, options.kills, options.group_wait, options.seed))
        results["systems"][system] = done
        for failure in done["failures"]:
            print(f"{system}: {failure}", flush=True)
    print(table(results["systems"], options.kills), flush=True)
    write(options.output / "recovery.json", results)
    sys.exit(1 if results["systems"]["averaging"]["failures"] else 0)


if __name__ == "__main__":
    main()
