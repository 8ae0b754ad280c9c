"""Rollouts of environments of verifiers, posted as groups to a feed with the version of the weights that made each.

Needs `pip install '.[rollouts]'`, and an engine that tells token ids: `averaging serve`, or vLLM.

Read in this order: `engine` (requests that wait for an engine that is away, and versions), `environment` (tasks,
rollouts of verifiers, and their scored sequences), `chat_harness` (the agent of environments that bring none), `runner`
(groups, their way to the feed, and what is counted and told).
"""

from averaging.rl.rollouts.environment import RolloutOptions as RolloutOptions, TruncatedMode as TruncatedMode
from averaging.rl.rollouts.runner import (
    ROLLOUT_METRICS as ROLLOUT_METRICS,
    Rollouts as Rollouts,
    RolloutTally as RolloutTally,
)
