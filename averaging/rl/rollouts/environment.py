"""An environment of verifiers: its tasks, and rollouts of them as sequences of tokens.

verifiers' training client renders each prompt with the model's tokenizer and keeps the ids of all tokens, so nothing is
tokenized a second time: what the model has written is known token by token, in conversations of many turns too.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from averaging.errors import ConfigError, RolloutError, printable
from averaging.rl.rollouts.samples import ScoredSequence

if TYPE_CHECKING:
    from verifiers.v1 import Env, Episode, ModelContext, Task, Trace

    from averaging.rl.rollouts.engine import EngineGateway

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
    for seat, field in vf.env_config_type(taskset, data.get("id", "")).model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            data[seat] = _seat(dict(data.get(seat) or {}), field.default, has_own)
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
