"""What the processes of the story have reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass
class SiteRecord:
    """What one site has reported, in the order of time.

    Attributes:
        steps: complete steps of the master.
        fetched: batches that the reward worker has got from the feed.
        posted: groups that an explorer has posted, and the answers' mean reward.
        begun: posts that have begun, also those of which no acknowledgement was written.
        versions: by explorer, each version of the weights that it has taken.
        ready: starts of ranks.
        waits: why the master has waited.
        finished: the end at rank 0.
        published: the last version of the weights.
        wrong: groups whose scores are not those of the rule.
    """

    steps: list[Event] = field(default_factory=list)
    fetched: list[Event] = field(default_factory=list)
    posted: list[Event] = field(default_factory=list)
    begun: list[Event] = field(default_factory=list)
    versions: dict[str, list[Event]] = field(default_factory=dict)
    ready: list[Event] = field(default_factory=list)
    waits: list[Event] = field(default_factory=list)
    finished: Event | None = None
    published: int | None = None
    wrong: int = 0

    @property
    def local_step(self) -> int:
        """The last step."""
        return int(self.steps[-1]["local_step"]) if self.steps else 0

    @property
    def progress(self) -> list[Event]:
        """The steps, and the end."""
        return self.steps + ([self.finished] if self.finished else [])

    @property
    def ranks(self) -> int:
        """Processes that train now."""
        return int(self.ready[-1]["world"]) if self.ready else 0

    def has_ended(self, explorers: int) -> bool:
        """Whether the training has ended, and all explorers have its last version."""
        last = [events[-1]["version"] for events in self.versions.values()]
        return self.published is not None and last == [self.published] * explorers

    def reward(self, of: int = 8) -> float | None:
        """The mean reward of the last posts."""
        last = self.posted[-of:]
        return sum(one["reward"] for one in last) / len(last) if last else None

    def add(self, process: str, event: Event) -> None:
        """Takes one event of a process of this site."""
        match event["event"]:
            case "step":
                self.steps.append(event)
            case "fetched":
                self.fetched.append(event)
            case "posting":
                self.begun.append(event)
            case "posted":
                self.posted.append(event | {"process": process})
            case "version":
                self.versions.setdefault(process, []).append(event)
            case "ready":
                self.ready.append(event)
            case "waits":
                self.waits.append(event)
            case "finished":
                self.finished = event
            case "published":
                self.published = event["version"]
            case "wrong scores":
                self.wrong += 1


@dataclass
class Kill:
    """One kill.

    Attributes:
        what: for the reader.
        site: number of the site, from 0.
        at: seconds since the epoch.
        works_again: when the killed part was at work again; None before that.
        note: what happened, for the reader.
    """

    what: str
    site: int
    at: float
    works_again: float | None = None
    note: str = ""

    @property
    def seconds(self) -> float | None:
        """From the kill until the killed part was at work again."""
        return None if self.works_again is None else self.works_again - self.at


class Record:
    """Reads the events of all processes.

    Args:
        directory: with one file for each process.
        sites: number of sites.
    """

    def __init__(self, directory: Path, sites: int) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}
        self.sites = [SiteRecord() for _ in range(sites)]
        self.kills: list[Kill] = []

    def update(self) -> None:
        """Reads what is new."""
        for process, event in sorted(self._new(), key=lambda found: float(found[1]["at"])):
            _, number, _ = process.split("-", 2)
            self.sites[int(number) - 1].add(process, event)

    def _new(self) -> Iterator[tuple[str, Event]]:
        for file in sorted(self._directory.glob("site-*.jsonl")):
            with file.open("rb") as lines:
                lines.seek(self._read.get(file, 0))
                content = lines.read()
            whole = content[: content.rfind(b"\n") + 1]  # a killed process may leave half a line
            self._read[file] = self._read.get(file, 0) + len(whole)
            for line in whole.splitlines():
                try:
                    yield file.stem, json.loads(line)
                except ValueError:
                    continue
