"""The former name of `averaging.rl.feed`, for scripts of 0.2. It goes with the next version."""

from averaging.rl.feed import *  # noqa: F403
