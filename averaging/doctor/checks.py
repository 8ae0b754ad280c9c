"""What a check is, and what it finds: one line, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from inspect import isawaitable
from typing import Any, Generic, TypeVar

from averaging.errors import AveragingError, CallRefusedError, RefusalCause, printable, refusal_cause

Subject = TypeVar("Subject")

MAX_FINDING = 600  # characters of a finding or a remedy, parts of which another peer may have written


class Severity(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"  # it may go wrong, or could not be checked
    FAILURE = "failure"  # something will not work

    @property
    def mark(self) -> str:
        return {Severity.OK: "✓", Severity.WARNING: "!", Severity.FAILURE: "✗"}[self]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    severity: Severity  # how bad it is
    text: str  # what was found, in one line
    remedy: str = ""  # what to do; empty if nothing has to be done, or if the text says it
    figures: Mapping[str, float] = field(default_factory=dict)  # what was measured, by names that end with the unit
    check: str = ""  # name of the check, such as `port`; docs/operate/doctor.md lists them
    peer: str = ""  # address of the other peer as the user gave it; empty for a check of this machine

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", printable(self.text, MAX_FINDING))
        object.__setattr__(self, "remedy", printable(self.remedy, MAX_FINDING))


def ok(text: str) -> Finding:
    return Finding(Severity.OK, text)


def warning(text: str, remedy: str = "") -> Finding:
    return Finding(Severity.WARNING, text, remedy)


def failure(text: str, remedy: str = "") -> Finding:
    return Finding(Severity.FAILURE, text, remedy)


@dataclass(frozen=True, slots=True)
class Check(Generic[Subject]):
    """A row of the tables of checks."""

    name: str
    ask: Callable[[Subject], Any]  # looks something up; returns the answer or awaits it, None if nothing is to judge
    judge: Callable[[Subject, Any], Finding | None]
    vital: bool = False  # whether the checks below are useless once this one has failed

    async def make(self, subject: Subject, peer: str = "") -> Finding | None:
        """Asks and judges. An error of this library is a finding too."""
        try:
            answer = self.ask(subject)
            if isawaitable(answer):
                answer = await answer
            found = None if answer is None else self.judge(subject, answer)
        except AveragingError as error:
            found = finding_of(error)
        return None if found is None else replace(found, check=self.name, peer=peer)


def finding_of(error: AveragingError) -> Finding:
    # The message of an error says what to do.
    if refusal_cause(error) is RefusalCause.NOT_SERVED:
        return warning("this cannot be asked: the peer has another release", "update that peer")
    busy = isinstance(error, CallRefusedError) and not error.definite
    return warning(error.reason, "ask again") if busy else failure(error.reason)
