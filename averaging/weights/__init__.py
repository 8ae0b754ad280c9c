"""Weights by version: a trainer publishes, others follow. docs/how-to/follow.md is the guide.

Read in this order: `layout` (the tensors of a version), `parts` (of a divided model), `snapshot` (one version) and
`differences` (what changed), `store` (the versions that are kept and sent), `storage` (those in a folder or a bucket),
`publisher` (who gets a version from whom), `download` and `receiver` (the other end), `follower`; then engines that
load versions: `engine_servers`, `vllm_server`, `adapters`.
"""

from averaging.weights.adapters import AdapterServer
from averaging.weights.engine_servers import ServedEngine, SglangServer
from averaging.weights.follower import FOLLOWER_METRICS, Staleness, StalenessWatch, WeightFollower, follower_samples
from averaging.weights.publisher import WeightPublisher
from averaging.weights.receiver import MAX_PAUSE, MIN_PAUSE, FollowerOptions, ModelReceiver
from averaging.weights.snapshot import DividedSnapshot, WeightSnapshot, seal, view_state
from averaging.weights.vllm_server import VLLM_PAUSES, VllmServer

__all__ = [
    "FOLLOWER_METRICS",
    "MAX_PAUSE",
    "MIN_PAUSE",
    "VLLM_PAUSES",
    "AdapterServer",
    "DividedSnapshot",
    "FollowerOptions",
    "ModelReceiver",
    "ServedEngine",
    "SglangServer",
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
