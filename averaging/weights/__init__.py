"""Weights by version: a trainer publishes, others follow. docs/how-to/follow.md is the guide.

Read in this order: `layout` (the tensors of a version, or parts of them), `snapshot` (one version), `differences` (what
changed), `store` (the versions that are kept), `publisher` and `tree` (who gets a version from whom), `lanes` and
`download`, `receiver`, `model_receiver` and `follower` (the other end), `follower_metrics`, `vllm_server` (an engine
that loads versions).
"""

from averaging.weights.follower import Staleness, StalenessWatch, WeightFollower
from averaging.weights.follower_metrics import FOLLOWER_METRICS, follower_samples
from averaging.weights.model_receiver import ModelReceiver
from averaging.weights.places import LEAST_RATE, Place, SlotTable
from averaging.weights.publisher import WeightPublisher
from averaging.weights.receiver import MAX_PAUSE, MIN_PAUSE, FollowerOptions
from averaging.weights.snapshot import DividedSnapshot, WeightSnapshot, seal, view_state
from averaging.weights.vllm_server import VLLM_PAUSES, VllmServer

__all__ = [
    "FOLLOWER_METRICS",
    "LEAST_RATE",
    "MAX_PAUSE",
    "MIN_PAUSE",
    "VLLM_PAUSES",
    "DividedSnapshot",
    "FollowerOptions",
    "ModelReceiver",
    "Place",
    "SlotTable",
    "Staleness",
    "StalenessWatch",
    "VllmServer",
    "WeightFollower",
    "WeightPublisher",
    "WeightSnapshot",
    "follower_samples",
    "seal",
    "view_state",
]
