"""Who is killed when, and whether it is at work again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from examples.posttrain.processes import Processes
from examples.posttrain.record import Event, Kill, Record, SiteRecord
from examples.posttrain.screen import Screen

AWAY = 3.0
"""Seconds until a killed process is started again."""

NODE_AWAY_STEPS = 3
"""Steps that a site makes without its second node before that comes back."""


@dataclass
class Planned:
    """A kill that is due after a part of the steps.

    Attributes:
        after: part of the steps of the slower site, from 0 to 1.
        what: for the reader.
        site: number of the site, from 0.
        strike: kills.
        heal: called again and again until it returns True: starts again what was killed, if it does not come back by
            itself.
        recovered: the event with which the killed part is at work again, given its site and when it was healed.
    """

    after: float
    what: str
    site: int
    strike: Callable[[], None]
    heal: Callable[[Kill], bool]
    recovered: Callable[[SiteRecord, float], Event | None]


class Kills:
    """Carries out the planned kills, one after the other."""

    def __init__(self, processes: Processes, record: Record, screen: Screen, steps: int) -> None:
        self._processes, self._record, self._screen, self._steps = processes, record, screen, steps
        self._planned = self._plan()
        self.count = len(self._planned)
        self._current: tuple[Planned, Kill] | None = None
        self._healed: float | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing that was killed is still away."""
        return self._current is None

    def update(self) -> None:
        """Does what is due now."""
        if self._current is None:
            step = min(site.local_step for site in self._record.sites)
            if self._planned and step >= self._planned[0].after * self._steps:
                planned = self._planned.pop(0)
                kill = Kill(planned.what, planned.site, time.time())
                planned.strike()
                self._record.kills.append(kill)
                self._current, self._healed = (planned, kill), None
                self._screen.say(f"{planned.what}: killed without warning (SIGKILL)", "bold red")
            return
        planned, kill = self._current
        if self._healed is None:
            if not planned.heal(kill):
                return
            self._healed = time.time()
        event = planned.recovered(self._record.sites[planned.site], self._healed)
        if event is not None:
            kill.works_again = event["at"]
            self._current = None
            self._screen.say(f"{planned.what}: at work again after {kill.seconds:.1f} s", "green")

    def _plan(self) -> list[Planned]:
        processes = self._processes

        def start(begin: Callable[[], str]) -> Callable[[Kill], bool]:
            def heal(kill: Kill) -> bool:
                if time.time() < kill.at + AWAY:
                    return False
                begin()
                return True

            return heal

        def node_back(kill: Kill) -> bool:
            site = self._record.sites[0]
            alone = [event for event in site.steps if event["at"] > kill.at and event["ranks"] == 2]
            if len(alone) < NODE_AWAY_STEPS:
                return False
            kill.note = f"the site went on with one node after {alone[0]['at'] - kill.at:.1f} s"
            processes.start_node(0, 1)
            return True

        return [
            Planned(
                0.1,
                "explorer 1 of site 1",
                0,
                lambda: processes.kill("site-1-explorer-1"),
                start(lambda: processes.start_explorer(0, 1)),
                lambda site, since: _first(site.posted, since, lambda one: one["process"] == "site-1-explorer-1"),
            ),
            Planned(
                0.25,
                "rank 1 of site 2",
                1,
                lambda: self._kill_rank(1, 1),
                lambda kill: any(one["at"] > kill.at for one in self._record.sites[1].ready),
                lambda site, since: _first(site.progress, since),
            ),
            Planned(
                0.45,
                "node 2 of site 1",
                0,
                lambda: processes.kill("site-1-node-2"),
                node_back,
                lambda site, since: _first(site.progress, since, lambda one: one.get("ranks", 4) == 4),
            ),
            Planned(
                0.7,
                "feed of site 2",
                1,
                lambda: processes.kill("site-2-feed"),
                start(lambda: processes.start_feed(1)),
                lambda site, since: _first(site.fetched, since),
            ),
        ]

    def _kill_rank(self, site: int, rank: int) -> None:
        pid = [one["pid"] for one in self._record.sites[site].ready if one["rank"] == rank][-1]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _first(events: list[Event], since: float, fits: Callable[[Event], bool] = lambda _: True) -> Event | None:
    return next((event for event in events if event["at"] > since and fits(event)), None)
