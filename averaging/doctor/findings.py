"""What `averaging doctor` finds: one line for each check, with what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from averaging.errors import printable

MAX_FINDING = 600
"""Maximum characters of a finding or a remedy, parts of which another peer may have written."""


class Severity(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It may go wrong, or could not be checked."""
    FAILURE = "failure"
    """Something will not work."""

    @property
    def mark(self) -> str:
        """The sign at the beginning of its line."""
        return {Severity.OK: "✓", Severity.WARNING: "!", Severity.FAILURE: "✗"}[self]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: Name of the check, such as `port`; docs/operate/doctor.md lists them.
        severity: How bad it is.
        text: What was found, in one line.
        remedy: What to do; empty if nothing has to be done.
        peer: Address of the other peer as the user gave it; empty for a check of this machine.
        figures: What was measured, by names that end with the unit.
    """

    check: str
    severity: Severity
    text: str
    remedy: str = ""
    peer: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", printable(self.text, MAX_FINDING))
        object.__setattr__(self, "remedy", printable(self.remedy, MAX_FINDING))

    def __str__(self) -> str:
        return f"{self.severity.mark} {self.check}: {self.text}{f' → {self.remedy}' if self.remedy else ''}"


def ok(check: str, text: str, peer: str = "") -> Finding:
    """A finding with which all is well."""
    return Finding(check, Severity.OK, text, "", peer)


def warning(check: str, text: str, remedy: str = "", peer: str = "") -> Finding:
    """A finding that may matter, or a check that could not be made."""
    return Finding(check, Severity.WARNING, text, remedy, peer)


def failure(check: str, text: str, remedy: str = "", peer: str = "") -> Finding:
    """A finding because of which something will not work."""
    return Finding(check, Severity.FAILURE, text, remedy, peer)


def told(check: str, error: Exception, peer: str = "") -> Finding:
    """The failure that an error of this library describes: its messages end with `; what to do` or `: what to do`."""
    text = printable(getattr(error, "reason", str(error)))
    for separator in ("; ", ": "):
        found, _, remedy = text.rpartition(separator)
        if found:
            return failure(check, found, remedy, peer)
    return failure(check, text, "", peer)


def exit_code(findings: Iterable[Finding]) -> int:
    """The exit code of the command: 1 if something will not work."""
    return int(any(finding.severity is Severity.FAILURE for finding in findings))
