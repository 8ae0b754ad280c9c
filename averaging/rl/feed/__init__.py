"""Carries batches of scored rollouts from environments to the ranks of a trainer.

The server and both clients use the HTTP API of atroposlib, so each also works with that library's counterpart.
Needs `pip install 'averaging[rl]'`.

Read in this order: `messages` (what travels), `versions` (which groups are too old), `batch_formation` and `run_state`
(which groups form a batch; pure), `database` (the run on disk), `routes` (what the server answers; a new route is a
method there), `server` (what all requests must pass), `connection` and `clients` (the trainer's and the environment's
side).
"""

from averaging.rl.feed.clients import Batch, BatchFeed, FeedEnvironment
from averaging.rl.feed.connection import Connection, message_in, retry_pauses, split_url
from averaging.rl.feed.messages import (
    MAX_VERSIONS,
    EnvStatus,
    Posted,
    Registered,
    RegisterEnv,
    Registration,
    ScoredData,
)
from averaging.rl.feed.run_state import CommandEvent
from averaging.rl.feed.server import FeedServer

__all__ = [
    "MAX_VERSIONS",
    "Batch",
    "BatchFeed",
    "CommandEvent",
    "Connection",
    "EnvStatus",
    "FeedEnvironment",
    "FeedServer",
    "Posted",
    "RegisterEnv",
    "Registered",
    "Registration",
    "ScoredData",
    "message_in",
    "retry_pauses",
    "split_url",
]
