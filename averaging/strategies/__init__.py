"""What is averaged, and when."""

from averaging.strategies.base import Averaging, Strategy
from averaging.strategies.local_sgd import LocalSGD

__all__ = ["Averaging", "LocalSGD", "Strategy"]
