"""The tests of optimizers of other packages, which `make test-optimizers` installs and runs."""

import pytest

from tests.support.fixtures import nothing_is_left_behind, start
from tests.trainers.conftest import one_thread

__all__ = ["nothing_is_left_behind", "one_thread", "start"]


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Looks at these files only with `-m optimizers`: the packages need not be installed for the other tests."""
    return None if config.option.markexpr == "optimizers" else True
