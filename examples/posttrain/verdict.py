"""The verdict: what the story promises, checked against what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from examples.posttrain.story import MAX_STALENESS

COMPARED = 8
"""Steps at the beginning and at the end whose mean reward is compared."""

SOON = 300.0
"""Seconds within which what was killed must be at work again."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise, and whether it was kept."""

    kept: bool
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the training, as rank 0 has reported it.

    Attributes:
        at: when it was complete, in seconds since the epoch.
        step: its number, which is the version of the weights after it.
        reward: mean reward of its answers, from 0 to 1.
        versions: the versions of the weights that made its answers.
        unversioned: groups of which no version is known.
        ages: for each group, how many versions its weights were behind.
        batch: digest of its groups.
    """

    at: float
    step: int
    reward: float
    versions: Sequence[int]
    unversioned: int
    ages: Sequence[int]
    batch: str

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Self:
        """Reads an event."""
        return cls(**{name: event[name] for name in cls.__dataclass_fields__})

    @property
    def shown_versions(self) -> str:
        """The versions as text, such as "3 to 5"."""
        if not self.versions:
            return "unknown"
        least, most = min(self.versions), max(self.versions)
        return str(least) if least == most else f"{least} to {most}"


def on_reward(steps: Sequence[Step]) -> Finding:
    """The reward has risen."""
    first, last = (mean_reward(part) for part in (steps[:COMPARED], steps[-COMPARED:]))
    return Finding(last > first + 0.15, f"the reward rose from {first:.2f} in the first steps to {last:.2f} of 1")


def mean_reward(steps: Sequence[Step]) -> float:
    return sum(step.reward for step in steps) / max(1, len(steps))


def on_answers(answers: Mapping[str, str]) -> Finding:
    """The engine, whose most probable answer to each digit is given, has learned more than one."""
    right = [digit for digit, answer in answers.items() if answer == str((int(digit) + 1) % 10)]
    return Finding(len(right) >= 3, f"the engine knows the digit after {len(right)} of {len(answers)} digits")


def on_versions(steps: Sequence[Step]) -> Finding:
    """Each group names the version that made it, and none is older than allowed."""
    unversioned = sum(step.unversioned for step in steps)
    ages = [age for step in steps for age in step.ages]
    oldest = max(ages, default=0)
    return Finding(
        unversioned == 0 and bool(ages) and oldest <= MAX_STALENESS,
        f"{len(ages)} groups in {len(steps)} steps: {unversioned} without a version, the oldest "
        f"{oldest} versions behind (at most {MAX_STALENESS})",
    )


def on_batches(steps: Sequence[Step], last: int) -> Finding:
    """Every step up to the last one was made, each from a batch of its own, also if it was made again after a kill."""
    batches: dict[int, set[str]] = {}
    for step in steps:
        batches.setdefault(step.step, set()).add(step.batch)
    complete = batches.keys() == set(range(1, last + 1))
    twice = sum(len(of_step) for of_step in batches.values()) - len(set().union(*batches.values()))
    changed = sum(len(of_step) > 1 for of_step in batches.values())
    return Finding(
        complete and twice == 0 and changed == 0,
        f"{len(batches)} of {last} steps, {len(steps) - len(batches)} of them made again after a kill: {changed} from "
        f"another batch, {twice} batches in two steps",
    )


def on_weights(finished: Mapping[str, Any], served: Mapping[str, Any]) -> Finding:
    """The engine serves the last weights; both arguments have the digest at their side."""
    return Finding(
        served["digest"] == finished["digest"] is not None,
        f"the engine serves the site's last weights bit by bit: version {finished['version']}, "
        f"digest {str(served['digest'])[:16]}",
    )


def on_kills(seconds: Mapping[str, float]) -> list[Finding]:
    """What was killed, and the seconds after which it was at work again."""
    return [
        Finding(passed < SOON, f"{what} was killed, and at work again after {passed:.1f} s")
        for what, passed in seconds.items()
    ]
