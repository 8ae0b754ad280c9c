"""What is made: the options of rollouts, scored ones as sequences of tokens, and groups as a feed takes them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from averaging.errors import ConfigError, RolloutError
from averaging.rl.feed import MAX_VERSIONS, Posted, ScoredData

# Of a token that the model did not write: its mask and log-probability, as environments of atroposlib give them.
UNTRAINED, NO_LOGPROB = -100, 1.0


class TruncatedMode(StrEnum):
    """What happens to a rollout that a limit has cut off."""

    DROP = "drop"  # it is made again, and its group is dropped if that is cut off too often
    MASK = "mask"  # it is posted without a token to train, so that its score counts in the group only
    TRAIN = "train"  # it is posted like others, with `{"truncated": true}` in its `overrides`


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """What `Rollouts` makes, and where.

    Raises:
        ConfigError: a number is out of range.
    """

    environment: str  # its name, also at the feed, see `VerifiersEnvironment`
    engine: str  # "http://HOST:PORT" or "https://HOST:PORT"; a token, or API key, may be its password
    feed: str  # see `FeedEnvironment`
    environment_args: Mapping[str, Any] = field(default_factory=dict)  # its own settings
    tokenizer: str | None = None  # folder or name of the model whose tokenizer the engine uses; None: as it tells
    renderer: str | None = None  # verifiers' renderer of the chat template; None: by the tokenizer's name
    model: str | None = None  # its name at the engine; None: the first
    group_size: int = 8  # rollouts of each task, which are posted together
    sequences: int = 1  # of each rollout that are trained; more than 1 for environments with several agents
    concurrency: int = 32  # rollouts that are made at one time
    max_groups: int | None = None  # to post; None: no limit
    truncated: TruncatedMode = TruncatedMode.DROP
    sampling: Mapping[str, Any] = field(default_factory=dict)  # for example `{"temperature": 1.0, "max_tokens": 512}`
    # `token_file`, `tls_ca`, `tls_cert` and `tls_key` for the feed. An https engine gets `tls_ca` too.
    feed_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("group_size", "sequences", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")


class ScoredSequence(msgspec.Struct, frozen=True):
    """One sequence of a rollout. A `RolloutError` is raised for one that cannot be trained."""

    tokens: list[int]  # ids of prompt, replies and what was between them
    sampled: list[bool]  # for each token whether the model has written it
    logprobs: list[float]  # for each token its log-probability when it was sampled; any number where it was not
    score: float
    versions: list[int]  # of the weights that wrote it, ascending; empty if one of them is unknown
    truncated: bool = False  # whether a limit has cut it off

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
    """Puts the sequences of a group together. Of many versions it names the oldest, which counts, and the newest."""
    known = all(sample.versions for sample in samples)
    versions = sorted({version for sample in samples for version in sample.versions}) if known else []
    named = [*versions[:1], *versions[1:][1 - MAX_VERSIONS :]]
    cut_off = any(sample.truncated for sample in samples)
    return ScoredData(
        tokens=[sample.tokens for sample in samples],
        masks=[_trained(sample, truncated) for sample in samples],
        scores=[sample.score for sample in samples],
        inference_logprobs=[
            [logprob if sampled else NO_LOGPROB for logprob, sampled in zip(each.logprobs, each.sampled, strict=True)]
            for each in samples
        ],
        overrides=[{"truncated": True} if sample.truncated else {} for sample in samples] if cut_off else None,
        version=named if len(named) > 1 else named[0] if named else None,
    )


def _trained(sample: ScoredSequence, truncated: TruncatedMode) -> list[int]:
    if sample.truncated and truncated is TruncatedMode.MASK:
        return [UNTRAINED] * len(sample.tokens)
    return [token if sampled else UNTRAINED for token, sampled in zip(sample.tokens, sample.sampled, strict=True)]


def is_too_old(served: int | None, answer: Posted) -> bool:
    """Returns whether rollouts with this version of the engine, or none, are too old for a feed that answered so."""
    if answer.newest_version is None or answer.max_staleness is None:
        return False
    return served is None or served < answer.newest_version - answer.max_staleness
