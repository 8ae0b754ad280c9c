"""Weights by version: a trainer publishes, others follow. docs/how-to/follow.md is the guide.

Read in this order: `layout` (the tensors of a version, or parts of them), `snapshot` (one version), `differences` (what
changed), `store` (the versions that are kept), `publisher` and `tree` (who gets a version from whom), `download`,
`receiver` and `follower` (the other end), `part_receivers` (a model in parts).
"""

from averaging.weights.follower import Staleness, WeightFollower
from averaging.weights.part_receivers import DividedSnapshot
from averaging.weights.places import LEAST_RATE, Place, SlotTable
from averaging.weights.publisher import WeightPublisher
from averaging.weights.receiver import FollowerOptions, VersionReceiver
from averaging.weights.snapshot import WeightSnapshot, seal, view_state

__all__ = [
    "LEAST_RATE",
    "DividedSnapshot",
    "FollowerOptions",
    "Place",
    "SlotTable",
    "Staleness",
    "VersionReceiver",
    "WeightFollower",
    "WeightPublisher",
    "WeightSnapshot",
    "seal",
    "view_state",
]
