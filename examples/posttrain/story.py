"""What all processes of the story know: sizes, addresses, files, and how they report what happens."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.ports import free_ports

RUN_ID = "posttrain"

GROUP_SIZE, GROUPS = 8, 16
"""Answers to one question, which are compared with each other, and groups in one step."""

ANSWER_TOKENS, MAX_TOKENS = 3, 32
"""Tokens of an answer at most, and of a sequence."""

MAX_STALENESS = 4
"""Versions that a group may be behind the trainer's newest."""

CHECKPOINT_STEPS = 10

ENVIRONMENT = "examples.posttrain.environment"

MODEL_NAME = "small"


@dataclass(frozen=True)
class Ports:
    """The ports of the processes, all on this machine.

    Attributes:
        rendezvous: register of the site's torchrun job.
        averager: of rank 0; rank 1 has the next port.
        publisher: of the weights.
        engine: HTTP.
        feed: HTTP.
    """

    rendezvous: int
    averager: int
    publisher: int
    engine: int
    feed: int


@dataclass(frozen=True)
class Story:
    """The configuration of one run of the story.

    Attributes:
        directory: for logs, events and results.
        steps: steps of the training.
        seed: of the model.
        ports: where the processes listen.
    """

    directory: str
    steps: int
    seed: int
    ports: Ports

    @property
    def path(self) -> Path:
        return Path(self.directory)

    @property
    def model(self) -> Path:
        """The folder of the model, with random weights."""
        return self.path / "model"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    @property
    def file(self) -> Path:
        """Where this is written for the other processes."""
        return self.path / "story.json"

    def write(self) -> None:
        self.file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Story:
        document = json.loads(file.read_text())
        document["ports"] = Ports(**document["ports"])
        return cls(**document)


def new_ports() -> Ports:
    """Ports that are free now."""
    return Ports(*free_ports(5))


def local(port: int) -> str:
    """`host:port` on this machine."""
    return f"127.0.0.1:{port}"


class Events:
    """Writes what one process has to report, as lines of JSON that outlive a kill."""

    def __init__(self, directory: Path, process: str) -> None:
        self._file = directory / "events" / f"{process}.jsonl"

    def add(self, event: str, **values: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"at": time.time(), "event": event, **values}) + "\n")


class EventReader:
    """Reads what processes have written with `Events`.

    Args:
        directory: of the story.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "events"
        self._read: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        """The events since the last call, in the order of time."""
        events = []
        for file in sorted(self._directory.glob("*.jsonl")):
            with file.open("rb") as lines:
                lines.seek(self._read.get(file, 0))
                content = lines.read()
            # A killed process may leave half a line, which its next life goes on behind.
            whole = content[: content.rfind(b"\n") + 1]
            self._read[file] = self._read.get(file, 0) + len(whole)
            for line in whole.splitlines():
                try:
                    events.append(json.loads(line))
                except ValueError:
                    continue
        return sorted(events, key=lambda event: float(event["at"]))
