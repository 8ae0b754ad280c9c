"""What a master knows: the workers, the models that they hold, and the calls between models. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from averaging.common.addresses import parse_address
from averaging.errors import ConfigError
from averaging.workers.graph import Call, Levels
from averaging.workers.hooks import ParamRealloc
from averaging.workers.samples import KeySpec

_NAME = re.compile(r"[A-Za-z0-9][\w./-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Topology:
    """How a model is divided over its workers: data-parallel, tensor-parallel and pipeline-parallel ranks.

    Raises:
        ConfigError: A number is below 1.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.pp) < 1:
            raise ConfigError(f"{self} must have at least one rank of each kind")

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.dp * self.tp * self.pp


@dataclass(frozen=True, slots=True, order=True)
class ModelShardID:
    """The part of a model at one worker. Its text, such as `actor@dp0-tp0-pp0`, is a handler of requests.

    Attributes:
        is_dp_head: Whether it gives the output of its data-parallel rank: the last pipeline rank, tensor rank 0.
    """

    model: str
    dp_rank: int = 0
    tp_rank: int = 0
    pp_rank: int = 0
    is_dp_head: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        return f"{self.model}@dp{self.dp_rank}-tp{self.tp_rank}-pp{self.pp_rank}"


@dataclass(frozen=True)
class Model:
    """A model and its workers.

    Attributes:
        name: For example `actor`.
        workers: Names of its workers, in the order of the data-parallel, then pipeline, then tensor rank. One worker
            may hold several models.
        topology: One data-parallel rank for each worker if None.
        replicated: Whether all data-parallel ranks hold the same parameters. A worker that was lost and comes back then
            takes those of another rank.

    Raises:
        ConfigError: The number of workers is not that of the topology, or a worker is named twice.
    """

    name: str
    workers: tuple[str, ...]
    topology: Topology | None = None
    replicated: bool = False

    def __post_init__(self) -> None:
        if self.layout.size != len(self.workers) or len(set(self.workers)) < len(self.workers):
            raise ConfigError(
                f"model {self.name!r} has the workers {', '.join(self.workers)} for {self.layout}; name each of its "
                f"{self.layout.size} workers once"
            )

    @property
    def layout(self) -> Topology:
        """The topology."""
        return self.topology or Topology(dp=max(1, len(self.workers)))

    @cached_property
    def shards(self) -> dict[ModelShardID, str]:
        """The worker of each shard."""
        layout = self.layout
        ids = [
            ModelShardID(self.name, dp, tp, pp, is_dp_head=pp == layout.pp - 1 and tp == 0)
            for dp in range(layout.dp)
            for pp in range(layout.pp)
            for tp in range(layout.tp)
        ]
        return dict(zip(ids, self.workers, strict=True))

    def of_rank(self, dp_rank: int) -> dict[ModelShardID, str]:
        """The shards of one data-parallel rank."""
        return {shard: worker for shard, worker in self.shards.items() if shard.dp_rank == dp_rank}

    @property
    def heads(self) -> dict[int, str]:
        """The worker of the DP head of each data-parallel rank."""
        return {shard.dp_rank: worker for shard, worker in self.shards.items() if shard.is_dp_head}


@dataclass(frozen=True)
class Plan:
    """Everything that a master drives.

    Attributes:
        workers: `host:port` of each worker, by name.
        models: The models.
        calls: The calls of models in one step.
        batch_size: Samples in one step.
        data_keys: Names of the tensors that the dataset has.
        keys: Dtype and shape of tensors, by name. The workers check them; other tensors are not checked.

    Raises:
        ConfigError: Something is unknown, named twice, or the calls depend on each other in a cycle.
    """

    workers: Mapping[str, str]
    models: tuple[Model, ...]
    calls: tuple[Call, ...]
    batch_size: int
    data_keys: tuple[str, ...]
    keys: Mapping[str, KeySpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, not {self.batch_size}")
        for endpoint in self.workers.values():
            parse_address(endpoint)
        for kind, names in {
            "worker": list(self.workers),
            "model": [model.name for model in self.models],
            "call": [call.name for call in self.calls],
        }.items():
            for name in names:
                if not _NAME.fullmatch(name) or names.count(name) > 1:
                    raise ConfigError(f"{name!r} is no name of a {kind}, or names two; give each another name")
        for model in self.models:
            if unknown := [worker for worker in model.workers if worker not in self.workers]:
                raise ConfigError(
                    f"model {model.name!r} has the unknown worker {unknown[0]!r}; the plan has {_listed(self.workers)}"
                )
        for call in self.calls:
            self._check_call(call)
        _ = self.levels

    @cached_property
    def levels(self) -> Levels:
        """The calls in the order in which they can run; those of one level run together.

        Raises:
            ConfigError: There is a cycle, which the message names.
        """
        return Levels(self.calls, self.data_keys)

    @cached_property
    def by_name(self) -> dict[str, Model]:
        """The models by name."""
        return {model.name: model for model in self.models}

    @property
    def data_model(self) -> Model:
        """The model whose DP heads hold the dataset: that of the first call."""
        return self.by_name[self.levels.calls[0][0].model]

    def worker_of(self, handler: str) -> str:
        """The worker to which requests for a handler go.

        Raises:
            ConfigError: The plan has no such worker or shard.
        """
        if handler in self.workers:
            return handler
        found = self._routes.get(handler)
        if found is None:
            raise ConfigError(
                f"{handler!r} is neither a worker nor a shard of the plan; it has {_listed(self.workers)} and "
                f"{_listed(self._routes)}"
            )
        return found

    def shards_at(self, worker: str) -> list[tuple[ModelShardID, Topology]]:
        """The shards that a worker holds."""
        return [(shard, model.layout) for model in self.models for shard, at in model.shards.items() if at == worker]

    @cached_property
    def _routes(self) -> dict[str, str]:
        return {str(shard): worker for model in self.models for shard, worker in model.shards.items()}

    def _check_call(self, call: Call) -> None:
        names = [call.model]
        reallocs = [hook for hook in call.post_hooks if isinstance(hook, ParamRealloc)]
        names += [name for hook in reallocs for name in (hook.source, hook.target)]
        for name in names:
            if name not in self.by_name:
                raise ConfigError(f"call {call.name!r} needs the unknown model {name!r}; {_listed(self.by_name)} exist")
        if self.by_name[call.model].layout.dp > self.batch_size:
            raise ConfigError(
                f"batch_size is {self.batch_size}, but model {call.model!r} has {self.by_name[call.model].layout.dp} "
                "data-parallel ranks, and each needs a sample"
            )
        for hook in reallocs:
            if call.model not in (hook.source, hook.target) or hook.source == hook.target:
                raise ConfigError(
                    f"param_realloc after {call.name!r} must be between {call.model!r} and another model, not from "
                    f"{hook.source!r} to {hook.target!r}"
                )
            source, target = self.by_name[hook.source].layout, self.by_name[hook.target].layout
            if (source.tp, source.pp) != (target.tp, target.pp):
                raise ConfigError(
                    f"param_realloc from {hook.source!r} ({source}) to {hook.target!r} ({target}) needs the same tp "
                    "and pp at both"
                )


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names) or "nothing"
