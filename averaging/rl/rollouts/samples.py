"""Scored rollouts as sequences of tokens, and groups of them as a feed takes them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from averaging.errors import RolloutError
from averaging.rl.feed import MAX_VERSIONS, ScoredData

UNTRAINED = -100
"""The mask of a token that the model did not write."""

NO_LOGPROB = 1.0
"""The log-probability of a token that the model did not write, as environments of atroposlib give it."""


class TruncatedMode(StrEnum):
    """What happens to a rollout that a limit has cut off."""

    DROP = "drop"
    """It is made again, and its group is dropped if that is cut off too often."""
    MASK = "mask"
    """It is posted without a token to train, so that its score counts in the group only."""
    TRAIN = "train"
    """It is posted like others, with `{"truncated": true}` in its `overrides`."""


class ScoredSequence(msgspec.Struct, frozen=True):
    """One sequence of a rollout.

    Attributes:
        tokens: ids of prompt, replies and what was between them.
        sampled: for each token whether the model has written it.
        logprobs: for each token its log-probability when it was sampled; any number where it was not.
        score: the reward.
        versions: the versions of the weights that wrote it, ascending; empty if one of them is unknown.
        truncated: whether a limit has cut it off.

    Raises:
        RolloutError: lengths do not match, a number is not finite, or the model has written nothing.
    """

    tokens: list[int]
    sampled: list[bool]
    logprobs: list[float]
    score: float
    versions: list[int]
    truncated: bool = False

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.sampled) == len(self.logprobs):
            raise RolloutError("lengths", f"{len(self.tokens)} tokens have {len(self.logprobs)} log-probabilities")
        if not any(self.sampled):
            raise RolloutError("empty", "the model has written no token")
        if not math.isfinite(self.score):
            raise RolloutError("score", f"the score is {self.score}; a rubric must give a finite number")
        if not all(map(math.isfinite, self.logprobs)):
            raise RolloutError("logprobs", "a log-probability is not finite")


class SampledGroup(msgspec.Struct, frozen=True):
    """The scored sequences of so many rollouts of one task. `key` identifies its post."""

    number: int
    key: str
    rollouts: int
    sequences: list[ScoredSequence]


def group_of(samples: Sequence[ScoredSequence], truncated: TruncatedMode) -> ScoredData:
    """Puts the sequences of a group together, for one batch.

    The group's `version` is that of all its weights, a list if they changed meanwhile, and None if a part of them is
    unknown. It names at most `MAX_VERSIONS`: the oldest, which counts for its age, and the newest.
    """
    known = all(sample.versions for sample in samples)
    versions = sorted({version for sample in samples for version in sample.versions}) if known else []
    cut_off = any(sample.truncated for sample in samples)
    return ScoredData(
        tokens=[sample.tokens for sample in samples],
        masks=[_masks(sample, truncated) for sample in samples],
        scores=[sample.score for sample in samples],
        inference_logprobs=[_logprobs(sample) for sample in samples],
        overrides=[_overrides(sample) for sample in samples] if cut_off else None,
        version=_version(versions),
    )


def _version(versions: Sequence[int]) -> int | list[int] | None:
    if not versions:
        return None
    return versions[0] if len(versions) == 1 else [versions[0], *versions[1:][-(MAX_VERSIONS - 1) :]]


def _masks(sample: ScoredSequence, truncated: TruncatedMode) -> list[int]:
    if sample.truncated and truncated is TruncatedMode.MASK:
        return [UNTRAINED] * len(sample.tokens)
    return [token if is_sampled else UNTRAINED for token, is_sampled in zip(sample.tokens, sample.sampled, strict=True)]


def _logprobs(sample: ScoredSequence) -> list[float]:
    pairs = zip(sample.logprobs, sample.sampled, strict=True)
    return [logprob if is_sampled else NO_LOGPROB for logprob, is_sampled in pairs]


def _overrides(sample: ScoredSequence) -> dict[str, bool]:
    return {"truncated": True} if sample.truncated else {}


class WantedVersion(msgspec.Struct, frozen=True):
    """Weights that a feed wants from now on.

    Attributes:
        needed: the oldest version that is not too old.
        newest: the trainer's newest version.
    """

    needed: int
    newest: int

    def holds(self, served: int | None) -> bool:
        """Returns whether rollouts with the version that the engine serves would be too old, or of unknown weights."""
        return served is None or served < self.needed


def wanted_version(newest: int | None, max_staleness: int | None) -> WantedVersion | None:
    """Reads from a feed's answer which versions it takes; None if it takes any."""
    if newest is None or max_staleness is None:
        return None
    return WantedVersion(max(0, newest - max(0, max_staleness)), newest)


def mean(numbers: Sequence[float]) -> float:
    """Returns the mean; 0 of none."""
    return sum(numbers) / len(numbers) if numbers else 0.0
