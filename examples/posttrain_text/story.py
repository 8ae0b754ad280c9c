"""What all processes of the story know: sizes, addresses and files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.ports import free_ports

RUN_ID = "posttrain-text"

GROUP_SIZE, GROUPS = 8, 16
"""Answers to one question, which are compared with each other, and groups in one step."""

ANSWER_TOKENS, MAX_TOKENS = 3, 32
"""Tokens of an answer at most, and of a sequence."""

MAX_STALENESS = 4
"""Versions that a group may be behind the trainer's newest."""

CHECKPOINT_STEPS = 10

ENVIRONMENT = "examples.posttrain_text.environment"

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
        """The directory."""
        return Path(self.directory)

    @property
    def model(self) -> Path:
        """The folder of the model, with random weights."""
        return self.path / "model"

    @property
    def checkpoint(self) -> Path:
        """The weights of the last checkpoint."""
        return self.path / "checkpoint.safetensors"

    @property
    def file(self) -> Path:
        """Where this is written for the other processes."""
        return self.path / "story.json"

    def write(self) -> None:
        """Writes it for the other processes."""
        self.file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Story:
        """Reads what `write` has written."""
        document = json.loads(file.read_text())
        document["ports"] = Ports(**document["ports"])
        return cls(**document)


def new_ports() -> Ports:
    """Ports that are free now."""
    return Ports(*free_ports(5))
