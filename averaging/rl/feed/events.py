"""What a feed tells of itself, as `averaging feed` prints it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: `str` is a line about it."""

    def fields(self) -> dict[str, Any]:
        """Returns the event as `--json` prints it, with its name as `event`."""
        return {"event": type(self).__name__.removesuffix("Event").lower(), **asdict(self)}


@dataclass(frozen=True, slots=True)
class RegisteredEvent(Event):
    """The first trainer of a run has registered."""

    batch_size: int
    starting_step: int
    num_steps: int

    def __str__(self) -> str:
        return f"a trainer has registered: batches of {self.batch_size}, from step {self.starting_step}"


@dataclass(frozen=True, slots=True)
class TrainerEvent(Event):
    """Another trainer has registered."""

    registration: int

    def __str__(self) -> str:
        number = self.registration
        return f"another trainer has registered, as number {number}; an earlier one that still runs gets an error"


@dataclass(frozen=True, slots=True)
class EnvironmentEvent(Event):
    """An environment has registered."""

    env_id: int
    name: str

    def __str__(self) -> str:
        return f"environment {self.env_id} has registered: {self.name}"


@dataclass(frozen=True, slots=True)
class SilentEvent(EnvironmentEvent):
    """An environment for which the run waits posts nothing."""

    def __str__(self) -> str:
        return (
            f"environment {self.env_id} posts nothing, and others get its part of the batches until it does: "
            f"{self.name}"
        )


@dataclass(frozen=True, slots=True)
class ReturnedEvent(EnvironmentEvent):
    """An environment that was silent has posted."""

    def __str__(self) -> str:
        return f"environment {self.env_id} is back, and has its part of each batch again: {self.name}"


@dataclass(frozen=True, slots=True)
class StaleEvent(Event):
    """Groups of an environment, or without one, do not fit the trainer's version, and were dropped."""

    env_id: int | None
    name: str
    groups: int
    reason: str
    newest_version: int | None

    def __str__(self) -> str:
        return f"{self.groups} groups of {self.name} are {self.reason}: the trainer is at version {self.newest_version}"


@dataclass(frozen=True, slots=True)
class BatchEvent(Event):
    """A batch was delivered."""

    step: int
    groups: int
    sequences: int

    def __str__(self) -> str:
        return f"step {self.step}: delivered {self.sequences} sequences in {self.groups} groups"


@dataclass(frozen=True, slots=True)
class ResetEvent(Event):
    """The run was dropped."""

    def __str__(self) -> str:
        return "GET /reset_data has dropped everything"
