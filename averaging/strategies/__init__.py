"""Strategies: what is averaged, and when."""

from averaging.strategies.base import Strategy
from averaging.strategies.diloco import DiLoCo
from averaging.strategies.gradient_averaging import GradientAveraging
from averaging.strategies.local_sgd import LocalSGD

__all__ = ["DiLoCo", "GradientAveraging", "LocalSGD", "Strategy"]
