"""What a command tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CommandEvent:
    """Something that happened: its name, a line about it, and what a program may want to know of it."""

    name: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text

    def as_json(self) -> dict[str, Any]:
        """Returns the event as `--json` prints it."""
        return {"event": self.name, **self.fields}
