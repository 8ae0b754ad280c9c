"""Measures what unequal machines cost: the share of its time that a fast peer trains, and whose samples count.

Processes train a small classifier of handwritten digits. A step takes the time that a machine would need: two fast
peers, one that needs ten times as long, one that pauses for 30 s, and one whose process is killed after a minute and
started again a minute later. The strategy is DiLoCo with a delay. Each row is a run:

    alone       one fast peer without others: what the machine's own load and the library cost (the calibration)
    equal       as many fast peers as the others have, whose averages have as many samples
    today       unequal peers that wait for each other, as without `quorum`
    quorum      unequal peers with `quorum=2`

    share       seconds in which a fast peer computes, of all its seconds; and the same divided by that of `alone`
    waiting     seconds in which it stands still in the averager, of all its seconds, less those of `alone`
    samples     local steps in the averages (by the receipts), of all local steps that were made; those of a killed
                process since its last round, which are gone with it, are counted apart

The defaults take about 10 minutes; the targets are printed beside the figures, and all goes to `unequal.json`. The exit
code is 1 if a peer failed or its samples are not in the averages. `--scale 20 --seconds 20` is a quick look, with
pauses and absences of seconds.
"""

import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from averaging import DecentralizedAverager, DiLoCo, Receipt
from benchmarks.runner import Verdict, machine, make_folder, make_parser, write
from benchmarks.workers import say, without_interrupts
from examples.children import ending_children
from examples.digits import Digits

BATCH = 16
PAUSE, FIRST, EVERY = 30.0, 75.0, 300.0
"""Seconds of a pause, from the start to the first one, and from the end of one to the next."""

STAYS, AWAY = 60.0, 60.0
"""Seconds for which a process trains until it is killed, and until it is started again."""

LEAST_SHARE, MOST_WAITING = 0.97, 0.03
"""The targets: a fast peer's time beside that of one alone, and its waiting."""

PATIENCE = 120.0
"""Seconds within which all peers must meet and finish."""

OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)


@dataclass(frozen=True, slots=True)
class Machine:
    """How one peer trains: seconds of a step, of each `pause` and between two, and of its life (0 for ever).

    A machine of `speed` makes so many steps in the time in which a fast one makes one.
    """

    kind: str
    step: float
    speed: float = 1.0
    pause: float = 0.0
    first: float = 0.0
    every: float = 0.0
    stays: float = 0.0
    away: float = 0.0


@dataclass(slots=True)
class Trained:
    """What a peer has done.

    Attributes:
        steps: local steps.
        computing: seconds in which it computed.
        waiting: seconds in which it stood still in the averager.
        seconds: seconds from its first step to its last one, without pauses.
        rounds: local steps of each member in each average, by the id of the group.
        ages: of contributions that came late, in rounds.
        killed: whether its process was killed.
        failed: why it ended early; empty if it did not.
    """

    kind: str
    endpoint: str = ""
    steps: int = 0
    computing: float = 0.0
    waiting: float = 0.0
    seconds: float = 0.0
    rounds: dict[str, dict[str, int]] = field(default_factory=dict)
    ages: list[int] = field(default_factory=list)
    killed: bool = False
    failed: str = ""


class Trainer:
    """Trains one peer in this process."""

    def __init__(self, machine: Machine, quorum: int, sync_every: int, seed: int) -> None:
        torch.set_num_threads(1)
        self._machine, self._quorum, self._sync_every = machine, quorum or None, sync_every
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
            strategy=DiLoCo(self._sync_every, outer=OUTER, delay=max(1, self._sync_every // 4), quorum=self._quorum),
            join=[join] if join else [],
            group_wait=5.0,
            weight="samples",
            on_round=self._note,
        )

    def _note(self, receipt: Receipt) -> None:
        if receipt.averaged:
            users = receipt.gathered.items()
            steps = {
                name: int(user["steps"] if "steps" in user else user["samples"] // BATCH)
                for name, user in users
                if isinstance(user, dict) and ("steps" in user or "samples" in user)
            }
            self.done.rounds[receipt.group_id.hex()] = steps
            self.done.ages += [account.age for account in receipt.accounts if account.age is not None]

    def train(self, seconds: float, tell: Callable[[Trained], None]) -> None:
        """Trains for so many seconds, pauses included; tells every second what it has done, since it may be killed."""
        began = segment = told = time.perf_counter()
        pauses = began + self._machine.first
        while (now := time.perf_counter()) < began + seconds:
            if self._machine.pause and now >= pauses:
                self.done.seconds += now - segment
                time.sleep(self._machine.pause)
                segment = time.perf_counter()
                pauses = segment + self._machine.every
            self._step()
            if self._machine.stays and now - told >= 1.0:
                tell(self.done)
                told = now
        self.done.seconds += time.perf_counter() - segment

    def _step(self) -> None:
        began = time.perf_counter()
        places = torch.randint(len(self._digits.images), (BATCH,), generator=self._rng)
        self.averager.zero_grad()
        loss = torch.nn.functional.cross_entropy(self._model(self._digits.images[places]), self._digits.labels[places])
        loss.backward()  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, self._machine.step - (time.perf_counter() - began)))
        computed = time.perf_counter()
        self.done.computing += computed - began
        self.averager.step(batch_size=BATCH)
        self.done.steps += 1
        self.done.waiting += time.perf_counter() - computed

    def finish(self) -> Trained:
        """Ends the training together with the others."""
        finish = self.averager.finish(PATIENCE / 2)
        if finish.receipt is not None:
            self._note(finish.receipt)
        self.averager.close()
        return self.done


def worker(pipe: Connection, join: str, machine: Machine, quorum: int, sync_every: int, seed: int) -> None:
    """A peer's process: starts, waits for the word, trains, finishes."""
    trainer = Trainer(machine, quorum, sync_every, seed)
    try:
        trainer.start(join)
        trainer.done.endpoint = trainer.averager.endpoint
        pipe.send(trainer.averager.endpoint)
        peers, seconds = pipe.recv()
        trainer.averager.wait_for_peers(peers, PATIENCE)
        pipe.send("ready")
        pipe.recv()
        trainer.train(seconds, lambda done: pipe.send(asdict(done)))
        trainer.finish()
    except Exception as error:
        trainer.done.failed = f"{type(error).__name__}: {error}"
    pipe.send(asdict(trainer.done) | {"ended": True})


class Row:
    """The processes of one row, which train for so many seconds."""

    def __init__(self, machines: Sequence[Machine], quorum: int, sync_every: int, seconds: float) -> None:
        self._machines, self._seconds = machines, seconds
        self._options = quorum, sync_every
        self._spawn = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._lock = threading.Lock()
        self._first = ""  # endpoint of the peer through which the others join
        self._lives: list[dict[str, Any]] = []  # what killed processes had done
        self._began = 0.0

    def measure(self) -> list[dict[str, Any]]:
        """Runs the row; what each process has done."""
        try:
            started = [self._start(self._machines[0])]
            self._first = self._endpoint(started[0][1])
            started += [self._start(machine) for machine in self._machines[1:]]
            for _, pipe in started[1:]:
                self._endpoint(pipe)
            for _, pipe in started:
                pipe.send((len(self._machines), self._seconds))
            if any(pipe.recv() != "ready" for _, pipe in started):
                return [{"kind": "", "failed": "a peer did not start"}]
            for _, pipe in started:
                pipe.send("go")
            self._began = time.perf_counter()
            threads = []
            for machine, (process, pipe) in zip(self._machines, started, strict=True):
                if machine.stays:
                    threads.append(threading.Thread(target=self._come_and_go, args=(machine, process, pipe)))
                    threads[-1].start()
            ends = [
                self._end(pipe) for machine, (_, pipe) in zip(self._machines, started, strict=True) if not machine.stays
            ]
            for thread in threads:
                thread.join()
            return [*ends, *self._lives]
        finally:
            for process in self._processes:
                process.join(5)
                process.kill()

    def _start(self, machine: Machine) -> tuple[BaseProcess, Connection]:
        """Starts a process."""
        pipe, theirs = self._spawn.Pipe()
        with self._lock:
            arguments = (theirs, self._first, machine, *self._options, len(self._processes))
            process = self._spawn.Process(target=worker, args=arguments, daemon=True)
            self._processes.append(process)
            # Only the main thread may do so; the others start processes while nobody interrupts.
            with without_interrupts() if threading.current_thread() is threading.main_thread() else nullcontext():
                process.start()
        theirs.close()
        return process, pipe

    def _endpoint(self, pipe: Connection) -> str:
        """Waits until a process has its part in the run; returns its endpoint. Raises RuntimeError if it has failed."""
        answer = pipe.recv()
        if not isinstance(answer, str):
            raise RuntimeError(f"{answer['kind']}: {answer['failed']}")
        return answer

    def _come_and_go(self, machine: Machine, process: BaseProcess, pipe: Connection) -> None:
        """Kills a process after a while, and starts another one after a while, until the row ends."""
        while self._left > machine.stays:
            done = self._last(pipe, machine.stays)
            process.kill()
            process.join()
            self._lives.append(done | {"killed": True})
            time.sleep(min(machine.away, max(0.0, self._left)))
            if self._left < machine.stays / 2:
                return
            process, pipe = self._start(machine)
            self._endpoint(pipe)
            pipe.send((2, self._left))
            pipe.recv()
            pipe.send("go")
        self._lives.append(self._end(pipe))

    @property
    def _left(self) -> float:
        return self._seconds - (time.perf_counter() - self._began)

    @staticmethod
    def _last(pipe: Connection, seconds: float) -> dict[str, Any]:
        """What a process tells last within so many seconds."""
        until = time.perf_counter() + seconds
        done = asdict(Trained(""))
        while (left := until - time.perf_counter()) > 0:
            if wait([pipe], left):
                done = pipe.recv()
        return done

    @staticmethod
    def _end(pipe: Connection) -> dict[str, Any]:
        while "ended" not in (done := pipe.recv()):
            continue
        return dict(done)


def measure(machines: Sequence[Machine], quorum: int, sync_every: int, seconds: float) -> list[dict[str, Any]]:
    """Runs one row; what each process has done."""
    try:
        return Row(machines, quorum, sync_every, seconds).measure()
    except (RuntimeError, EOFError) as error:
        return [{"kind": "", "failed": str(error) or "a process has ended without a word"}]


def summary(done: Sequence[dict[str, Any]], alone: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one row, from what each process has done; `alone` are those of a fast peer alone, if known."""
    if failed := [peer for peer in done if peer["failed"]]:
        return {"failed": "; ".join(f"{peer['kind']}: {peer['failed']}" for peer in failed)}
    fast = [peer for peer in done if peer["kind"] == "fast"]
    share = statistics.mean(peer["computing"] / peer["seconds"] for peer in fast)
    waiting = statistics.mean(peer["waiting"] / peer["seconds"] for peer in fast)
    rounds: dict[str, dict[str, int]] = {}
    for peer in done:
        rounds |= peer["rounds"]
    averaged: dict[str, int] = {}
    for steps in rounds.values():
        for name, count in steps.items():
            averaged[name] = averaged.get(name, 0) + count
    names = {
        f"{number} {peer['kind']}" + (" (killed)" if peer["killed"] else ""): peer for number, peer in enumerate(done)
    }
    survivors = [peer for peer in done if not peer["killed"]]
    return {
        "failed": "",
        "share": share,
        "share_of_alone": share / alone.get("share", share),
        "waiting": waiting,
        "waiting_beyond_alone": waiting - alone.get("waiting", waiting),
        "steps": {name: peer["steps"] for name, peer in names.items()},
        "averaged": {name: averaged.get(peer["endpoint"], 0) for name, peer in names.items()},
        "steps_made": sum(peer["steps"] for peer in survivors),
        "steps_averaged": sum(averaged.get(peer["endpoint"], 0) for peer in survivors) if rounds else None,
        "steps_lost_by_kills": sum(
            max(0, peer["steps"] - averaged.get(peer["endpoint"], 0)) for peer in done if peer["killed"]
        ),
        "rounds": len(rounds),
        "latest": max((max(peer["ages"], default=0) for peer in done), default=0),
    }


def row(name: str, figures: dict[str, Any]) -> str:
    """One row of the table."""
    if figures["failed"]:
        return f"| {name} | failed: {figures['failed']} |"
    averaged = figures["steps_averaged"]
    cells = (
        name,
        f"{figures['share']:.1%}",
        f"{figures['share_of_alone']:.1%}",
        f"{figures['waiting_beyond_alone']:+.1%}",
        f"{figures['steps_made']}" if averaged is None else f"{averaged} of {figures['steps_made']}",
        f"{figures['steps_lost_by_kills']}",
        f"{figures['rounds']}",
        f"{figures['latest']}",
    )
    return f"| {' | '.join(cells)} |"


def targets(figures: Mapping[str, Any]) -> list[Verdict]:
    """The targets of the row with a quorum."""
    made, averaged = figures["steps_made"], figures["steps_averaged"]
    return [
        Verdict(
            f"fast peers train at least {LEAST_SHARE:.0%} of the time that one alone does",
            f"{figures['share_of_alone']:.1%}",
            figures["share_of_alone"] >= LEAST_SHARE,
        ),
        Verdict(
            f"they wait at most {MOST_WAITING:.0%} of the time more than one alone",
            f"{figures['waiting_beyond_alone']:.1%}",
            figures["waiting_beyond_alone"] <= MOST_WAITING,
        ),
        Verdict(
            "all samples of peers that live are in the averages",
            f"{averaged} of {made} steps; {figures['steps_lost_by_kills']} gone with killed processes",
            averaged == made,
        ),
    ]


HEADER = (
    "| | share of a fast peer | of that alone | waiting, beyond alone | steps in averages | gone with kills | rounds | "
    "latest, rounds |\n|---|---|---|---|---|---|---|---|"
)


@ending_children()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--step", type=float, default=0.01, help="seconds of a step of a fast peer (0.01)")
    parser.add_argument("--slower", type=float, default=10.0, help="how many times as long the slow one needs (10)")
    parser.add_argument("--sync-every", type=int, default=200, help="steps between two rounds (200)")
    parser.add_argument("--seconds", type=float, default=150.0, help="of training in each row but `alone` (150)")
    parser.add_argument("--scale", type=float, default=1.0, help="by which pauses and absences are shortened (1)")
    options = parser.parse_args()
    if min(options.step, options.seconds, options.scale) <= 0 or options.slower < 1 or options.sync_every < 4:
        parser.error("times and --scale must be above 0, --slower at least 1, and --sync-every at least 4")
    make_folder(parser, options.output)
    fast = Machine("fast", options.step)
    pause, first, every, stays, away = (seconds / options.scale for seconds in (PAUSE, FIRST, EVERY, STAYS, AWAY))
    unequal = [
        fast,
        fast,
        Machine("slow", options.step * options.slower, 1 / options.slower),
        Machine("pauses", options.step, 1.0, pause, first, every),
        Machine("killed and restarted", options.step, stays=stays, away=away),
    ]
    results: dict[str, Any] = machine() | {"options": {**vars(options), "output": ""}, "rows": {}}
    rows = results["rows"]
    # With as many samples in an average as the unequal peers have, so with as many outer steps for as many samples.
    per_average = options.sync_every * sum(work(each, options.seconds) for each in unequal)
    alike = max(4, round(per_average / len(unequal)))
    print(HEADER, flush=True)
    for name, machines, quorum, sync_every, seconds in (
        ("alone", [fast], 0, options.sync_every, min(60.0, options.seconds)),
        ("equal", [fast] * len(unequal), len(unequal), alike, options.seconds),
        ("today", unequal, 0, options.sync_every, options.seconds),
        ("quorum", unequal, 2, options.sync_every, options.seconds),
    ):
        say(f"  {name}: {seconds:g} s")
        done = measure(machines, quorum, sync_every, seconds)
        rows[name] = summary(done, rows.get("alone", {}))
        print(row(name, rows[name]), flush=True)
        write(options.output / "unequal.json", results)
    failed = [f"{name}: {figures['failed']}" for name, figures in rows.items() if figures["failed"]]
    if failed:
        sys.exit("\n".join(failed))
    verdicts = targets(rows["quorum"])
    print(*verdicts, sep="\n")
    sys.exit(0 if rows["quorum"]["steps_averaged"] == rows["quorum"]["steps_made"] else 1)


def work(machine: Machine, seconds: float) -> float:
    """The steps of a machine in a row, of those of a fast one."""
    if machine.pause:
        pauses = 0 if seconds < machine.first else 1 + int((seconds - machine.first) / (machine.pause + machine.every))
        return max(0.0, 1 - pauses * machine.pause / seconds)
    return machine.stays / (machine.stays + machine.away) if machine.stays else machine.speed


if __name__ == "__main__":
    main()
