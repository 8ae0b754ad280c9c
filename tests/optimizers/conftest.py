"""The tests of optimizers of other packages, which `make test-optimizers` installs and runs."""

from tests.support.fixtures import nothing_is_left_behind, start
from tests.trainers.conftest import one_thread

__all__ = ["nothing_is_left_behind", "one_thread", "start"]
