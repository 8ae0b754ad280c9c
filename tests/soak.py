"""Peers that come and go under faults for minutes: `make soak MINUTES=10 SEED=1`.

Fails if a minute passes without a finished round, if the memory of a peer grows, or if a survivor holds a wrong value:
one that is neither an average of members of its group nor, where a reducer was lost, its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
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

CHANGE_SECONDS, FAULT_SECONDS = 8.0, 5.0


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


class Soaked:
    """One peer's process and the proxy before it."""

    def __init__(self, stack: ExitStack, seed: int, join: Sequence[str]) -> None:
        self._stack = stack.enter_context(ExitStack())
        self.proxy = self._stack.enter_context(FaultProxy())
        self.endpoint = f"127.0.0.1:{self.proxy.port}"
        options = {
            "run_id": "soak",
            "listen": f"127.0.0.1:{self.proxy.target}",
            "advertise": self.endpoint,
            "join": list(join),
            "group_size": PEERS,
            "matchmaking_time": 2.0,
            "timeout": 30.0,
            "part_timeout": 5.0,
            "seed": seed,
        }
        self.process = self._stack.enter_context(
            JsonProcess("python", "-m", "tests.integration.soak_peer", json.dumps(options))
        )
        self.read = self.rounds = self.first_rss = 0

    def stop(self) -> None:
        """Kills it."""
        self._stack.close()

    def news(self) -> list[dict[str, Any]]:
        """Its rounds since the last call, checked."""
        self.process.drain()
        fresh = [event for event in self.process.seen[self.read :] if event["event"] == "round"]
        self.read = len(self.process.seen)
        finished = [event for event in fresh if event["outcome"] == "averaged"]
        for event in finished:
            own = event["gathered"][self.endpoint]
            if not is_sound(event["values"], event["gathered"], own, event["kept_local"]):
                raise SoakError(f"{self.endpoint} holds {event['values'][:8]} after {event}")
            self.rounds += 1
            if self.rounds == 10:
                self.first_rss = event["rss"]
            if self.first_rss and event["rss"] > self.first_rss + GROWTH_BYTES:
                raise SoakError(f"{self.endpoint} grew from {self.first_rss >> 20} to {event['rss'] >> 20} MiB")
        return finished


def soak(minutes: float, seed: int) -> None:
    """Runs it.

    Raises:
        SoakError: see above.
    """
    rng = random.Random(seed)
    seeds = itertools.count(seed * 1000)
    with ExitStack() as stack:
        peers = [Soaked(stack, next(seeds), [])]
        peers[0].process.expect("ready")
        peers += [Soaked(stack, next(seeds), [peers[0].endpoint]) for _ in range(PEERS - 1)]
        for peer in peers[1:]:
            peer.process.expect("ready")
        began = last_finished = time.monotonic()
        change, heal, finished, dropped, killed, struck = began + CHANGE_SECONDS, 0.0, 0, 0, 0, 0
        victim: Soaked | None = None
        digests: dict[str, set[str]] = {}
        while (now := time.monotonic()) < began + 60 * minutes:
            time.sleep(0.5)
            for event in [event for peer in peers for event in peer.news()]:
                last_finished, finished, dropped = now, finished + 1, dropped + len(event["dropped"])
                digests.setdefault(event["group"], set()).add(event["digest"])
                if len(digests[event["group"]] - {""}) > 1:
                    raise SoakError(f"members of group {event['group'][:8]} hold different averages")
            if now - last_finished > QUIET_SECONDS:
                raise SoakError(f"no round was finished for {now - last_finished:.0f} s")
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
                peers.append(Soaked(stack, next(seeds), [peer.endpoint for peer in rng.sample(peers, 3)]))
                if victim is None:
                    victim, heal = rng.choice(peers[:-1]), now + FAULT_SECONDS
                    victim.proxy.arm(rng.choice([Fault.STALL, Fault.CUT, Fault.HALF_OPEN]), rng.randrange(200_000))
                    struck += 1
        print(
            f"{finished} rounds finished at {PEERS} peers in {minutes:g} min: {killed} killed, {struck} links spoilt, "
            f"{dropped} times a member was dropped (seed {seed})"
        )
        if not finished:
            raise SoakError("no round was finished")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    soak(given.minutes, given.seed)
