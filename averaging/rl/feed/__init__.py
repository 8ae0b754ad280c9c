"""Carries batches of scored rollouts from environments to the ranks of a trainer.

The server and both clients use the HTTP API of atroposlib, so each also works with that library's counterpart.
Needs `pip install '.[rl]'`.

Read in this order: `messages` (what travels), `batch_formation` and `run_state` (which groups form a batch, and which
are too old; pure), `database` (the run on disk), `server` (what all requests must pass, and what the routes answer),
`clients` (the trainer's and the environment's side).
"""

from averaging.rl.feed.clients import Batch, BatchFeed, Connection, FeedEnvironment, message_in, retry_pauses, split_url
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
