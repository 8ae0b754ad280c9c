"""The verdict: what the story promises, checked against what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from examples.posttrain.verdict import Finding
from examples.posttrain_text.story import MAX_STALENESS

COMPARED = 8
"""Steps at the beginning and at the end whose mean reward is compared."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the training, as rank 0 has reported it.

    Attributes:
        step: its number, which is the version of the weights after it.
        reward: mean reward of its answers, from 0 to 1.
        versions: the versions of the weights that made its answers.
        unversioned: groups of which no version is known.
        ages: for each group, how many versions its weights were behind.
    """

    step: int
    reward: float
    versions: Sequence[int]
    unversioned: int
    ages: Sequence[int]

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Self:
        """Reads an event."""
        return cls(**{name: event[name] for name in ("step", "reward", "versions", "unversioned", "ages")})

    @property
    def shown_versions(self) -> str:
        """The versions as text, such as "3 to 5"."""
        if not self.versions:
            return "unknown"
        least, most = min(self.versions), max(self.versions)
        return str(least) if least == most else f"{least} to {most}"


def findings_of(
    steps: Sequence[Step],
    finished: Mapping[str, Any],
    served: Mapping[str, Any],
    answers: Mapping[str, str],
    away: float,
) -> list[Finding]:
    """What was promised, and whether it was kept.

    Args:
        steps: all steps of the training.
        finished: the last version and its digest at the site.
        served: the version and the digest of the engine.
        answers: the engine's most probable answer to each digit.
        away: seconds from the kill of the engine until its answers were trained again.
    """
    return [
        on_reward(steps),
        on_answers(answers),
        on_versions(steps),
        Finding(
            served["digest"] == finished["digest"] is not None,
            f"the engine serves the site's last weights bit by bit: version {finished['version']}, "
            f"digest {str(served['digest'])[:16]}",
        ),
        Finding(away < 120.0, f"the engine was killed, and after {away:.1f} s its answers were trained again"),
    ]


def on_reward(steps: Sequence[Step]) -> Finding:
    """The reward has risen."""
    first, last = (mean_reward(part) for part in (steps[:COMPARED], steps[-COMPARED:]))
    return Finding(last > first + 0.15, f"the reward rose from {first:.2f} in the first steps to {last:.2f} of 1")


def mean_reward(steps: Sequence[Step]) -> float:
    """Mean reward of some steps."""
    return sum(step.reward for step in steps) / max(1, len(steps))


def on_answers(answers: Mapping[str, str]) -> Finding:
    """The engine has learned more than one answer."""
    right = [digit for digit, answer in answers.items() if answer == str((int(digit) + 1) % 10)]
    return Finding(len(right) >= 3, f"the engine knows the digit after {len(right)} of {len(answers)} digits")


def on_versions(steps: Sequence[Step]) -> Finding:
    """Each group names the version that made it, and none is older than allowed."""
    unversioned = sum(step.unversioned for step in steps)
    ages = [age for step in steps for age in step.ages]
    oldest = max(ages, default=0)
    # A site that was started again makes the steps since its checkpoint once more.
    numbers = {step.step for step in steps}
    complete = numbers == set(range(1, max(numbers, default=0) + 1))
    return Finding(
        unversioned == 0 and bool(ages) and oldest <= MAX_STALENESS and complete,
        f"{len(ages)} groups in {len(steps)} steps: {unversioned} without a version, the oldest "
        f"{oldest} versions behind (at most {MAX_STALENESS})",
    )
