"""Peers that come and go under faults for minutes: `make soak MINUTES=10 SEED=1`.

Fails if a minute passes without a finished round, if the memory of a peer grows, or if a survivor holds a wrong value:
one that is neither an average of members of its group nor, where a reducer was lost, its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from tests.integration.fault_proxy import Fault, FaultProxy
from tests.integration.processes import JsonProcess

PEERS = 8
QUIET_SECONDS = 60.0
"""Without a finished round that is a failure."""

GROWTH_BYTES = 200 << 20
"""That a peer may grow by, from its tenth round on: allocators keep what they had once."""

WARM_ROUNDS = 10

CHANGE_SECONDS, FAULT_SECONDS, TELL_SECONDS = 8.0, 5.0, 60.0


class SoakError(Exception):
    """What must not happen has happened."""


def is_sound(values: Sequence[float], gathered: Mapping[str, float], own: float, kept_local: int) -> bool:
    """Whether each value is the mean of some of the members, or the own one, if elements were kept."""
    members = list(gathered.values())
    means = {
        sum(some) / count for count in range(1, len(members) + 1) for some in itertools.combinations(members, count)
    }
    allowed = means | {own} if kept_local else means
    return all(any(abs(value - mean) < 1e-2 for mean in allowed) for value in values)


class Judge:
    """Looks at what peers tell; knows nothing of processes.

    Attributes:
        finished: rounds that ended in an average, counted at every member.
        lost: attempts that ended without one.
        dropped: how often a member was dropped from one.
    """

    def __init__(self, now: float) -> None:
        self.finished = self.lost = self.dropped = 0
        self._last = now
        self._digests: dict[str, set[str]] = {}
        self._rounds: Counter[str] = Counter()
        self._first_rss: dict[str, int] = {}

    def hear(self, endpoint: str, event: Mapping[str, Any], now: float) -> None:
        """Takes what a peer tells after an attempt.

        Raises:
            SoakError: it holds a wrong value, or has grown.
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
        if self._rounds[endpoint] == WARM_ROUNDS:
            self._first_rss[endpoint] = event["rss"]
        first = self._first_rss.get(endpoint, event["rss"])
        if event["rss"] > first + GROWTH_BYTES:
            raise SoakError(f"{endpoint} grew from {first >> 20} to {event['rss'] >> 20} MiB")

    def look(self, now: float) -> None:
        """Raises SoakError if no round has been finished for long."""
        if now - self._last > QUIET_SECONDS:
            raise SoakError(f"no round was finished for {now - self._last:.0f} s")


class Soaked:
    """One peer's process and the proxy before it."""

    def __init__(self, stack: ExitStack, seed: int, join: Sequence[str], *, spoilt: bool = False) -> None:
        self._stack = stack.enter_context(ExitStack())
        self.proxy = self._stack.enter_context(FaultProxy())
        self.endpoint = f"127.0.0.1:{self.proxy.port}"
        options = {
            "run_id": "soak",
            "listen": f"127.0.0.1:{self.proxy.target}",
            "advertise": self.endpoint,
            "join": list(join),
            "group_size": PEERS,
            "group_wait": 2.0,
            "round_timeout": 30.0,
            "stall_timeout": 5.0,
            "seed": seed,
            "spoilt": spoilt,
        }
        self.process = self._stack.enter_context(
            JsonProcess("python", "-m", "tests.integration.soak_peer", json.dumps(options))
        )
        self.read = 0

    def stop(self) -> None:
        """Kills it."""
        self._stack.close()

    def news(self) -> list[dict[str, Any]]:
        """Its rounds since the last call."""
        self.process.drain()
        fresh = [event for event in self.process.seen[self.read :] if event["event"] == "round"]
        self.read = len(self.process.seen)
        return fresh


def soak(minutes: float, seed: int, *, count: int = PEERS, spoil: bool = False) -> None:
    """Runs it with so many peers; with `spoil` one peer holds a wrong value after its rounds, which must be found.

    Raises:
        SoakError: see above.
    """
    rng = random.Random(seed)
    seeds = itertools.count(seed * 1000)
    with ExitStack() as stack:
        peers = [Soaked(stack, next(seeds), [])]
        peers[0].process.expect("ready")
        peers += [
            Soaked(stack, next(seeds), [peers[0].endpoint], spoilt=spoil and not number) for number in range(count - 1)
        ]
        for peer in peers[1:]:
            peer.process.expect("ready")
        began = time.monotonic()
        judge = Judge(began)
        change, heal, killed, struck = began + CHANGE_SECONDS, 0.0, 0, 0
        victim: Soaked | None = None

        def told(now: float) -> str:
            return (
                f"{(now - began) / 60:.1f} min: {judge.finished} rounds finished at {count} peers, {judge.lost} lost, "
                f"{killed} killed, {struck} links spoilt, {judge.dropped} times a member was dropped"
            )

        tell = began + TELL_SECONDS
        while (now := time.monotonic()) < began + 60 * minutes:
            time.sleep(0.5)
            for peer in peers:
                for event in peer.news():
                    judge.hear(peer.endpoint, event, now)
            judge.look(now)
            if now >= tell:
                tell += TELL_SECONDS
                print(told(now), flush=True)
            if victim is not None and now >= heal:
                victim.proxy.heal()
                victim = None
            if now >= change:
                change = now + CHANGE_SECONDS
                gone = peers.pop(rng.randrange(len(peers)))
                if gone is victim:
                    victim = None
                gone.stop()
                killed += 1
                peers.append(
                    Soaked(stack, next(seeds), [peer.endpoint for peer in rng.sample(peers, min(3, len(peers)))])
                )
                if victim is None:
                    victim, heal = rng.choice(peers[:-1]), now + FAULT_SECONDS
                    victim.proxy.arm(rng.choice([Fault.STALL, Fault.CUT, Fault.HALF_OPEN]), rng.randrange(200_000))
                    struck += 1
        print(f"{told(now)} (seed {seed})")
        if not judge.finished:
            raise SoakError("no round was finished")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--spoil", action="store_true", help="let one peer hold a wrong value: it must fail then")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    try:
        soak(given.minutes, given.seed, count=given.peers, spoil=given.spoil)
    except SoakError as error:
        sys.exit(f"failed: {error}")
    except KeyboardInterrupt:
        print("stopped; all processes have ended")
        sys.exit(130)
