"""What travels when a master attaches: what a worker must know of the plan, and what the worker holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from averaging.workers.plan import ModelShardID, Plan, Topology
from averaging.workers.samples import KeySpec


@dataclass(frozen=True, slots=True)
class Placement:
    """What a worker must know of the plan.

    Attributes:
        shards: The shards that the worker holds, and the topology of their models.
        endpoints: `host:port` of all workers, by name.
        keys: Dtype and shape of tensors, by name.
        dp_rank: Rank of the worker among those that hold a part of the dataset; -1 if it holds none.
        dp_size: Their number.
        ping_seconds: Interval of the pings of the master.
    """

    shards: Sequence[tuple[ModelShardID, Topology]] = ()
    endpoints: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, KeySpec] = field(default_factory=dict)
    dp_rank: int = -1
    dp_size: int = 0
    ping_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a worker holds.

    Attributes:
        versions: Train steps of each model that is initialized.
        samples: Names of the tensors of each sample.
        lengths: Length of each sample.
    """

    versions: dict[str, int]
    samples: dict[str, list[str]]
    lengths: dict[str, int]


def placement_of(plan: Plan, worker: str, ping_seconds: float) -> Placement:
    """What a worker must know of a plan."""
    heads = list(plan.data_model.heads.values())
    return Placement(
        shards=plan.shards_at(worker),
        endpoints=dict(plan.workers),
        keys=dict(plan.keys),
        dp_rank=heads.index(worker) if worker in heads else -1,
        dp_size=len(heads),
        ping_seconds=ping_seconds,
    )
