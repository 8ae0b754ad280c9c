"""Runs peers under faults for some minutes, and kills and starts some: `make soak MINUTES=10 SEED=1`.

Fails if no round is averaged for too long, if the memory of a peer grows, or if a survivor holds a wrong value: neither
an average of members of its group nor, after the loss of a reducer, its own value. What is too long follows from the
rounds before the first fault, so that a machine with other work passes as well.

Exit codes: 0 passed; 1 a check failed; 3 the machine is too slow for a verdict; 130 Ctrl+C.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from examples.children import ending_children
from tests.support.calibration import slowness, start_seconds
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.processes import JsonProcess

PEERS = 8

ROUND_TIMEOUT, STALL_TIMEOUT, GROUP_WAIT = 30.0, 5.0, 2.0
"""Options of the peers, in seconds."""

MAX_SLOWNESS = 4.0
"""Factor by which a machine is slower than an idle one when nothing is concluded from a missed bound."""

CALIBRATION_ROUNDS = 5
"""Rounds of each peer before the first fault."""

CALIBRATION_SECONDS = 300.0
"""Maximum time until the peers have started and finished these rounds."""

MAX_QUIET_SECONDS = 120.0
"""Limit above which a machine is too slow: the usual soak is not longer. A usual round takes 20 s then."""

START_SECONDS = 60.0
"""Time for a newcomer to become ready on an idle machine."""

SLOWER = 2.0
"""Factor by which a machine has become slower since the calibration when nothing is concluded from a missed bound."""

GROWTH_BYTES = 200 << 20
"""Maximum growth of a peer after `WARM_ROUNDS` rounds. Allocators keep memory that was used once."""

WARM_ROUNDS = 10

CHANGE_SECONDS, FAULT_SECONDS, REPORT_SECONDS = 8.0, 5.0, 60.0


class SoakError(Exception):
    """A check of the soak test failed."""


class OverdueError(SoakError):
    """Something took too long, which may be the machine's fault."""


class TooSlowError(Exception):
    """The machine is too slow for a verdict."""


def quiet_limit(usual_round: float) -> float:
    """Maximum seconds without an averaged round.

    A failure may cost two usual rounds and a deadline of 2 × `STALL_TIMEOUT`. A kill and a broken link come together,
    and the bound is twice what they may cost: 40 s and 8 usual rounds.

    Args:
        usual_round: seconds between two rounds of a peer without faults.
    """
    failures = 2
    return 2 * failures * (2 * usual_round + 2 * STALL_TIMEOUT)


def is_sound(values: Sequence[float], gathered: Mapping[str, float], own: float, kept_local: int) -> bool:
    """Whether each value is the mean of some members, or the own value if elements were kept."""
    members = list(gathered.values())
    means = {
        sum(some) / count for count in range(1, len(members) + 1) for some in itertools.combinations(members, count)
    }
    allowed = means | {own} if kept_local else means
    return all(any(abs(value - mean) < 1e-2 for mean in allowed) for value in values)


class Judge:
    """Checks the rounds that peers report.

    Attributes:
        finished: number of averaged rounds, counted at every member.
        lost: number of other rounds.
        dropped: number of dropped members in averaged rounds.
        lanes: how often parts went to a member on each lane.
    """

    def __init__(self, now: float) -> None:
        self.finished = self.lost = self.dropped = 0
        self.lanes: Counter[str] = Counter()
        self._last = now
        self._digests: dict[str, set[str]] = {}
        self._rounds: Counter[str] = Counter()
        self._first_rss: dict[str, int] = {}

    def check(self, endpoint: str, event: Mapping[str, Any], now: float) -> None:
        """Checks the report of a peer on one round.

        Raises:
            SoakError: the peer holds a wrong value, or its memory has grown.
        """
        if event["outcome"] != "averaged":
            self.lost += 1
            return
        own = event["gathered"][endpoint]
        if not is_sound(event["values"], event["gathered"], own, event["kept_local"]):
            raise SoakError(f"{endpoint} holds a wrong value: {event['values'][:8]} after {event}")
        digests = self._digests.setdefault(event["group"], set()) | {event["digest"]} - {""}
        if len(digests) > 1:
            raise SoakError(f"members of group {event['group'][:8]} hold different averages")
        self._digests[event["group"]] = digests
        self._last, self.finished, self.dropped = now, self.finished + 1, self.dropped + len(event["dropped"])
        self._rounds[endpoint] += 1
        self.lanes.update(event["lanes"])
        if self._rounds[endpoint] == WARM_ROUNDS:
            self._first_rss[endpoint] = event["rss"]
        first = self._first_rss.get(endpoint, event["rss"])
        if event["rss"] > first + GROWTH_BYTES:
            raise SoakError(f"{endpoint} grew from {first >> 20} to {event['rss'] >> 20} MiB")

    def usual_round(self, began: float, now: float) -> float:
        """Seconds between two rounds of the peer that has finished the fewest, since all peers had begun."""
        return (now - began) / min(self._rounds.values(), default=1)

    def is_calibrated(self, count: int) -> bool:
        """Whether each of `count` peers has finished enough rounds for that."""
        return len(self._rounds) >= count and min(self._rounds.values()) >= CALIBRATION_ROUNDS

    def check_progress(self, now: float, limit: float) -> None:
        """Raises OverdueError if the last averaged round is more than `limit` seconds ago."""
        if now - self._last > limit:
            raise OverdueError(f"no round was finished for {now - self._last:.0f} s, more than {limit:.0f} s")


class PeerProcess:
    """The process of one peer, and the proxies in front of its gRPC port and of its port for direct connections."""

    def __init__(self, stack: ExitStack, seed: int, join: Sequence[str], *, spoilt: bool = False) -> None:
        self._stack = stack.enter_context(ExitStack())
        self.proxy, self.direct = (self._stack.enter_context(FaultProxy()) for _ in range(2))
        self.endpoint = f"127.0.0.1:{self.proxy.port}"
        options = {
            "run_id": "soak",
            "listen": f"127.0.0.1:{self.proxy.target}",
            "advertise": self.endpoint,
            "direct_listen": f"127.0.0.1:{self.direct.target}",
            "direct_advertise": self.direct.port,
            "join": list(join),
            "group_size": PEERS,
            "group_wait": GROUP_WAIT,
            "round_timeout": ROUND_TIMEOUT,
            "stall_timeout": STALL_TIMEOUT,
            "seed": seed,
            "spoilt": spoilt,
        }
        self.process = self._stack.enter_context(
            JsonProcess("python", "-m", "tests.support.soak_peer", json.dumps(options))
        )
        self.read = 0
        self.started = time.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether it has joined the others."""
        self.process.drain()
        return any(event["event"] == "ready" for event in self.process.seen)

    def stop(self) -> None:
        """Kills the process."""
        self._stack.close()

    def new_rounds(self) -> list[dict[str, Any]]:
        """Returns the reports on rounds since the last call."""
        self.process.drain()
        rounds = [event for event in self.process.seen[self.read :] if event["event"] == "round"]
        self.read = len(self.process.seen)
        return rounds


class Soak:
    """One soak: its peers, what breaks, and what it costs.

    Args:
        stack: ends the processes.
        seed: draws who is killed, and what breaks.
        count: number of peers.
        spoil: lets one peer hold a wrong value after its rounds.
    """

    def __init__(self, stack: ExitStack, seed: int, count: int, *, spoil: bool) -> None:
        self._stack, self._count, self._spoil = stack, count, spoil
        self._rng = random.Random(seed)
        self._seeds = itertools.count(seed * 1000)
        self.judge = Judge(time.monotonic())
        self._start = start_seconds()
        self._limit = CALIBRATION_SECONDS
        self._peers: list[PeerProcess] = []
        self._killed = self._struck = 0
        self._victim: PeerProcess | None = None
        self._spoilt: list[FaultProxy] = []
        self._heal = 0.0

    def calibrate(self) -> float:
        """Starts the peers, and measures rounds without faults; returns the seconds of a usual one.

        Raises:
            SoakError: they do not average although the machine is fast enough.
        """
        deadline = time.monotonic() + CALIBRATION_SECONDS
        self._add([])
        self._wait_until(lambda: self._peers[0].is_ready, deadline, "the first peer is not ready")
        for number in range(self._count - 1):
            self._add([self._peers[0].endpoint], spoilt=self._spoil and not number)
        self._wait_until(lambda: all(peer.is_ready for peer in self._peers), deadline, "not all peers are ready")
        began = time.monotonic()
        self._wait_until(lambda: self.judge.is_calibrated(self._count), deadline, "not all peers have averaged often")
        usual = self.judge.usual_round(began, time.monotonic())
        self._limit = quiet_limit(usual)
        return usual

    def run(self, minutes: float) -> None:
        """Averages under faults for that time.

        Raises:
            SoakError: a check failed.
        """
        began = time.monotonic()
        change, report = began + CHANGE_SECONDS, began + REPORT_SECONDS
        while (now := time.monotonic()) < began + 60 * minutes:
            time.sleep(0.5)
            self._listen(now)
            self.judge.check_progress(now, self._limit)
            if now >= report:
                report += REPORT_SECONDS
                print(self.summary(now - began), flush=True)
            if self._victim is not None and now >= self._heal:
                self._mend()
            # On a slow machine a newcomer takes longer than the pause: who is killed before would leave no peer.
            if now >= change and self._newcomer_is_ready(now):
                change = now + CHANGE_SECONDS
                self._kill_and_start()
                if self._victim is None:
                    self._strike(now)
        print(self.summary(now - began))
        if not self.judge.finished:
            raise OverdueError("no round was finished")
        if not self.judge.lanes["direct"]:
            raise SoakError("no part travelled on a direct connection")

    def check_machine(self, error: OverdueError) -> None:
        """Raises TooSlowError if the machine is much slower than before, or too slow at all."""
        try:
            seconds = start_seconds()
        except subprocess.TimeoutExpired as expired:
            seconds = expired.timeout
        if seconds > SLOWER * self._start or slowness(seconds) > MAX_SLOWNESS:
            raise TooSlowError(
                f"{error}, and a process that imports the package starts in {seconds:.0f} s, {slowness(seconds):.0f} "
                f"times as long as on an idle machine ({self._start:.0f} s at the beginning)"
            ) from error

    def summary(self, seconds: float) -> str:
        """What happened in that time."""
        judge = self.judge
        return (
            f"{seconds / 60:.1f} min: {judge.finished} rounds finished at {self._count} peers, {judge.lost} lost, "
            f"{self._killed} killed, {self._struck} links spoilt, {judge.dropped} times a member was dropped; lanes: "
            + (", ".join(f"{lane} {count}" for lane, count in sorted(judge.lanes.items())) or "none")
        )

    def _add(self, join: Sequence[str], *, spoilt: bool = False) -> None:
        self._peers.append(PeerProcess(self._stack, next(self._seeds), join, spoilt=spoilt))

    def _listen(self, now: float) -> None:
        for peer in self._peers:
            for event in peer.new_rounds():
                self.judge.check(peer.endpoint, event, now)

    def _wait_until(self, holds: Callable[[], bool], deadline: float, otherwise: str) -> None:
        while not holds():
            self._listen(time.monotonic())
            if time.monotonic() > deadline:
                raise OverdueError(f"{otherwise} within {CALIBRATION_SECONDS:g} s")
            time.sleep(0.1)

    def _newcomer_is_ready(self, now: float) -> bool:
        newcomer = self._peers[-1]
        if not newcomer.is_ready and now > newcomer.started + START_SECONDS * slowness(self._start):
            raise OverdueError(f"a newcomer is not ready after {now - newcomer.started:.0f} s")
        return newcomer.is_ready

    def _kill_and_start(self) -> None:
        gone = self._peers.pop(self._rng.randrange(len(self._peers)))
        if gone is self._victim:
            self._victim = None
        gone.stop()
        self._killed += 1
        self._add([peer.endpoint for peer in self._rng.sample(self._peers, min(3, len(self._peers)))])

    def _strike(self, now: float) -> None:
        rng = self._rng
        self._victim = victim = rng.choice(self._peers[:-1])
        self._heal = now + FAULT_SECONDS
        self._spoilt = rng.choice([[victim.proxy], [victim.direct], [victim.proxy, victim.direct]])
        for proxy in self._spoilt:
            proxy.arm(rng.choice([Fault.STALL, Fault.CUT, Fault.HALF_OPEN]), rng.randrange(200_000))
        self._struck += 1

    def _mend(self) -> None:
        for proxy in self._spoilt:
            proxy.heal()
        self._victim = None


def soak(minutes: float, seed: int, *, count: int = PEERS, spoil: bool = False) -> None:
    """Runs the test with `count` peers. With `spoil` one peer holds a wrong value after its rounds.

    Raises:
        SoakError: a check failed.
        TooSlowError: the machine is too slow for a verdict.
    """
    with ExitStack() as stack:
        test = Soak(stack, seed, count, spoil=spoil)
        try:
            usual = test.calibrate()
            print(f"a usual round takes {usual:.2f} s here; {quiet_limit(usual):.0f} s without one fail", flush=True)
            if quiet_limit(usual) > MAX_QUIET_SECONDS:
                raise TooSlowError(f"more than {MAX_QUIET_SECONDS:g} s without a round prove nothing")
            test.run(minutes)
        except OverdueError as error:
            test.check_machine(error)
            raise


@ending_children()
def main() -> None:
    """Runs the soak as configured on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--spoil", action="store_true", help="let one peer hold a wrong value, so that the test fails")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    try:
        soak(given.minutes, given.seed, count=given.peers, spoil=given.spoil)
    except SoakError as error:
        sys.exit(f"failed: {error} (seed {given.seed})")
    except TooSlowError as error:
        print(f"no verdict: {error}. Run it with less other work, more --minutes or fewer --peers", file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:
        print("stopped; all processes have ended")
        sys.exit(130)


if __name__ == "__main__":
    main()
