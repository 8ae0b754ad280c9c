"""Runs everything at once under faults: `make endurance HOURS=2 SEED=1`, or `make endurance LOG=FILE` for a replay.

    python -m tests.endurance --minutes 10 --seed 7
    python -m tests.endurance --minutes 5 --only gradients weights
    python -m tests.endurance --replay runs/endurance/seed-7.jsonl

Exit codes: 0 everything held; 1 a check failed, or a process ended by itself; 2 wrong usage, or no log;
3 this machine is too slow: not everything was up within five minutes, or within six times what the starts of all
processes take by themselves; 130 stopped by Ctrl+C, 143 by SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

from examples.children import ending_children
from tests.endurance.actors import Actor, System
from tests.endurance.hosts import FAR_ADDRESSES, HOME_ADDRESS, Disk, EtcdCluster, Hosts, lacks, two_hosts
from tests.endurance.judge import Judge, Recovery, deadline_of
from tests.endurance.plan import (
    FaultKind,
    Header,
    LogError,
    Strike,
    draw,
    header_line,
    read_log,
    strike_line,
)
from tests.endurance.roster import GROUP_WAIT, PARTS, STALL_TIMEOUT, TOKEN, Roster, targets_of
from tests.support.calibration import slowness, start_seconds
from tests.support.certificates import write

INSIDE = "ENDURANCE_INSIDE"
TICK_SECONDS, MEASURE_SECONDS, REPORT_SECONDS = 0.25, 5.0, 60.0
START_SECONDS, CALM_SECONDS, COOL_SECONDS = 300.0, 20.0, 60.0
"""Time for everything to be up; without faults before the first and after the last one."""

AFTERMATH_SECONDS = 90.0
"""Time after a fault in which a site may end because of it: a rank that was stopped, and its others."""

MOST_SLOWNESS = 3.0
"""On a busy machine deadlines count up to so many times, when it is checked how soon the others average again."""

AT_ONCE = 4
"""Processes that start at the same time."""


class TooSlowError(Exception):
    """This machine is too slow for the run."""


class Endurance:
    """One run."""

    def __init__(self, header: Header, strikes: list[Strike], system: System, judge: Judge, log: TextIO) -> None:
        self.header, self.strikes, self.system, self.judge, self.log = header, strikes, system, judge, log
        self.began = time.monotonic()
        self.last_tick = self.began
        self.open: list[tuple[float, Strike]] = []
        self.last_fault: dict[str, float] = {}
        self.shown = 0
        self.counts: Counter[str] = Counter()
        self.measure_at = self.report_at = 0.0

    def run(self) -> None:
        """Starts everything, makes the faults, and waits until all have recovered."""
        self._start()
        self._pass(CALM_SECONDS)
        self.began = time.monotonic()
        self.report_at = self.began + REPORT_SECONDS
        for strike in self.strikes:
            while (now := time.monotonic()) < self.began + strike.at:
                self._tick(now)
            self._strike(strike, now)
        self._pass(max(0.0, self.header.seconds - (time.monotonic() - self.began)))
        for _, strike in self.open:
            self.system.heal(strike)
        self.open.clear()
        before = dict(self.judge.rounds.items())
        self._pass(COOL_SECONDS)
        for run, count in before.items():
            if self.judge.rounds[run] == count:
                self.judge.violations.append(f"no round of {run} in {COOL_SECONDS:.0f} s after the last fault")
        for actor in self.system.actors.values():
            if not actor.ready:
                self.judge.violations.append(f"{actor.name} is not up {COOL_SECONDS:.0f} s after the last fault")
        self.judge.settle(math.inf)
        self._tick(time.monotonic())
        self._report(time.monotonic())

    def _start(self) -> None:
        planes: dict[str, list[Actor]] = {}
        for actor in self.system.actors.values():
            planes.setdefault(actor.plane, []).append(actor)
        first = [actors[0] for actors in planes.values()]
        others = [actor for actors in planes.values() for actor in actors[1:]]
        limit = max(START_SECONDS, 6.0 * len(self.system.actors) * start_seconds())
        deadline = time.monotonic() + limit
        for batch in (first, *(others[at : at + AT_ONCE] for at in range(0, len(others), AT_ONCE))):
            for actor in batch:
                actor.start(time.monotonic())
            while not all(actor.ready for actor in batch):
                self._tick(time.monotonic())
                if time.monotonic() > deadline:
                    missing = [actor.name for actor in self.system.actors.values() if not actor.ready]
                    raise TooSlowError(f"{', '.join(missing)} not up within {limit:.0f} s")
            print(f"up: {', '.join(actor.name for actor in batch)}", flush=True)

    def _pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            self._tick(now)

    def _tick(self, now: float) -> None:
        late = max(0.0, now - self.last_tick - 2 * TICK_SECONDS)
        self.last_tick = now
        for until, strike in list(self.open):
            if now >= until:
                self.open.remove((until, strike))
                self.system.heal(strike)
                hit = self._hit_by(strike)
                self.last_fault.update(dict.fromkeys(hit, now))
                for run in {actor.plane for actor in self.system.actors.values() if actor.name in hit}:
                    self.judge.recovery.heal(strike, run, now)
        actors = [actor for actor in self.system.actors.values() if actor.life]
        told = [(event.get("moment", now), actor, rank, event) for actor in actors for rank, event in actor.events()]
        for _, actor, rank, event in sorted(told, key=itemgetter(0)):  # a member's value comes before its average
            self._take(actor, rank, event, now)
        for actor in actors:
            for what, why in actor.tick(now):
                self._note_end(actor, what, why, now)
        self.judge.tick(now, late)
        if now >= self.measure_at:
            self.measure_at = now + MEASURE_SECONDS
            for actor in self.system.actors.values():
                for name, values in actor.measure():
                    self.judge.violations.extend(self.judge.growth.note(name, now - actor.started, values))
        for violation in self.judge.violations[self.shown :]:
            print(f"VIOLATION {violation}", flush=True)
            self._write(now, violation=violation)
        self.shown = len(self.judge.violations)
        if self.report_at and now >= self.report_at:
            self.report_at = now + REPORT_SECONDS
            self._report(now)
        time.sleep(max(0.0, TICK_SECONDS - (time.monotonic() - now)))

    def _take(self, actor: Actor, rank: int, event: Mapping[str, Any], now: float) -> None:
        if event.get("event") == actor.ready_event and not actor.ready and not actor.expected:
            actor.note_ready(rank, now)
            if actor.ready:
                self._write(now, ready=actor.name, life=actor.life, seconds=round(now - actor.started, 1))
        if "receipt" in event and event["event"] == "round":
            receipt = event["receipt"]
            dropped = [f"{lost['endpoint']}: {lost['reason']}" for lost in receipt["dropped"]]
            if dropped or receipt["reason"]:
                self._write(now, round=actor.name, dropped=dropped, reason=receipt["reason"])
        self.judge.take(actor.plane, actor.name, rank, actor.life, actor.slot, event, now)

    def _note_end(self, actor: Actor, what: str, why: str, now: float) -> None:
        self.judge.recovery.hit(actor.plane, actor.name)
        recent = now - self.last_fault.get(actor.name, -1e9) < AFTERMATH_SECONDS or bool(actor.struck)
        if what == "failed" and actor.plane == "sites" and recent:
            what = "ended"
        if what == "failed" and not actor.was_ready and actor.failed_starts < 5:
            what = "start failed"
        self.counts[what] += 1
        self._write(now, **{what.replace(" ", "_"): why})
        if what in ("failed", "overdue"):
            self.judge.violations.append(f"{why}")

    def _strike(self, strike: Strike, now: float) -> None:
        print(strike, flush=True)
        self.log.write(strike_line(strike) + "\n")
        actors = self.system.strike(strike, now)
        hit = {actor.name for actor in actors}
        self.counts[strike.kind] += 1
        self.last_fault.update(dict.fromkeys(hit, now))
        for run in ("gradients", "local", "sites"):
            members = [a for a in self.system.actors.values() if a.plane == run and a.name != "auxiliary"]
            if any(actor.plane == run for actor in actors) or (strike.kind is FaultKind.ETCD and run == "local"):
                for name in hit:
                    self.judge.recovery.hit(run, name)
                if strike.kind not in (FaultKind.CLOCK,):
                    calm = {actor.name for actor in members if actor.calm and actor.name not in hit}
                    hits = sum(actor.plane == run for actor in actors)
                    self.judge.recovery.strike(strike, run, calm if len(calm) > 1 else (), now, hit=hits)
        if strike.seconds:
            self.open.append((now + strike.seconds, strike))
        else:
            self.system.heal(strike)

    def _hit_by(self, strike: Strike) -> list[str]:
        if strike.victim == System.FAR:
            return [actor.name for actor in self.system.actors.values() if actor.far]
        return [strike.victim]

    def _report(self, now: float) -> None:
        summary = self.judge.summary() | {"counts": dict(self.counts)}
        print(f"{(now - self.began) / 60:.1f} min: {json.dumps(summary)}", flush=True)
        self._write(now, summary=summary)

    def _write(self, now: float, **fields: Any) -> None:
        self.log.write(json.dumps({"t": round(now - self.began, 2), **fields}) + "\n")
        self.log.flush()


def omitted_kinds(hosts: Hosts, only: list[str]) -> dict[str, str]:
    """The kinds of faults that cannot be made here, with the reason."""
    omitted: dict[str, str] = {}
    if not hosts.far:
        omitted |= {
            kind: lacks() or "there is no far host" for kind in (FaultKind.MTU, FaultKind.ADDRESS, FaultKind.DISK)
        }
    if shutil.which("etcd") is None:
        omitted[FaultKind.ETCD] = "etcd is missing (apt-get install etcd-server)"
    elif "local" not in only:
        omitted[FaultKind.ETCD] = "the part `local` does not run"
    return omitted


def perform(given: argparse.Namespace, header: Header, replayed: list[Strike] | None) -> int:
    """Runs it; returns the exit code."""
    hosts = Hosts()
    only = list(header.only) or list(PARTS)
    omitted = omitted_kinds(hosts, only)
    for kind, reason in omitted.items():
        print(f"without {kind}: {reason}", flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="endurance-")))
        disk = Disk(folder / "disk", mounted=bool(hosts.far))
        stack.callback(disk.close)
        files = write(folder / "certificates", "127.0.0.1", "localhost", HOME_ADDRESS, *FAR_ADDRESSES)
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_text(TOKEN)
        files = {**files, "token_file": folder / "token"}
        etcd = None
        if FaultKind.ETCD not in omitted:
            etcd = stack.enter_context(EtcdCluster(folder, hosts.home, files))
        roster = Roster(stack, folder, hosts, disk, etcd, files, only, given.pause)
        system = System(roster.actors, hosts, disk, etcd)
        stack.callback(system.close)
        strikes = replayed
        if strikes is None:
            strikes = draw(header.seed, header.seconds, targets_of(system, omitted), header.every)
        else:
            strikes = [one for one in strikes if one.kind not in omitted]
        name = f"replay-{header.seed}" if given.replay else f"seed-{header.seed}"
        log_file = Path(given.log or f"runs/endurance/{name}.jsonl")
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context(log_file.open("w"))
        header = Header(header.seed, header.seconds, header.every, only, omitted)
        log.write(header_line(header) + "\n")
        print(f"seed {header.seed}, {len(strikes)} faults in {header.seconds / 60:g} min, log {log_file}", flush=True)
        slow = min(slowness(start_seconds()), MOST_SLOWNESS)
        judge = Judge(Recovery(lambda kind: deadline_of(kind, GROUP_WAIT, STALL_TIMEOUT), slow))
        run = Endurance(header, strikes, system, judge, log)
        try:
            run.run()
        except TooSlowError as error:
            print(f"this machine is too slow: {error}")
            return 3
        if judge.violations:
            print(f"failed: {len(judge.violations)} violations (seed {header.seed}, log {log_file})")
            return 1
        print(f"held (seed {header.seed}, log {log_file})")
        return 0


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.endurance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lasting = parser.add_mutually_exclusive_group()
    lasting.add_argument("--hours", type=float, help="how long faults come")
    lasting.add_argument("--minutes", type=float, help="the same in minutes (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--every", type=float, default=6.0, help="mean seconds between two faults (default: 6)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run these parts alone")
    parser.add_argument("--replay", metavar="LOG", help="make the faults of a log again, at the same times")
    parser.add_argument(
        "--log", metavar="FILE", help="where the log is written (default: runs/endurance/seed-SEED.jsonl)"
    )
    parser.add_argument("--pause", type=float, default=0.4, help="seconds of a training step (default: 0.4)")
    given = parser.parse_args()
    for name in ("hours", "minutes", "every", "pause"):
        if (value := getattr(given, name)) is not None and not value > 0:
            parser.error(f"--{name} must be above 0, not {value:g}")
    return given


def header_of(given: argparse.Namespace) -> tuple[Header, list[Strike] | None]:
    """What the command line asks for; with a replay also its faults."""
    if given.replay:
        header, strikes = read_log(Path(given.replay).read_text().splitlines())
        return header, strikes
    seconds = 3600 * given.hours if given.hours else 60 * (given.minutes or 10.0)
    return Header(given.seed, seconds, given.every, given.only), None


def in_two_hosts() -> int:
    """Runs this command at the home host of two; returns its exit code."""
    with two_hosts() as prefix:
        child = subprocess.Popen([*prefix, f"{INSIDE}=1", sys.executable, "-m", "tests.endurance", *sys.argv[1:]])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child gets it as well
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        return child.wait()


@ending_children()
def run_inside(given: argparse.Namespace, header: Header, replayed: list[Strike] | None) -> int:
    try:
        return perform(given, header, replayed)
    except KeyboardInterrupt:
        print("stopped; all processes have ended")
        return 130


def main() -> int:
    given = parse()
    try:
        header, replayed = header_of(given)
    except (OSError, LogError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not lacks() and INSIDE not in os.environ:
        return in_two_hosts()
    return run_inside(given, header, replayed)


if __name__ == "__main__":
    sys.exit(main())
