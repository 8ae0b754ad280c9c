"""Carries batches of scored rollouts from environments to the ranks of a trainer.

The server and both clients use the HTTP API of atroposlib, so each also works with that library's counterpart.
Needs `pip install '.[rl]'`.

Read in this order: `messages` (what travels), `batch_formation` and `run_state` (which groups form a batch, and which
are too old; pure), `database` (the run on disk), `server` (what all requests must pass, and what the routes answer),
`clients` (the trainer's and the environment's side).
"""

from averaging.rl.feed.clients import (
    Batch as Batch,
    BatchFeed as BatchFeed,
    Connection as Connection,
    FeedEnvironment as FeedEnvironment,
    message_in as message_in,
    retry_pauses as retry_pauses,
    split_url as split_url,
)
from averaging.rl.feed.messages import (
    MAX_VERSIONS as MAX_VERSIONS,
    EnvStatus as EnvStatus,
    Posted as Posted,
    Registered as Registered,
    RegisterEnv as RegisterEnv,
    Registration as Registration,
    ScoredData as ScoredData,
)
from averaging.rl.feed.run_state import CommandEvent as CommandEvent
from averaging.rl.feed.server import FeedServer as FeedServer
