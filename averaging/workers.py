"""The former name of `averaging.rl.workers`, for scripts of 0.2. It goes with the next version."""

from averaging.rl.workers import *  # noqa: F403
