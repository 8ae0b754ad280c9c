"""What `Rollouts` makes, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from averaging.errors import ConfigError
from averaging.rl.rollouts.samples import TruncatedMode


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """What `Rollouts` makes, and where.

    Attributes:
        environment: its name, see `VerifiersEnvironment`; also at the feed.
        engine: address of the engine, see `EngineClient`.
        feed: address of the feed, see `FeedEnvironment`.
        environment_args: the environment's settings.
        tokenizer: folder or name of the model whose tokenizer the engine uses; None takes what the engine tells.
        renderer: verifiers' renderer of the model's chat template; None chooses it by the tokenizer's name.
        model: the model's name at the engine; None takes the first.
        group_size: rollouts of each task, which are posted together.
        sequences: sequences of each rollout that are trained; more than 1 for environments with several agents.
        concurrency: rollouts that are made at one time.
        max_groups: groups to post; None for no limit.
        truncated: what happens to rollouts that a limit has cut off.
        sampling: parameters of the engine, for example `{"temperature": 1.0, "max_tokens": 512}`.
        feed_options: `token_file`, `tls_ca`, `tls_cert` and `tls_key` for the feed. An https engine gets `tls_ca` too.

    Raises:
        ConfigError: a number is out of range.
    """

    environment: str
    engine: str
    feed: str
    environment_args: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    renderer: str | None = None
    model: str | None = None
    group_size: int = 8
    sequences: int = 1
    concurrency: int = 32
    max_groups: int | None = None
    truncated: TruncatedMode = TruncatedMode.DROP
    sampling: Mapping[str, Any] = field(default_factory=dict)
    feed_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("group_size", "sequences", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
