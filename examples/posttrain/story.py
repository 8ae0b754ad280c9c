"""What all processes of the story know: sizes, addresses and files."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.ports import free_ports

GROUP_SIZE = 8
"""Answers to one prompt, which are compared with each other."""

GROUPS = 16
"""Groups in one step of a site."""

RUN_ID = "posttrain"


@dataclass(frozen=True)
class Site:
    """The addresses of one site; all are ports of this machine.

    Attributes:
        rendezvous: register of its torchrun job.
        averager: of shard 0; shard 1 has the next port.
        publisher: of the weights.
        actor: model worker of the actor, at rank 0.
        reward: model worker of the reward.
        feed: HTTP.
    """

    rendezvous: int
    averager: int
    publisher: int
    actor: int
    reward: int
    feed: int


@dataclass(frozen=True)
class Story:
    """The configuration of one run of the story.

    Attributes:
        directory: for logs, events and results.
        steps: local steps of each site.
        sync_every: local steps between two rounds of the sites.
    """

    directory: str
    steps: int
    sync_every: int
    seed: int
    sites: tuple[Site, ...]

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(self.directory)

    @property
    def warm(self) -> Path:
        """Weights after the supervised warm-up."""
        return self.path / "warm.safetensors"

    def final(self, site: int) -> Path:
        """The weights at the end at one site."""
        return self.path / f"site-{site + 1}.safetensors"

    def write(self) -> Path:
        """Writes it for the other processes, and returns the file."""
        file = self.path / "story.json"
        file.write_text(json.dumps(asdict(self)))
        return file

    @classmethod
    def read(cls, file: str) -> Story:
        """Reads what `write` has written."""
        found = json.loads(Path(file).read_text())
        found["sites"] = tuple(Site(**site) for site in found["sites"])
        return cls(**found)


class Events:
    """Writes what one process has to report, as lines of JSON that outlive a kill."""

    def __init__(self, directory: Path, process: str) -> None:
        self._file = (directory / "events" / f"{process}.jsonl").open("a", buffering=1)

    def add(self, event: str, **values: Any) -> None:
        """Adds one event."""
        self._file.write(json.dumps({"at": time.time(), "event": event, **values}) + "\n")


def local(port: int) -> str:
    """`host:port` on this machine."""
    return f"127.0.0.1:{port}"


def free_sites(count: int) -> tuple[Site, ...]:
    """Sites whose ports are free now."""
    ports = iter(free_ports(6 * count))
    return tuple(Site(*(next(ports) for _ in range(6))) for _ in range(count))
