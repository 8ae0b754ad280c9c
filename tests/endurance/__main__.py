"""Runs everything at once under faults: `make endurance HOURS=2 SEED=1`; `make soak` runs two parts for some minutes.

    python -m tests.endurance --minutes 10 --seed 7
    python -m tests.endurance --minutes 5 --only gradients weights

Exit codes: 0 everything held; 1 a check failed, or a process ended by itself; 2 wrong usage; 3 this machine is too
slow: not everything was up within half a minute for each process; 130 stopped by Ctrl+C, 143 by SIGTERM.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

from examples.children import ending_children
from tests.endurance.actors import Actor
from tests.endurance.judge import Judge
from tests.endurance.plan import FaultKind, Strike, Target, draw
from tests.endurance.roster import PARTS, Roster
from tests.support.certificates import token_file, write

TICK_SECONDS, MEASURE_SECONDS, REPORT_SECONDS = 0.25, 5.0, 60.0
START_SECONDS, CALM_SECONDS, COOL_SECONDS = 30.0, 20.0, 60.0
"""Time for each process to be up; without faults before the first and after the last one."""

AFTERMATH_SECONDS = 90.0
"""Time after a fault in which a site may end because of it: a rank that was stopped, and its others."""

AT_ONCE = 4
"""Processes that start at the same time."""

RUNS = ("gradients", "local", "sites")
"""Parts whose peers average."""


class TooSlowError(Exception):
    """This machine is too slow for the run."""


class Endurance:
    """One run, in which faults come for so many seconds; what happens is written to `log` as lines of JSON."""

    def __init__(
        self, actors: Sequence[Actor], strikes: Sequence[Strike], seconds: float, judge: Judge, log: TextIO
    ) -> None:
        self._actors = {actor.name: actor for actor in actors}
        self._strikes, self._seconds, self._judge, self._log = strikes, seconds, judge, log
        self._began = time.monotonic()
        self._open: list[tuple[float, Strike]] = []
        self._last_fault: dict[str, float] = {}
        self._shown = 0
        self._counts: Counter[str] = Counter()
        self._measure_at = self._report_at = 0.0

    def run(self) -> None:
        """Starts everything, makes the faults, and waits until all have recovered.

        Raises:
            TooSlowError: not everything was up in time.
        """
        self._start()
        self._pass(CALM_SECONDS)
        self._began = time.monotonic()
        self._report_at = self._began + REPORT_SECONDS
        for strike in self._strikes:
            self._pass(self._began + strike.at - time.monotonic())
            self._strike(strike, time.monotonic())
        self._pass(self._began + self._seconds - time.monotonic())
        for _, strike in self._open:
            self._actors[strike.victim].heal(strike)
        self._open.clear()
        before = dict(self._judge.rounds)
        self._pass(COOL_SECONDS)
        violations = self._judge.violations
        for run in {actor.plane for actor in self._actors.values()} & set(RUNS):
            if self._judge.rounds[run] == before.get(run, 0):
                violations.append(f"no round of {run} in {COOL_SECONDS:.0f} s after the last fault")
        for actor in self._actors.values():
            if not actor.ready:
                violations.append(f"{actor.name} is not up {COOL_SECONDS:.0f} s after the last fault")
        self._judge.end()
        self._tick()
        self._report(time.monotonic())

    def _start(self) -> None:
        planes: dict[str, list[Actor]] = {}
        for actor in self._actors.values():
            planes.setdefault(actor.plane, []).append(actor)
        first = [actors[0] for actors in planes.values()]
        others = [actor for actors in planes.values() for actor in actors[1:]]
        limit = START_SECONDS * len(self._actors)
        deadline = time.monotonic() + limit
        for batch in (first, *(others[at : at + AT_ONCE] for at in range(0, len(others), AT_ONCE))):
            for actor in batch:
                actor.start(time.monotonic())
            while not all(actor.ready for actor in batch):
                self._tick()
                if time.monotonic() > deadline:
                    missing = [actor.name for actor in self._actors.values() if not actor.ready]
                    raise TooSlowError(f"{', '.join(missing)} not up within {limit:.0f} s")
            print(f"up: {', '.join(actor.name for actor in batch)}", flush=True)

    def _pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        for until, strike in [each for each in self._open if now >= each[0]]:
            self._open.remove((until, strike))
            self._actors[strike.victim].heal(strike)
            self._last_fault[strike.victim] = now
        actors = [actor for actor in self._actors.values() if actor.life]
        told = [(event.get("moment", now), actor, rank, event) for actor in actors for rank, event in actor.events()]
        for _, actor, rank, event in sorted(told, key=itemgetter(0)):  # a member's value comes before its average
            self._take(actor, rank, event, now)
        for actor in actors:
            for what, why in actor.tick(now):
                self._note_end(actor, what, why, now)
        self._judge.tick(now)
        if now >= self._measure_at:
            self._measure_at = now + MEASURE_SECONDS
            for actor in actors:
                for name, values in actor.measure():
                    self._judge.violations.extend(self._judge.growth.note(name, now - actor.started, values))
        for violation in self._judge.violations[self._shown :]:
            print(f"VIOLATION {violation}", flush=True)
            self._write(now, violation=violation)
        self._shown = len(self._judge.violations)
        if self._report_at and now >= self._report_at:
            self._report_at = now + REPORT_SECONDS
            self._report(now)
        time.sleep(max(0.0, TICK_SECONDS - (time.monotonic() - now)))

    def _take(self, actor: Actor, rank: int, event: Mapping[str, Any], now: float) -> None:
        if event.get("event") == "ready" and not actor.ready and not actor.expected:
            actor.note_ready(rank)
            if actor.ready:
                self._write(now, ready=actor.name, life=actor.life, seconds=round(now - actor.started, 1))
        if "receipt" in event and event["event"] == "round":
            receipt = event["receipt"]
            dropped = [f"{lost['endpoint']}: {lost['reason']}" for lost in receipt["dropped"]]
            if dropped or receipt["reason"]:
                self._write(now, round=actor.name, dropped=dropped, reason=receipt["reason"])
        if event["event"] == "failure":
            self._write(now, failure=actor.name, message=event["message"])
        self._judge.take(actor.plane, actor.name, rank, actor.life, actor.slot, event, now)

    def _note_end(self, actor: Actor, what: str, why: str, now: float) -> None:
        self._judge.recovery.hit(actor.plane, actor.name)
        recent = now - self._last_fault.get(actor.name, -1e9) < AFTERMATH_SECONDS or bool(actor.struck)
        if what == "failed" and actor.plane == "sites" and recent:
            what = "ended"
        if what == "failed" and not actor.was_ready and actor.failed_starts < 5:
            what = "start failed"
        self._counts[what] += 1
        self._write(now, **{what.replace(" ", "_"): why})
        if what in ("failed", "overdue"):
            self._judge.violations.append(why)

    def _strike(self, strike: Strike, now: float) -> None:
        print(strike, flush=True)
        self._write(now, strike=str(strike))
        victim = self._actors[strike.victim]
        victim.strike(strike, now)
        self._counts[strike.kind] += 1
        self._last_fault[victim.name] = now
        self._judge.recovery.hit(victim.plane, victim.name)
        calm = {
            actor.name
            for actor in self._actors.values()
            if actor.plane == victim.plane and actor.calm and actor.name not in (victim.name, "auxiliary")
        }
        if victim.plane in RUNS and len(calm) > 1 and strike.kind is not FaultKind.CLOCK:
            self._judge.recovery.strike(strike, victim.plane, calm, now)
        if strike.seconds:
            self._open.append((now + strike.seconds, strike))
        else:
            victim.heal(strike)

    def _report(self, now: float) -> None:
        summary = self._judge.summary() | {"faults": dict(self._counts)}
        print(f"{(now - self._began) / 60:.1f} min: {json.dumps(summary)}", flush=True)
        self._write(now, summary=summary)

    def _write(self, now: float, **fields: Any) -> None:
        self._log.write(json.dumps({"t": round(now - self._began, 2), **fields}) + "\n")
        self._log.flush()


def perform(given: argparse.Namespace) -> int:
    seconds = given.hours * 3600 if given.hours else given.minutes * 60
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="endurance-")))
        files = write(folder / "certificates", "127.0.0.1", "localhost") | {"token_file": token_file(folder)}
        actors = Roster(stack, folder, files, given.only).actors
        for actor in actors:
            stack.callback(actor.close)
        targets = [Target(actor.name, actor.plane, actor.kinds) for actor in actors]
        strikes = draw(given.seed, seconds, targets, given.every)
        log_file = Path(given.log or f"runs/endurance/seed-{given.seed}.jsonl")
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context(log_file.open("w"))
        print(f"seed {given.seed}, {len(strikes)} faults in {seconds / 60:g} min, log {log_file}", flush=True)
        judge = Judge()
        try:
            Endurance(actors, strikes, seconds, judge, log).run()
        except TooSlowError as error:
            print(f"this machine is too slow: {error}")
            return 3
        verdict = f"failed: {len(judge.violations)} violations" if judge.violations else "held"
        print(f"{verdict} (seed {given.seed}, log {log_file})")
        return bool(judge.violations)


def positive(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return number


@ending_children()
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.endurance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=positive, help="how long faults come")
    parser.add_argument("--minutes", type=positive, default=10.0, help="the same in minutes (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--every", type=positive, default=6.0, help="mean seconds between two faults (default: 6)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run these parts alone")
    parser.add_argument("--log", metavar="FILE", help="the log (default: runs/endurance/seed-SEED.jsonl)")
    try:
        return perform(parser.parse_args())
    except KeyboardInterrupt:
        print("stopped; all processes have ended")
        return 130


if __name__ == "__main__":
    sys.exit(main())
