"""Measures the interruption after one of four peers is killed, and how soon a newcomer takes part.

Four processes average 16 MiB repeatedly. One of them is killed (SIGKILL) at a random moment, and the time until each of
the others has finished its next round is measured. Then a new one is started, and the time until its first average is
measured, from the start of its process and from the moment at which it was up.
Peers declare themselves for `--group-wait` seconds: a leader waits that long for a fourth member that no longer exists.

With `--hivemind PYTHON` (see `benchmarks.allreduce --help`) the same is done with hivemind 1.1.12. If the peers have
not recovered after a minute, the next kill uses four new ones. The results go to `recovery.json`; the exit code is 1 if
this library did not recover.
"""

import asyncio
import math
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from benchmarks.allreduce.rounds import MODULE
from benchmarks.runner import machine, make_folder, make_parser, markdown, spread, write
from benchmarks.workers import Crew, Worker, WorkerError, crew, say
from examples.children import ending_children

KIB = 16 << 10
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


class AveragingPeer:
    """A peer that averages all the time."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.address = worker, worker.started["address"]
        self._last = 0.0
        self._averaged = asyncio.Event()
        self._task = asyncio.create_task(self._average())

    async def _average(self) -> None:
        try:
            while True:
                answer = await self.worker.do("average")
                if not answer["failure"]:
                    self._last = answer["ended"]
                    self._averaged.set()
        finally:
            self._averaged.set()  # `after` sees that this has ended

    async def after(self, since: float) -> float:
        """Waits for the first average that ends after this time; returns when that was."""
        while self._last <= since:
            self._averaged.clear()
            await self._averaged.wait()
            if self._task.done():
                self._task.result()
        return self._last

    async def kill(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError, WorkerError):
            await self._task
        await self.worker.kill()


class Run:
    """The living peers of one system."""

    def __init__(self, processes: Crew, command: Sequence[object]) -> None:
        self._processes, self._command = processes, command
        self.peers: list[AveragingPeer] = []

    async def add(self) -> AveragingPeer:
        """Starts another peer."""
        join = self.peers[0].address if self.peers else ""
        worker = await self._processes.start(*self._command, "--rank", len(self.peers), "--join", join)
        await worker.do("fill")
        self.peers.append(AveragingPeer(worker))
        return self.peers[-1]

    async def all_after(self, since: float) -> float:
        """Returns the seconds until each peer has finished a round."""
        async with asyncio.timeout(LIMIT):
            return max(await asyncio.gather(*(peer.after(since) for peer in self.peers))) - since

    async def end(self) -> None:
        for peer in self.peers:
            await peer.kill()
        self.peers.clear()


async def one_kill(run: Run, rng: random.Random, done: Mapping[str, list[Any]]) -> None:
    """Kills a peer and starts another one."""
    while len(run.peers) < PEERS:
        await run.add()
    await run.all_after(time.time())
    usual = sum([await run.all_after(time.time()) for _ in range(3)]) / 3
    done["usual_round"].append(usual)
    await asyncio.sleep(rng.random() * usual)
    victim = run.peers.pop(rng.randrange(1, PEERS))  # not the first one, which newcomers join
    killed = time.time()
    await victim.kill()
    done["recovered"].append(await run.all_after(killed))
    started = time.time()
    newcomer = await run.add()
    up = time.time()
    async with asyncio.timeout(LIMIT):
        first = await newcomer.after(0.0)
    done["newcomer_from_start"].append(first - started)
    done["newcomer_from_up"].append(first - up)


async def measure(system: str, python: str, kills: int, group_wait: float, seed: int) -> dict[str, Any]:
    """Kills and starts peers alternately. After a failure it starts four new ones."""
    rng = random.Random(seed)
    done: dict[str, list[Any]] = {name: [] for name in ROWS} | {"failures": []}
    command = [python, "-m", MODULE, system, "--peers", PEERS, "--kib", KIB, "--tensors", 1]
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(crew())
        run = Run(processes, [*command, "--least", 2, "--group-wait", group_wait])
        stack.push_async_callback(run.end)
        for number in range(1, kills + 1):
            try:
                await one_kill(run, rng, done)
            except (TimeoutError, WorkerError) as error:
                done["failures"].append(f"kill {number}: {str(error) or f'a phase took more than {LIMIT:g} s'}")
                await run.end()
            figures = {name: [round(value, 2) for value in done[name]] for name in ROWS}
            say(f"  {system}, after kill {number} of {kills}: {figures}")
    return done


def table(systems: Mapping[str, Mapping[str, Sequence[Any]]], kills: int) -> str:
    """A row per quantity, a column per system."""

    def cell(values: Sequence[float]) -> str:
        partly = f", {len(values)} of {kills}" if len(values) < kills else ""
        return spread(values, 2) + partly if values else "never"

    rows = [[quantity, *(cell(done[name]) for done in systems.values())] for name, quantity in ROWS.items()]
    return markdown(["", *systems], rows)


@ending_children()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=10, help="of each system (10)")
    parser.add_argument("--group-wait", type=float, default=1.0, help="seconds, of both systems (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims (0)")
    parser.add_argument("--hivemind", metavar="PYTHON", help="interpreter of an environment with hivemind")
    options = parser.parse_args()
    if options.kills < 1 or not 0 < options.group_wait < math.inf:
        parser.error("there must be at least 1 kill, and --group-wait above 0")
    if options.hivemind and not shutil.which(options.hivemind):
        parser.error(f"--hivemind {options.hivemind}: there is no such program")
    make_folder(parser, options.output)
    pythons = {"averaging": sys.executable} | ({"hivemind": options.hivemind} if options.hivemind else {})
    results = machine() | {"group_wait": options.group_wait, "systems": {}}
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
