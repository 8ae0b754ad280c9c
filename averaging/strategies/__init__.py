"""Strategies: what is averaged, and when.

Read in this order: `base` (what a strategy implements), `schedule` (when its rounds are due), `local_sgd` (the
simplest), `gradient_averaging`, `fragments` and `diloco`. They share `catch_up` and `lockstep`. `run` is the start and
the end of training.
"""

from averaging.strategies.base import Strategy, check_unused, common_options
from averaging.strategies.diloco import DiLoCo
from averaging.strategies.gradient_averaging import GradientAveraging
from averaging.strategies.local_sgd import LocalSGD
from averaging.strategies.lockstep import LockstepStrategy
from averaging.strategies.run import RunEnd, RunStart, wait_for_peers
from averaging.strategies.schedule import AveragingSchedule

__all__ = [
    "AveragingSchedule",
    "DiLoCo",
    "GradientAveraging",
    "LocalSGD",
    "LockstepStrategy",
    "RunEnd",
    "RunStart",
    "Strategy",
    "check_unused",
    "common_options",
    "wait_for_peers",
]
