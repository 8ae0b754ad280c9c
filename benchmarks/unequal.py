"""Measures what unequal machines cost: the share of its time that a fast peer trains, and whose samples count.

Processes train a small classifier of handwritten digits. A step takes the time that a machine would need: two fast
peers, one that needs ten times as long, one that pauses for 30 s in every 5 minutes, and one that trains for a minute,
leaves, and comes back. All times are divided by `--scale`. Each row is one strategy:

    alone       one fast peer without others: what the machine's own load and the library cost (the calibration)
    equal       as many fast peers as the others have (the loss to compare with)
    today       unequal peers that wait for each other, as without `quorum`
    quorum      unequal peers with `quorum=2`

    share       seconds in which a fast peer computes, of all its seconds; and the same divided by that of `alone`
    samples     local steps in the averages (by the receipts), of all local steps that were made
    loss        of the final model on held-out digits, and that of `equal` after as many samples

The exit code is 1 if a peer failed or its samples are not in the averages. The results go to `unequal.json`.

With `--loss` the real strategies train on virtual time instead, which needs the packages of the tests. The rows say by
how much the loss is above that of as many equal machines, and above that of the two fast ones without the others, each
after as many samples in averages (`unequal_loss.json`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from averaging import DecentralizedAverager, DiLoCo, LocalSGD, Receipt, Strategy
from benchmarks.allreduce.report import machine
from benchmarks.output import make_folder, write
from benchmarks.workers import without_interrupts
from examples.children import ending_children
from examples.digits import Digits

ROOT = Path(__file__).parent.parent

BATCH = 16
PAUSE, EVERY = 30.0, 300.0
"""Seconds of a pause, and from the end of one pause to the next."""

STAYS, AWAY = 60.0, 60.0
"""Seconds for which the peer that comes and goes trains, and is away."""

PATIENCE = 120.0
"""Seconds within which all peers must meet and finish."""

OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)

STRATEGIES: dict[str, Callable[[int, bool], Strategy]] = {
    "LocalSGD": lambda steps, quorum: LocalSGD(steps, **_quorum(quorum)),
    "LocalSGD overlap": lambda steps, quorum: LocalSGD(steps, overlap=True, **_quorum(quorum)),
    "DiLoCo": lambda steps, quorum: DiLoCo(steps, outer=OUTER, **_quorum(quorum)),
    "DiLoCo delay": lambda steps, quorum: DiLoCo(steps, outer=OUTER, delay=max(1, steps // 4), **_quorum(quorum)),
}


def _quorum(used: bool) -> dict[str, Any]:
    return {"quorum": 2} if used else {}


@dataclass(frozen=True, slots=True)
class Machine:
    """How one peer trains.

    Attributes:
        step: seconds of a step.
        pause: seconds of each pause; 0 for none.
        every: seconds between two pauses.
        stays: seconds for which it trains until it leaves; 0 for ever.
        away: seconds until it comes back.
    """

    kind: str
    step: float
    pause: float = 0.0
    every: float = 0.0
    stays: float = 0.0
    away: float = 0.0


@dataclass(slots=True)
class Trained:
    """What a peer has done.

    Attributes:
        steps: local steps.
        computing: seconds in which it computed.
        seconds: seconds from its first step to its last one, without pauses and absence.
        rounds: local steps of each member in each average, by the id of the group.
        loss: of the final model on held-out digits.
        failed: why it ended early; empty if it did not.
    """

    kind: str
    endpoint: str = ""
    steps: int = 0
    computing: float = 0.0
    seconds: float = 0.0
    rounds: dict[str, dict[str, int]] = field(default_factory=dict)
    ages: list[int] = field(default_factory=list)
    loss: float = 0.0
    failed: str = ""


class Trainer:
    """Trains one peer in this process."""

    def __init__(self, machine: Machine, strategy: str, quorum: bool, sync_every: int, seed: int) -> None:
        torch.set_num_threads(1)
        self._machine, self._strategy, self._quorum, self._sync_every = machine, strategy, quorum, sync_every
        self._digits = Digits.load()
        self._rng = torch.Generator().manual_seed(seed)
        self.done = Trained(machine.kind)

    def start(self, join: str) -> None:
        """Enters the run."""
        torch.manual_seed(0)
        self._model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
        )
        self.averager = DecentralizedAverager(
            torch.optim.SGD(self._model.parameters(), lr=0.05, momentum=0.9),
            model=self._model,
            run_id="unequal",
            strategy=STRATEGIES[self._strategy](self._sync_every, self._quorum),
            join=[join] if join else [],
            group_wait=5.0,
            on_round=self._note,
        )

    def _note(self, receipt: Receipt) -> None:
        if receipt.averaged:
            users = receipt.gathered.items()
            steps = {name: int(user["steps"]) for name, user in users if isinstance(user, dict) and "steps" in user}
            self.done.rounds[receipt.group_id.hex()] = steps
            self.done.ages += [account.age for account in receipt.accounts if account.age is not None]

    def train(self, seconds: float, join: str) -> None:
        """Trains for so many seconds, pauses and absence included."""
        began = segment = time.perf_counter()
        end = began + seconds
        resumed = came = began
        while (now := time.perf_counter()) < end:
            if self._machine.stays and now - came >= self._machine.stays:
                self.done.seconds += now - segment
                self.averager.finish(1.0)
                self.averager.close()
                time.sleep(min(self._machine.away, max(0.0, end - time.perf_counter())))
                self.start(join)
                segment = came = time.perf_counter()
            elif self._machine.pause and now - resumed >= self._machine.every:
                self.done.seconds += now - segment
                time.sleep(self._machine.pause)
                segment = resumed = time.perf_counter()
            else:
                self._step()
        self.done.seconds += time.perf_counter() - segment

    def _step(self) -> None:
        began = time.perf_counter()
        places = torch.randint(len(self._digits.images), (BATCH,), generator=self._rng)
        self.averager.zero_grad()
        loss = torch.nn.functional.cross_entropy(self._model(self._digits.images[places]), self._digits.labels[places])
        loss.backward()  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, self._machine.step - (time.perf_counter() - began)))
        self.done.computing += time.perf_counter() - began
        self.averager.step()
        self.done.steps += 1

    def finish(self) -> Trained:
        """Ends the training together with the others."""
        finish = self.averager.finish(PATIENCE / 2)
        if finish.receipt is not None:
            self._note(finish.receipt)
        with torch.no_grad():
            scores = self._model(self._digits.held_out_images)
        self.done.loss = float(torch.nn.functional.cross_entropy(scores, self._digits.held_out_labels))
        self.averager.close()
        return self.done


def worker(
    pipe: Connection, join: str, machine: Machine, strategy: str, quorum: bool, sync_every: int, seed: int
) -> None:
    """A peer's process: starts, waits for the word, trains, finishes."""
    trainer = Trainer(machine, strategy, quorum, sync_every, seed)
    try:
        trainer.start(join)
        pipe.send(trainer.averager.endpoint)
        peers, seconds = pipe.recv()
        trainer.averager.wait_for_peers(peers, PATIENCE)
        pipe.send("ready")
        pipe.recv()
        trainer.train(seconds, join or trainer.averager.endpoint)
        trainer.finish()
    except Exception as error:
        trainer.done.failed = f"{type(error).__name__}: {error}"
    pipe.send(asdict(trainer.done))


def measure(
    machines: Sequence[Machine], strategy: str, quorum: bool, sync_every: int, seconds: float
) -> list[dict[str, Any]]:
    """Runs one row; what each peer has done."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    join = ""
    try:
        for number, machine_ in enumerate(machines):
            pipe, theirs = spawn.Pipe()
            arguments = (theirs, join, machine_, strategy, quorum, sync_every, number)
            processes.append(spawn.Process(target=worker, args=arguments, daemon=True))
            with without_interrupts():
                processes[-1].start()
            theirs.close()
            pipes.append(pipe)
            answer = pipe.recv()
            if not isinstance(answer, str):
                return [answer]
            join = join or answer
        for pipe in pipes:
            pipe.send((len(machines), seconds))
        if any(pipe.recv() != "ready" for pipe in pipes):
            return [{"kind": "", "failed": "a peer did not start"}]
        for pipe in pipes:
            pipe.send("go")
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def summary(done: Sequence[dict[str, Any]], alone: float) -> dict[str, Any]:
    """The figures of one row.

    Args:
        done: what each peer has done.
        alone: share of a fast peer that trains alone; 1 for that row itself.
    """
    if failed := [peer for peer in done if peer["failed"]]:
        return {"failed": "; ".join(f"{peer['kind']}: {peer['failed']}" for peer in failed)}
    shares = [peer["computing"] / peer["seconds"] for peer in done if peer["kind"] == "fast"]
    rounds: dict[str, dict[str, int]] = {}
    for peer in done:
        rounds |= peer["rounds"]
    averaged = sum(sum(steps.values()) for steps in rounds.values())
    stepped = sum(peer["steps"] for peer in done)
    return {
        "failed": "",
        "share": statistics.mean(shares),
        "share_of_alone": statistics.mean(shares) / alone,
        "steps": {f"{number} {peer['kind']}": peer["steps"] for number, peer in enumerate(done)},
        "steps_made": stepped,
        "steps_averaged": averaged if averaged else None,
        "rounds": len(rounds),
        "latest": max((max(peer["ages"], default=0) for peer in done), default=0),
        "loss": statistics.mean(peer["loss"] for peer in done if peer["kind"] == "fast"),
    }


def row(name: str, figures: dict[str, Any]) -> str:
    """One row of the table."""
    if figures["failed"]:
        return f"| {name} | failed: {figures['failed']} |"
    averaged = figures["steps_averaged"]
    counted = "" if averaged is None else f"{averaged} of {figures['steps_made']}"
    return (
        f"| {name} | {figures['share']:.1%} | {figures['share_of_alone']:.1%} | {counted or figures['steps_made']} | "
        f"{figures['rounds']} | {figures['latest']} | {figures['loss']:.4f} |"
    )


SIMULATED = 80.0
"""Seconds of virtual time of each run with `--loss`."""

LOSS_HEADER = (
    "| | share of a fast peer | lost samples | above as many equal machines | above the fast ones alone |\n"
    "|---|---|---|---|---|"
)


def measure_loss(seeds: Sequence[int], path: Path) -> int:
    """Measures the rows of `--loss`; the exit code."""
    from benchmarks import unequal_loss  # needs the packages of the tests

    torch.set_num_threads(1)
    rows: dict[str, Any] = {}

    def show(name: str, figures: dict[str, Any]) -> None:
        rows[name] = figures
        print(
            f"| {name} | {figures['share']:.1%} | {figures['lost']:g} | {figures['above_equal']:+.1%} | "
            f"{figures['above_fast_alone']:+.1%} |",
            flush=True,
        )
        write(path, machine(ROOT) | {"options": {"seeds": list(seeds), "seconds": SIMULATED}, "rows": rows})

    def note(progress: str) -> None:
        print(f"  {progress}", file=sys.stderr, flush=True)

    print(LOSS_HEADER, flush=True)
    unequal_loss.measure(seeds, SIMULATED, show, note)
    return int(any(figures["lost"] for name, figures in rows.items() if "quorum=" in name))


HEADER = (
    "| | share of a fast peer | of that alone | steps in averages | rounds | latest, rounds | loss |\n"
    "|---|---|---|---|---|---|---|"
)


@ending_children()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=0.01, help="seconds of a step of a fast peer (0.01)")
    parser.add_argument("--slower", type=float, default=10.0, help="how many times as long the slow one needs (10)")
    parser.add_argument("--sync-every", type=int, default=200, help="steps between two rounds (200)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of training in each row (40)")
    parser.add_argument("--scale", type=float, default=20.0, help="by which pauses and absences are shortened (20)")
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES), metavar="NAME")
    parser.add_argument(
        "--peers", choices=["slow", "all"], default="all", help="two fast ones and the slow one, or all"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks"), help="folder of the results (runs/benchmarks)"
    )
    parser.add_argument("--loss", action="store_true", help="the loss after equally many samples, simulated")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="with --loss (1 2 3)")
    options = parser.parse_args()
    if options.loss:
        make_folder(parser, options.output)
        sys.exit(measure_loss(options.seeds, options.output / "unequal_loss.json"))
    if min(options.step, options.seconds, options.scale) <= 0 or options.slower < 1 or options.sync_every < 4:
        parser.error("times and --scale must be above 0, --slower at least 1, and --sync-every at least 4")
    make_folder(parser, options.output)
    fast = Machine("fast", options.step)
    unequal = [fast, fast, Machine("slow", options.step * options.slower)]
    if options.peers == "all":
        unequal.append(Machine("pauses", options.step, PAUSE / options.scale, EVERY / options.scale))
        unequal.append(Machine("comes and goes", options.step, stays=STAYS / options.scale, away=AWAY / options.scale))
    rows: dict[str, Any] = {}
    path = options.output / "unequal.json"

    def run(name: str, machines: Sequence[Machine], strategy: str, quorum: bool, alone: float) -> dict[str, Any]:
        print(f"  {name}: {options.seconds:g} s", file=sys.stderr, flush=True)
        done = measure(machines, strategy, quorum, options.sync_every, options.seconds)
        figures = rows[name] = summary(done, alone)
        print(row(name, figures), flush=True)
        write(path, machine(ROOT) | {"options": {**vars(options), "output": ""}, "rows": rows})
        return figures

    print(HEADER, flush=True)
    for strategy in options.strategies:
        alone = run(f"{strategy}, alone", [fast], strategy, False, 1.0).get("share", 1.0)
        run(f"{strategy}, equal", [fast] * len(unequal), strategy, False, alone)
        run(f"{strategy}, today", unequal, strategy, False, alone)
        run(f"{strategy}, quorum", unequal, strategy, True, alone)
    lost = [
        name
        for name, figures in rows.items()
        if figures["failed"] or (name.endswith("quorum") and figures["steps_averaged"] != figures["steps_made"])
    ]
    if lost:
        print(f"failed, or not all samples are in the averages: {', '.join(lost)}", file=sys.stderr)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
