"""Strategies: what is averaged, and when.

Read in this order: `base` (what a strategy implements), `local_sgd` (the simplest), `gradient_averaging`, `diloco`.
They share `run_start`, `catch_up`, `lockstep` and `run_end`.
"""

from averaging.strategies.base import Adoption, Strategy
from averaging.strategies.diloco import DiLoCo
from averaging.strategies.gradient_averaging import GradientAveraging
from averaging.strategies.local_sgd import LocalSGD
from averaging.strategies.run_end import RunEnd
from averaging.strategies.run_start import RunStart, SiteStart

__all__ = [
    "Adoption",
    "DiLoCo",
    "GradientAveraging",
    "LocalSGD",
    "RunEnd",
    "RunStart",
    "SiteStart",
    "Strategy",
]
