"""What a master knows: the workers, the models that they hold, and the calls between models. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import ClassVar

from averaging.common import parse_address
from averaging.errors import ConfigError


class HookName(StrEnum):
    DATA_TRANSFER = "data_transfer"  # before a blocking request; the others run after it
    EVALUATE = "evaluate"
    OFFLOAD = "offload"
    PARAM_REALLOC = "param_realloc"
    SAVE = "save"
    AVERAGE = "average"


@dataclass(frozen=True, kw_only=True)
class Hook:
    """Runs after each `every`-th step."""

    name: ClassVar[HookName]
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"the hook {self.name} must run every 1 or more steps, not every {self.every}")


class Evaluate(Hook):
    """Calls `Backend.evaluate`. Its numbers are in the statistics of the call."""

    name = HookName.EVALUATE


class Offload(Hook):
    """Calls `Backend.offload`."""

    name = HookName.OFFLOAD


class Average(Hook):
    """Calls `Backend.average`: the model joins a round with the other sites."""

    name = HookName.AVERAGE


@dataclass(frozen=True, kw_only=True)
class Save(Hook):
    """Calls `Backend.save` with a path in the `save_folder` of the worker, in which `{step}` becomes the step."""

    name = HookName.SAVE
    path: str


@dataclass(frozen=True, kw_only=True)
class ParamRealloc(Hook):
    """Moves parameters between models: target = eta · source + (1 - eta) · target. One of the two makes the call."""

    name = HookName.PARAM_REALLOC
    source: str
    target: str
    eta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.eta <= 1.0:
            raise ConfigError(f"eta of param_realloc must be from 0 to 1, not {self.eta}")


INTERFACES = ("generate", "inference", "train_step")


@dataclass(frozen=True)
class Call:
    """A model function call (MFC): one model computes new tensors of samples, or trains on them.

    Raises:
        ConfigError: The interface is unknown, or the call has no inputs.
    """

    name: str  # for example `actor_gen`
    model: str
    interface: str  # `generate`, `inference` or `train_step`
    inputs: tuple[str, ...]  # names of the tensors that it gets
    outputs: tuple[str, ...] = ()  # names of those that it returns; empty for `train_step`
    post_hooks: tuple[Hook, ...] = ()  # in order

    def __post_init__(self) -> None:
        if self.interface not in INTERFACES:
            names = ", ".join(INTERFACES)
            raise ConfigError(f"interface of call {self.name!r} must be one of {names}, not {self.interface!r}")
        if not self.inputs:
            raise ConfigError(f"call {self.name!r} has no inputs; name the tensors that it gets")


def levels_of(calls: Sequence[Call], data_keys: Sequence[str]) -> list[list[Call]]:
    """The levels of a graph: the calls of one level depend on those of earlier levels, and on the dataset."""
    if not calls:
        raise ConfigError("the plan has no calls")
    makers = dict.fromkeys(data_keys, "the dataset")
    for call in calls:
        for key in call.outputs:
            if key in makers:
                raise ConfigError(f"{key!r} is an output of {call.name!r} and of {makers[key]}; rename one")
            makers[key] = call.name
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for call in calls:
        for key in call.inputs:
            if key not in makers:
                raise ConfigError(f"{key!r}, an input of {call.name!r}, is made by no call and not in the dataset")
        sorter.add(call.name, *(makers[key] for key in call.inputs if key not in data_keys))
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"the calls depend on each other in a cycle: {' → '.join(error.args[1])}") from None
    by_name = {call.name: call for call in calls}
    levels: list[list[Call]] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        levels.append([by_name[name] for name in ready])
        sorter.done(*ready)
    return levels


@dataclass(frozen=True, slots=True)
class Topology:
    """How a model is divided over its workers. Numbers below 1 are a ConfigError."""

    dp: int = 1  # data-parallel ranks
    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline-parallel ranks

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.pp) < 1:
            raise ConfigError(f"{self} must have at least one rank of each kind")

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp


@dataclass(frozen=True, slots=True, order=True)
class ModelShardID:
    """The part of a model at one worker. Its text, such as `actor@dp0-tp0-pp0`, is a handler of requests."""

    model: str
    dp_rank: int = 0
    tp_rank: int = 0
    pp_rank: int = 0
    is_dp_head: bool = field(default=True, compare=False)  # it has the last pipeline rank, and tensor rank 0

    def __str__(self) -> str:
        return f"{self.model}@dp{self.dp_rank}-tp{self.tp_rank}-pp{self.pp_rank}"


@dataclass(frozen=True)
class Model:
    """A model and its workers, each of which may hold several models.

    Attributes:
        workers: Names of its workers, in the order of the data-parallel, then pipeline, then tensor rank.
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
        return self.topology or Topology(dp=max(1, len(self.workers)))

    @cached_property
    def shards(self) -> dict[ModelShardID, str]:
        """The worker of each shard."""
        layout = self.layout
        ranks = itertools.product(range(layout.dp), range(layout.pp), range(layout.tp))
        return {
            ModelShardID(self.name, dp, tp, pp, is_dp_head=pp == layout.pp - 1 and tp == 0): worker
            for (dp, pp, tp), worker in zip(ranks, self.workers, strict=True)
        }

    @property
    def heads(self) -> dict[int, str]:
        """The worker of the DP head of each data-parallel rank."""
        return {shard.dp_rank: worker for shard, worker in self.shards.items() if shard.is_dp_head}


@dataclass(frozen=True, slots=True)
class Placement:
    """What a worker must know of the plan."""

    shards: Sequence[tuple[ModelShardID, Topology]] = ()  # those that it holds, and the topologies of their models
    endpoints: Mapping[str, str] = field(default_factory=dict)  # of all workers, by name
    dp_rank: int = -1  # among the workers that hold a part of the dataset; -1 if it holds none
    dp_size: int = 0  # number of those workers


_NAME = re.compile(r"[A-Za-z0-9][\w./-]{0,99}", re.ASCII)


@dataclass(frozen=True)
class Plan:
    """Everything that a master drives.

    Raises:
        ConfigError: Something is unknown, named twice, or the calls depend on each other in a cycle.
    """

    workers: Mapping[str, str]  # `host:port` by name
    models: tuple[Model, ...]
    calls: tuple[Call, ...]  # of one step
    batch_size: int  # samples in one step
    data_keys: tuple[str, ...]  # names of the tensors that the dataset has

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
                known = ", ".join(self.workers) or "none"
                raise ConfigError(f"model {model.name!r} has the unknown worker {unknown[0]!r}; the plan has {known}")
        for call in self.calls:
            self._check_call(call)
        _ = self.levels  # raises if the calls cannot be ordered

    @cached_property
    def levels(self) -> list[list[Call]]:
        return levels_of(self.calls, self.data_keys)

    @cached_property
    def by_name(self) -> dict[str, Model]:
        return {model.name: model for model in self.models}

    @property
    def data_heads(self) -> list[str]:
        """The workers that hold the dataset: the DP heads of the first call's model."""
        return list(self.by_name[self.levels[0][0].model].heads.values())

    def worker_of(self, handler: str) -> str:
        """The worker to which requests for a handler go, or a ConfigError."""
        if handler in self.workers:
            return handler
        if handler not in self._routes:
            known = ", ".join([*self.workers, *self._routes])
            raise ConfigError(f"{handler!r} is neither a worker nor a shard of the plan; it has {known}")
        return self._routes[handler]

    def placement_of(self, worker: str) -> Placement:
        """What a worker must know of the plan."""
        heads = self.data_heads
        return Placement(
            [(shard, model.layout) for model in self.models for shard, at in model.shards.items() if at == worker],
            dict(self.workers),
            dp_rank=heads.index(worker) if worker in heads else -1,
            dp_size=len(heads),
        )

    @cached_property
    def _routes(self) -> dict[str, str]:
        return {str(shard): worker for model in self.models for shard, worker in model.shards.items()}

    def _check_call(self, call: Call) -> None:
        reallocs = [hook for hook in call.post_hooks if isinstance(hook, ParamRealloc)]
        for name in [call.model, *(name for hook in reallocs for name in (hook.source, hook.target))]:
            if name not in self.by_name:
                known = ", ".join(self.by_name) or "none"
                raise ConfigError(f"call {call.name!r} needs the unknown model {name!r}; the plan has {known}")
        if (ranks := self.by_name[call.model].layout.dp) > self.batch_size:
            raise ConfigError(
                f"batch_size is {self.batch_size}, but model {call.model!r} has {ranks} data-parallel ranks, and each "
                "needs a sample"
            )
        for hook in reallocs:
            if call.model not in (hook.source, hook.target) or hook.source == hook.target:
                raise ConfigError(f"{hook} after {call.name!r} must be between {call.model!r} and another model")
            source, target = self.by_name[hook.source].layout, self.by_name[hook.target].layout
            if (source.tp, source.pp) != (target.tp, target.pp):
                raise ConfigError(f"{hook} between {source} and {target} needs the same tp and pp at both")
