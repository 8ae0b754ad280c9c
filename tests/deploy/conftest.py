"""The tests of deploy/, which `make test-deploy` runs."""

import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Looks at these files only with `-m deploy`: their packages need not be installed for the other tests."""
    return None if config.option.markexpr == "deploy" else True
