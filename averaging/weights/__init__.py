"""Weights by version: a trainer publishes, others follow. docs/how-to/follow.md is the guide.

Read in this order: `layout` (the tensors of a version), `snapshot` (one version), `differences` (what changed),
`store` (the versions that are kept), `publisher` and `tree` (who gets a version from whom), `download`,
`follower_tasks` and `follower` (the other end), `shards` and `follower_shards` (divided models).
"""

from averaging.weights.follower import Staleness, WeightFollower
from averaging.weights.follower_shards import Received, ShardTasks
from averaging.weights.follower_tasks import FollowerOptions
from averaging.weights.layout import WeightManifest, whole_of
from averaging.weights.places import LEAST_RATE, Place, SlotTable
from averaging.weights.publisher import WeightPublisher
from averaging.weights.shards import missing_part
from averaging.weights.snapshot import WeightSnapshot, seal, view_state

__all__ = [
    "LEAST_RATE",
    "FollowerOptions",
    "Place",
    "Received",
    "ShardTasks",
    "SlotTable",
    "Staleness",
    "WeightFollower",
    "WeightManifest",
    "WeightPublisher",
    "WeightSnapshot",
    "missing_part",
    "seal",
    "view_state",
    "whole_of",
]
