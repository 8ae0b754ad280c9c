"""The options of rollouts, and an environment of verifiers: its tasks, and groups of rollouts as a feed takes them.

verifiers' training client renders each prompt with the model's tokenizer and keeps the ids of all tokens, so nothing is
tokenized a second time: what the model has written is known token by token, in conversations of many turns too.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from averaging.errors import ConfigError, RolloutError, printable
from averaging.rl.feed import MAX_VERSIONS, Posted, ScoredData

if TYPE_CHECKING:
    from verifiers.v1 import Env, Episode, ModelContext, Task, Trace

    from averaging.rl.rollouts.engine import EngineGateway


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


CHAT = "averaging-chat"  # the name under which verifiers finds `ChatHarness`
TOOLLESS = frozenset({"null"})  # agents of verifiers that do the same
HINT = "NAME is that of a package or module that can be imported here, with a Taskset of verifiers 0.4 in __all__"


class VerifiersEnvironment:
    """An environment of verifiers.

    Args:
        name: its package or module, or `ENV+TASKSET` for one of verifiers' environments over another's tasks, such as
            "best-of-n+gsm8k".
        arguments: its own settings, as the `[env]` block of verifiers has them, for example
            `{"taskset": {"split": "train"}, "agent": {"max_turns": 4}}`.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any] | None = None) -> None:
        try:
            import verifiers.v1 as vf
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{error.name} is not installed; run in the checkout: pip install '.[rollouts]'"
            ) from None
        self.name = name
        _register("verifiers.v1.harnesses", CHAT, "averaging.rl.rollouts.chat_harness")
        try:
            self._env: Env = vf.load_environment(_config(name, arguments or {}))
        except Exception as error:  # what an environment's own code raises
            raise ConfigError(f"the environment {name!r} cannot be loaded: {_described(error)}; {HINT}") from error

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Rollouts are made while it is entered."""
        serving: AbstractAsyncContextManager[None] = self._env.serving()
        return serving

    def tasks(self) -> Iterator[Task]:
        """Yields tasks without end: each pass in a random order, or as a program makes them without end."""
        taskset, task = self._env.taskset, None
        while True:
            try:
                for task in taskset.shuffle(random.getrandbits(32)) if taskset.bounded else taskset:
                    yield task
            except Exception as error:  # what an environment's own code raises
                raise ConfigError(f"the tasks of {self.name!r} cannot be loaded: {_described(error)}") from error
            if task is None:
                raise ConfigError(f"the environment {self.name!r} has no task")

    async def roll_out(self, task: Task, context: ModelContext, gateway: EngineGateway) -> list[ScoredSequence]:
        """Makes one rollout and scores it. Returns the sequences that are to be trained, or raises `RolloutError`."""
        (slot,) = self._env.slots(task)
        episode: Episode = await self._env.run_slot(slot, context)
        versions = {trace.id: gateway.take_versions(trace.id) for trace in episode.traces}
        if not episode.ok:
            raise _failure_of(episode)
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        sequences = [each for trace in trained for each in _sequences(trace, versions[trace.id])]
        if not sequences:
            raise RolloutError("empty", "the model has written nothing that is to be trained")
        return sequences


def model_context(
    model: str, gateway: EngineGateway, sampling: Mapping[str, Any], tokenizer: str, renderer: str | None
) -> ModelContext:
    """Returns what verifiers needs to ask the model."""
    import renderers.client
    import verifiers.v1 as vf

    from averaging.rl.rollouts.engine import SECRET_HEADER

    # renderers has one lock for the process, which belongs to the first event loop in which somebody waits for it.
    renderers.client._max_prompt_len_lock = asyncio.Lock()
    try:
        client = vf.TrainClientConfig(
            base_url=f"{gateway.url}/v1",
            api_key_var="AVERAGING_NO_API_KEY",
            headers={SECRET_HEADER: gateway.secret},
            renderer_model_name=tokenizer,
            renderer=None if renderer is None else {"name": renderer},
        )
        return vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig(**sampling))
    except ValueError as error:
        raise ConfigError(_described(error)) from None


def check_tokenizer(tokenizer: str, renderer: str | None) -> None:
    """Loads the tokenizer once, so that its lack is an error at the start and not of each rollout."""
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer
    from renderers.base import load_tokenizer

    try:
        config = None if renderer is None else TypeAdapter(RendererConfig).validate_python({"name": renderer})
        made = create_renderer(load_tokenizer(tokenizer), config)
        made.render([{"role": "user", "content": "?"}], add_generation_prompt=True)
    except Exception as error:  # of three packages
        raise ConfigError(
            f"the tokenizer of {tokenizer!r} cannot be used: {_described(error)}; give --tokenizer the folder or name "
            "of a model whose tokenizer has a chat template"
        ) from None


def _config(name: str, arguments: Mapping[str, Any]) -> Any:
    """The environment's settings, with seats that play in this process unless they say otherwise."""
    import verifiers.v1 as vf

    env, _, taskset = name.rpartition("+")
    taskset = _imported("verifiers.v1.tasksets", taskset)
    data = dict(arguments)
    data["taskset"] = {**data.get("taskset", {}), "id": taskset}
    if env:
        data["id"] = _imported("verifiers.v1.envs", env)
    has_own = vf.default_harness_id(taskset) == taskset
    for seat, declared in vf.env_config_type(taskset, data.get("id", "")).model_fields.items():
        if isinstance(declared.default, vf.AgentConfig):
            data[seat] = _seat(dict(data.get(seat) or {}), declared.default, has_own)
    return vf.resolve_env_config(data)


def _seat(given: dict[str, Any], default: Any, has_own: bool) -> dict[str, Any]:
    given.setdefault("runtime", {"type": "subprocess"})
    harness = default.harness
    if (harness is None and not has_own) or (harness is not None and harness.id in TOOLLESS):
        given.setdefault("harness", {"id": CHAT})
    return given


def _imported(group: str, name: str) -> str:
    """Has verifiers find a module in a package, whose dotted name it cannot import. Returns the name to give it."""
    if "." not in name or "/" in name:
        return name
    return _register(group, name.replace(".", "-").lower(), name)


def _register(group: str, plugin: str, module: str) -> str:
    sys.modules[f"{group}.{plugin.replace('-', '_')}"] = importlib.import_module(module)
    return plugin


def _sequences(trace: Trace, versions: list[int]) -> Iterator[ScoredSequence]:
    """The branches of a conversation: more than one if it was not only continued."""
    if not trace.rewards or any(reward is None for reward in trace.rewards.values()):
        raise RolloutError("unscored", "the environment has given no reward")
    for branch in trace.branches:
        mask = branch.sampled_mask
        if not branch.trainable or not any(mask):
            continue
        if any(node.sampled and len(node.logprobs) != sum(node.mask) for node in branch.nodes):
            raise RolloutError("logprobs", "the engine has not told the log-probability of each token")
        yield ScoredSequence(
            tokens=branch.token_ids,
            sampled=mask,
            logprobs=branch.logprobs,
            score=float(trace.reward),
            versions=versions,
            truncated=bool(trace.is_truncated or trace.is_timeout),
        )


def _failure_of(episode: Episode) -> RolloutError:
    errors = [error for each in (episode, *episode.traces) for error in each.errors]
    if not errors:
        return RolloutError("failed", "verifiers says that it failed, and not why")
    return RolloutError(printable(errors[-1].type, 60), printable(errors[-1].message, 500))


def _described(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {error}", 500)
