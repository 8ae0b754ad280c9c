"""Weights by version: a trainer publishes, others follow. docs/how-to/follow.md is the guide.

Read in this order: `layout` (the tensors of a version, or parts of them), `snapshot` (one version), `differences` (what
changed), `store` (the versions that are kept), `publisher` and `tree` (who gets a version from whom), `download`,
`receiver`, `model_receiver` and `follower` (the other end).
"""

from averaging.weights.follower import Staleness, WeightFollower
from averaging.weights.model_receiver import ModelReceiver
from averaging.weights.places import LEAST_RATE, Place, SlotTable
from averaging.weights.publisher import WeightPublisher
from averaging.weights.receiver import FollowerOptions
from averaging.weights.snapshot import DividedSnapshot, WeightSnapshot, seal, view_state

__all__ = [
    "LEAST_RATE",
    "DividedSnapshot",
    "FollowerOptions",
    "ModelReceiver",
    "Place",
    "SlotTable",
    "Staleness",
    "WeightFollower",
    "WeightPublisher",
    "WeightSnapshot",
    "seal",
    "view_state",
]
