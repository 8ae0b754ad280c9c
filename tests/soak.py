"""Runs peers under faults for some minutes, and kills and starts some: `make soak MINUTES=10 SEED=1`.

Fails if a minute passes without an averaged round, if the memory of a peer grows, or if a survivor holds a wrong value:
neither an average of members of its group nor, after the loss of a reducer, its own value.
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

from examples.children import ending_children
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.processes import JsonProcess

PEERS = 8
QUIET_SECONDS = 60.0
"""Maximum time without an averaged round."""

GROWTH_BYTES = 200 << 20
"""Maximum growth of a peer after `WARM_ROUNDS` rounds. Allocators keep memory that was used once."""

WARM_ROUNDS = 10

CHANGE_SECONDS, FAULT_SECONDS, REPORT_SECONDS = 8.0, 5.0, 60.0


class SoakError(Exception):
    """A check of the soak test failed."""


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

    def check_progress(self, now: float) -> None:
        """Raises SoakError if the last averaged round is too long ago."""
        if now - self._last > QUIET_SECONDS:
            raise SoakError(f"no round was finished for {now - self._last:.0f} s")


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
            "group_wait": 2.0,
            "round_timeout": 30.0,
            "stall_timeout": 5.0,
            "seed": seed,
            "spoilt": spoilt,
        }
        self.process = self._stack.enter_context(
            JsonProcess("python", "-m", "tests.support.soak_peer", json.dumps(options))
        )
        self.read = 0

    def stop(self) -> None:
        """Kills the process."""
        self._stack.close()

    def new_rounds(self) -> list[dict[str, Any]]:
        """Returns the reports on rounds since the last call."""
        self.process.drain()
        rounds = [event for event in self.process.seen[self.read :] if event["event"] == "round"]
        self.read = len(self.process.seen)
        return rounds


def soak(minutes: float, seed: int, *, count: int = PEERS, spoil: bool = False) -> None:
    """Runs the test with `count` peers. With `spoil` one peer holds a wrong value after its rounds.

    Raises:
        SoakError: a check failed.
    """
    rng = random.Random(seed)
    seeds = itertools.count(seed * 1000)
    with ExitStack() as stack:
        peers = [PeerProcess(stack, next(seeds), [])]
        peers[0].process.expect("ready")
        peers += [
            PeerProcess(stack, next(seeds), [peers[0].endpoint], spoilt=spoil and not number)
            for number in range(count - 1)
        ]
        for peer in peers[1:]:
            peer.process.expect("ready")
        began = time.monotonic()
        judge = Judge(began)
        change, heal, killed, struck = began + CHANGE_SECONDS, 0.0, 0, 0
        victim: PeerProcess | None = None
        spoilt: list[FaultProxy] = []

        def summary(now: float) -> str:
            return (
                f"{(now - began) / 60:.1f} min: {judge.finished} rounds finished at {count} peers, {judge.lost} lost, "
                f"{killed} killed, {struck} links spoilt, {judge.dropped} times a member was dropped; lanes: "
                + (", ".join(f"{lane} {count}" for lane, count in sorted(judge.lanes.items())) or "none")
            )

        report = began + REPORT_SECONDS
        while (now := time.monotonic()) < began + 60 * minutes:
            time.sleep(0.5)
            for peer in peers:
                for event in peer.new_rounds():
                    judge.check(peer.endpoint, event, now)
            judge.check_progress(now)
            if now >= report:
                report += REPORT_SECONDS
                print(summary(now), flush=True)
            if victim is not None and now >= heal:
                for proxy in spoilt:
                    proxy.heal()
                victim = None
            if now >= change:
                change = now + CHANGE_SECONDS
                gone = peers.pop(rng.randrange(len(peers)))
                if gone is victim:
                    victim = None
                gone.stop()
                killed += 1
                peers.append(
                    PeerProcess(stack, next(seeds), [peer.endpoint for peer in rng.sample(peers, min(3, len(peers)))])
                )
                if victim is None:
                    victim, heal = rng.choice(peers[:-1]), now + FAULT_SECONDS
                    spoilt = rng.choice([[victim.proxy], [victim.direct], [victim.proxy, victim.direct]])
                    for proxy in spoilt:
                        proxy.arm(rng.choice([Fault.STALL, Fault.CUT, Fault.HALF_OPEN]), rng.randrange(200_000))
                    struck += 1
        print(f"{summary(now)} (seed {seed})")
        if not judge.finished:
            raise SoakError("no round was finished")
        if not judge.lanes["direct"]:
            raise SoakError("no part travelled on a direct connection")


@ending_children()
def main() -> None:
    """Runs the soak as configured on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--spoil", action="store_true", help="let one peer hold a wrong value, so that the test fails")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    try:
        soak(given.minutes, given.seed, count=given.peers, spoil=given.spoil)
    except SoakError as error:
        sys.exit(f"failed: {error}")
    except KeyboardInterrupt:
        print("stopped; all processes have ended")
        sys.exit(130)


if __name__ == "__main__":
    main()
