"""Carries batches of scored rollouts from environments to the ranks of a trainer.

The server and both clients use the HTTP API of atroposlib, so each also works with that library's counterpart.
Needs `pip install 'averaging[rl]'`.
"""

from averaging.rl.feed.environment import FeedEnvironment
from averaging.rl.feed.messages import EnvStatus, Registered, RegisterEnv, Registration, ScoredData
from averaging.rl.feed.routes import ServerLimits
from averaging.rl.feed.server import FeedServer
from averaging.rl.feed.trainer import Batch, BatchFeed

__all__ = [
    "Batch",
    "BatchFeed",
    "EnvStatus",
    "FeedEnvironment",
    "FeedServer",
    "RegisterEnv",
    "Registered",
    "Registration",
    "ScoredData",
    "ServerLimits",
]
